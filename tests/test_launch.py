"""The launch scripts: what they print and refuse, and that set-up is done once and only when
needed. What they do is in test_launch_cluster.py."""

import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import scripts
import yaml
from levels import slow
from packaging.requirements import Requirement
from scripts import LAUNCH, ODD, ROOT, THIS_PYTHON, bash, executable, link_tools, on_path

from dapo_jax.pods import slices

PRINTED = (ROOT / "tests/data/launch.txt").read_text()
BLOCKS = dict(re.findall(r"^\$ ([^\n]*)\n(.*?\n)(?=\$ |\n|\Z)", PRINTED, re.M | re.S))
NAMES = f"at=(--name=n --zone=z) job=(--name=dapo --image=a/b:c) odd=({shlex.join(ODD)})"


@pytest.fixture
def checkout(tmp_path) -> Path:
    return scripts.make_checkout(tmp_path)


@pytest.fixture
def tools(tmp_path) -> Path:
    return scripts.make_tools(tmp_path)


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Path:
    """The scripts in a checkout of their own."""
    launch = scripts.make_checkout(tmp_path_factory.mktemp("launch")) / "launch"
    for name in ("python3", "python"):  # without dapo_jax, quickly
        executable(launch / name, "#!/bin/sh\nexit 1\n")
    return launch


def plain(line: str, root: Path) -> str:
    """A command in one spelling of its quotes, and of those of a command in it for the hosts;
    folders that differ between machines get a name."""
    mark = "+ " if line.startswith("+ ") else ""
    if not mark and not line.startswith(("env ", "sbatch ", "srun ")):
        return line
    command, *document = line.removeprefix(mark).split(" <<")
    words = [word.replace(str(root), "ROOT") for word in shlex.split(command)]
    words = [re.sub(r"^/\S+\.tar\.gz$", "TMP", word) for word in words]
    for i, word in enumerate(words):
        if word.startswith("--command="):
            words[i] = "--command=" + shlex.join(shlex.split(word.partition("=")[2]))
    return mark + " <<".join([shlex.join(words), *document])


def printed(typed: str, launch: Path, cwd: Path) -> tuple[int, str]:
    """(exit status, both streams) of a line that is typed where the scripts are on PATH."""
    env = {"PATH": on_path(launch), "HOME": "/home/someone", "XDG_CACHE_HOME": "", "XLA_FLAGS": ""}
    done = bash("-c", f"{NAMES}; {typed}", cwd=cwd, **env)
    said = [plain(line, launch.parent) for line in (done.stdout + done.stderr).split("\n")]
    return done.returncode, "".join(line + "\n" for line in said if line)


@pytest.mark.parametrize("typed", BLOCKS)
def test_what_is_printed(typed, launch, tmp_path):
    """What is wrong is one line, and nothing is made."""
    status, said = printed(typed, launch, tmp_path)
    assert said == BLOCKS[typed] and not list(tmp_path.iterdir())
    refused = said.startswith("error: ")
    assert status == 2 * refused and (not refused or said.count("\n") == 1)


def test_kubernetes_gets_the_words_that_were_typed(launch, tmp_path):
    """Through YAML, and through what it makes of an argument: $$ is a $, $(NAME) a variable, any
    other $ itself (its docs on dependent environment variables)."""
    odd = "--config.x=a\\b\n\tc\r\u00e4\u20ac $(A)$$(B)$ && @args@"
    line = f'gke.sh run "${{job[@]}}" --type=v6e-8 --dry-run -- "${{odd[@]}}" {shlex.quote(odd)}'
    _, said = printed(line + " 2>&1 | grep -E '^ *args: '", launch, tmp_path)
    variable = lambda m: "$" if m[0] == "$$" else "VALUE"
    words = [re.sub(r"\$\$|\$\([^)]*\)", variable, x) for x in yaml.safe_load(said)["args"]]
    assert words[1:] == [*ODD, odd]


def test_the_job_of_slurm_goes_into_the_queue_again_only_where_it_was_told_to_leave(tmp_path):
    done = bash(LAUNCH / "slurm.sh", "--nodes=4", "--dry-run", "--", *ODD)
    job = done.stdout.partition(' <<"JOB"\n')[2].removesuffix("JOB\n")
    note = "import json, sys; print(json.dumps(sys.argv[1:]))"
    executable(tmp_path / "srun", f"#!/bin/sh\npython3 -c '{note}' \"$@\"\nexit $CODE\n")
    executable(tmp_path / "scontrol", "#!/bin/sh\necho scontrol $*\n")
    for code, requeued in ((0, []), (75, ["scontrol requeue 7"]), (1, [])):
        ran = bash("-c", job, cwd=tmp_path, PATH=on_path(tmp_path), CODE=code, SLURM_JOB_ID=7)
        words, *rest = ran.stdout.splitlines()
        assert json.loads(words)[-3:] == ODD and rest == requeued and ran.returncode == code


def test_quickstart_runs_what_the_dry_run_prints(checkout, tools, tmp_path):
    """From another folder, with a stand-in for dapo_jax.train, which prints what it was given."""
    train = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    executable(tmp_path / "dapo_jax/train.py", train)
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    script = os.path.relpath(checkout / "launch/quickstart.sh", tmp_path)
    flag, env = "--config.name=a 'b' $c", {"PATH": on_path(tools)}
    words = shlex.split(bash(script, flag, "--dry-run", cwd=tmp_path, **env).stdout)
    assert not (checkout / ".venv").exists()  # a dry run changes nothing
    at = words.index(f"{checkout}/.venv/bin/python")
    done = bash(script, flag, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    found, arguments = json.loads(done.stdout)
    assert arguments == words[at + 3 :] and arguments[0].startswith(f"--config={checkout}/configs/")
    wanted = dict(word.split("=", 1) for word in words[1:at])
    assert len(wanted) == 5 and wanted.items() <= found.items()


# Topology, hosts, chips a host, accelerator, machine type and runtime, as Google's pages on TPU
# versions and on TPUs in GKE give them.
DOCUMENTED = (ROOT / "tests/data/documented_slices.txt").read_text().splitlines()


def test_one_table_of_slices():
    """launch/slice.sh and pods/slices.py agree on all slices."""
    names = [
        slices.Pod(family, sides).cloud
        for family, known in slices.FAMILIES.items()
        for sides in known.shapes
    ]
    code = """
    cd "$1"; shift; source launch/common.sh; source launch/slice.sh
    for name in "$@"; do
        dapo_slice "$name"; echo "$type $shape $hosts $chips"
    done
    """
    done = bash("-euo", "pipefail", "-c", code, "-", ROOT, *names)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(names) > 100
    for name, line in zip(names, lines, strict=True):
        pod, (cloud, shape, hosts, chips, *_) = slices.parse(name), line.split()
        assert (cloud, shape) == (name, "x".join(map(str, pod.sides)))
        assert int(hosts) * int(chips) == pod.chips


def test_the_launchers_ask_for_the_slices_that_are_documented(launch, tmp_path):
    """And each training for as many processes as there are hosts."""
    line = '%s run "${%s[@]}" --type=$x --dry-run -- "${odd[@]}" 2>&1; '
    both = line % ("tpu_vm.sh", "at") + line % ("gke.sh", "job")
    types = " ".join(line.split()[0] for line in DOCUMENTED)
    _, said = printed(f"for x in {types}; do echo == $x; {both} done", launch, tmp_path)
    words = (
        r"accelerator-type=(\S+)", r"tpu-topology: (\w+)}", r"parallelism: (\d+)", r"tpu: (\d+)",
        r"tpu-accelerator: (\S+),", r"machine type (\S+),", r"runtime-version=(\S+)",
    )  # fmt: skip
    for line, text in zip(DOCUMENTED, said.split("== ")[1:], strict=True):
        assert " ".join(re.search(word, text)[1] for word in words) == line
        assert {*re.findall(r"num_processes=(\d+)", text)} == {line.split()[2]}


HOSTILE = tomllib.loads((ROOT / "tests/data/hostile.toml").read_text())


@pytest.mark.parametrize("script", [*map(slow, HOSTILE["typed"])])
def test_a_hostile_flag_runs_nothing_and_is_refused_in_one_line(script, launch, tmp_path):
    """Any value of any flag; only flags that take any text may take it."""
    declared = re.search(r'^dapo_flags "(.*?)" "', (launch / script).read_text(), re.M | re.S)
    cases = dict.fromkeys(HOSTILE["stray"] if script != "test.sh" else (), ("", "x"))  # pytest's
    for flag in (HOSTILE["flags"].get(script) or declared[1]).split():
        name, kind = flag.split("=", 1)
        values = HOSTILE["values"] + HOSTILE["numbers"] * kind.startswith("number")
        cases |= {f"--{name}={x}": (kind, x) for x in values}
    code = rf"""{NAMES}; script=$1; shift
    for case in "$@"; do
        (set -- {HOSTILE["typed"][script]}; source "$script") >out 2>err </dev/null
        printf '%s\0' "$?" "$(<out)" "$(<err)"
    done"""
    env = {"PATH": on_path(launch), "HOME": tmp_path}
    done = bash("-c", code, "-", launch / script, *cases, cwd=tmp_path, **env)
    answers = iter(done.stdout.split("\0")[:-1])
    for (case, (kind, x)), status, out, err in zip(cases.items(), *[answers] * 3, strict=True):
        free = kind in ("any", "any0", "text")
        if (free and x.isprintable()) if x else kind in ("any0", "word0"):
            assert status == "0", (case, err)
        elif not (x and free):
            assert status == "2", case
        assert status == "0" or (out == "" and re.fullmatch("error: .*", err)), case
    assert {path.name for path in tmp_path.iterdir()} == {"out", "err"}


@pytest.fixture
def set_up(checkout, tools):
    """Sources common.sh and sets up: the completed process, and the fake uv's calls so far."""

    def run(*args, path=None, root=checkout):
        code = 'source "$1/launch/common.sh"; shift; dapo_setup "$@"; echo "$DAPO_PYTHON"'
        env = {"PATH": path or on_path(tools)}
        done = bash("-euo", "pipefail", "-c", code, "-", root, *args, cwd=tools, **env)
        log = tools.parent / "uv.log"
        return done, log.read_text().splitlines() if log.exists() else []

    return run


def install(root, extra="") -> str:
    return f"pip install --python {root}/.venv/bin/python -c requirements.txt -e .{extra}"


def test_setup_installs_once(checkout, tools, set_up):
    done, calls = set_up()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{checkout}/.venv/bin/python"
    assert calls[0].startswith("venv ") and calls[0].endswith(f"{checkout}/.venv")
    assert calls[1:] == [install(checkout)]
    done, calls = set_up()
    assert (done.returncode, done.stderr, len(calls)) == (0, "", 2)
    for extra, more in (("test,tpu", ["[test,tpu]"]), ("tpu", []), ("test,tpu", []), ("", [])):
        _, found = set_up(extra)  # those that are not yet there
        assert found == (calls := calls + [install(checkout, x) for x in more])
    with (checkout / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    _, found = set_up()
    assert found == [*calls, install(checkout)]
    assert len(list((checkout / ".venv").glob(".dapo_jax-*"))) == 1
    moved = checkout.rename(checkout.with_name("moved"))
    assert set_up(root=moved)[1] == [*found, install(moved)]
    executable(tools / "uv", "#!/bin/sh\nexit 1\n")
    for _ in range(2):  # what has failed is tried again
        done, _ = set_up("tpu", root=moved)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("error: the install failed")


def test_setup_keeps_a_venv_that_is_there_and_refuses_a_broken_one(checkout, set_up):
    executable(checkout / ".venv/bin/python", "#!/bin/sh\nexit 127\n")
    done, calls = set_up()
    assert (done.returncode, calls) == (1, [])
    assert "remove that folder and run this again" in done.stderr
    executable(checkout / ".venv/bin/python", THIS_PYTHON)
    done, calls = set_up()
    assert (done.returncode, calls) == (0, [install(checkout)]), done.stderr


def test_setup_looks_for_a_python_that_runs(checkout, tools, set_up):
    """It passes over one like a pyenv shim of a version that is not activated, which only prints an
    error; without any, and without uv, it says so."""
    executable(tools / "python3", "#!/bin/sh\necho 'python3: command not found' >&2\nexit 127\n")
    executable(tools / "python3.13", THIS_PYTHON)
    link_tools(tools, "bash", "cat", "cksum", "dirname", "cp", "grep", "mkdir", "rm")
    done, calls = set_up(path=tools)
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"venv --quiet --python {sys.executable} {checkout}/.venv"
    shutil.rmtree(checkout / ".venv")
    for name in ("uv", "python3.13"):
        (tools / name).unlink()
    done, _ = set_up(path=tools)
    assert done.returncode == 69
    assert done.stderr.startswith("error: no Python 3.11-3.14 found")


def test_the_image_has_what_a_host_has():
    """`worker.sh install` makes both, for one Python; for that one jax and one libtpu are pinned,
    which are those that the published compiles were made with. One for GPUs can be asked for."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert len(copied) > 3 and all((ROOT / word).exists() for word in copied)
    (run,) = (line for line in lines if line.startswith("RUN"))
    # The versions are its own.
    assert re.search(r' bash launch/worker.sh install "\$EXTRA" +&& ', run)
    offered = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(), re.M)
    assert "ARG EXTRA=tpu" in lines and {*re.findall(r"EXTRA=(\w+)", "\n".join(lines))} <= {
        *offered
    }
    worker = "".join((ROOT / name).read_text() for name in copied if name.endswith(".sh"))
    needed = {*re.findall(r"launch/\w+\.(?:sh|txt)", worker)}
    assert len(needed) > 2 and needed <= {*copied}
    (python,) = re.findall(r"DAPO_TPU_PYTHON:-([\d.]+)", worker)
    assert any(line.startswith(f"FROM python:{python}-") for line in lines)
    here = {"python_version": python, "sys_platform": "linux"}
    pins = (ROOT / "requirements.txt").read_text()
    pins = [Requirement(x) for x in re.findall("^(?:jax|libtpu)==.*", pins, re.M)]
    jax, libtpu = (str(x.specifier)[2:] for x in pins if x.marker.evaluate(here))
    assert f"jax {jax}, libtpu {libtpu}." in (ROOT / "docs/results/pods.md").read_text()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= {*ignored}
    for needed in ("launch/worker.sh", "configs", "dapo_jax", "requirements.txt"):
        assert not any(Path(needed).match(x) for x in ignored)
