"""The launch scripts: what they would run, and that set-up is done once and only when needed."""

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [ROOT / ".ci/run", *sorted((ROOT / "launch").glob("*.sh"))]
THIS_PYTHON = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'


def bash(*command, cwd, **env) -> subprocess.CompletedProcess:
    """Run a command with the caller's JAX, XLA and glibc settings removed, and `env` added."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "GLIBC_", "TF_CPP_"))}
    return subprocess.run(
        ["bash", *map(str, command)],
        cwd=cwd,
        env=kept | {k: str(v) for k, v in env.items()},
        capture_output=True,
        text=True,
        timeout=300,
    )


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout with what the scripts read only, at a path that an unquoted expansion would break;
    its dapo_jax is empty."""
    root = tmp_path / "a checkout [with] 'odd' $names"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "dapo_jax/pods").mkdir(parents=True)
    (root / "dapo_jax/__init__.py").write_text("")
    (root / "configs").mkdir()
    configs = ("configs/quickstart.py", "configs/dapo_qwen2_5_7b.py")
    for name in ("requirements.txt", "setup.py", "dapo_jax/pods/slices.txt", *configs):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def tools(tmp_path) -> Path:
    """A folder for PATH with a fake uv, which makes a 'venv' of this Python and logs its calls."""
    folder = tmp_path / "tools"
    executable(folder / "this-python", THIS_PYTHON)
    executable(
        folder / "uv",
        """#!/usr/bin/env bash
        here="$(dirname "$0")"
        printf '%s\\n' "$*" >>"$here/../uv.log"
        if [[ $1 == venv ]]; then
            mkdir -p "${@: -1}/bin"
            cp "$here/this-python" "${@: -1}/bin/python"
        fi
        """,
    )
    return folder


def dry_run(*args, cwd=ROOT, script=ROOT / "launch/quickstart.sh", **env):
    """The environment and the arguments of the command that quickstart.sh would run."""
    done = bash(script, "--dry-run", *args, cwd=cwd, **env)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words.pop(0) == "env"
    split = next(i for i, word in enumerate(words) if word.endswith("/bin/python"))
    return dict(word.split("=", 1) for word in words[:split]), words[split:]


# --------------------------------------------------------------------------------------------------
# quickstart.sh
# --------------------------------------------------------------------------------------------------


def test_quickstart_defaults():
    env, command = dry_run(HOME="/home/someone", XDG_CACHE_HOME="")
    assert command == [
        f"{ROOT}/.venv/bin/python",
        "-m",
        "dapo_jax.train",
        f"--config={ROOT}/configs/quickstart.py",
        f"--workdir={ROOT}/runs/quickstart",
    ]
    assert env == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": "/home/someone/.cache/dapo_jax/xla",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def test_quickstart_passes_flags_through():
    _, command = dry_run(
        "--config.seed=3",
        "--workdir=/data/my run",
        "--noconfig.filter",
        "--config=other.py",
        "--config.name=a 'b' $c",
    )
    assert command[3:] == [
        "--config=other.py",
        "--workdir=/data/my run",
        "--config.seed=3",
        "--noconfig.filter",
        "--config.name=a 'b' $c",
    ]


def test_quickstart_respects_what_the_user_set():
    env, _ = dry_run(
        GLIBC_TUNABLES="glibc.malloc.arena_max=2", JAX_COMPILATION_CACHE_DIR="", XDG_CACHE_HOME="/c"
    )
    assert env["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    assert "JAX_COMPILATION_CACHE_DIR" not in env  # set, to nothing: no cache
    assert "GLIBC_TUNABLES" not in dry_run(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[0]


def test_quickstart_from_another_folder(checkout, tmp_path):
    script = os.path.relpath(checkout / "launch/quickstart.sh", tmp_path)
    _, command = dry_run(cwd=tmp_path, script=script)
    assert command[0] == f"{checkout}/.venv/bin/python"
    assert command[3] == f"--config={checkout}/configs/quickstart.py"
    assert not (checkout / ".venv").exists()  # a dry run changes nothing


def test_quickstart_runs_what_the_dry_run_prints(checkout, tools, tmp_path):
    """With a stand-in for dapo_jax.train, which prints what it was given."""
    train = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    executable(tmp_path / "dapo_jax/train.py", train)
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    script, flag = checkout / "launch/quickstart.sh", "--config.name=a 'b' $c"
    done = bash(script, flag, cwd=tmp_path, PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    env, arguments = json.loads(done.stdout)
    env_printed, command_printed = dry_run(flag, cwd=tmp_path, script=script)
    assert arguments == command_printed[3:]
    assert len(env_printed) == 5 and env_printed.items() <= env.items()


@pytest.mark.parametrize("bad", ["--wrokdir=x", "--workdir", "--config=", "runs/mine", "--config."])
def test_quickstart_rejects_unknown_arguments(bad):
    done = bash(ROOT / "launch/quickstart.sh", "--dry-run", bad, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: unknown argument '{bad}'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_help(script):
    done = bash(ROOT / "launch" / script, "--help", cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: launch/{script}")


# --------------------------------------------------------------------------------------------------
# Set-up
# --------------------------------------------------------------------------------------------------


def run_setup(checkout, tools, *args, path=None):
    """Source common.sh and set up; the completed process, and the fake uv's calls so far."""
    code = 'source "$1/launch/common.sh"; shift; dapo_setup "$@"; echo "$DAPO_PYTHON"'
    path = f"{tools}:{os.environ['PATH']}" if path is None else path
    done = bash("-euo", "pipefail", "-c", code, "-", checkout, *args, cwd=tools, PATH=path)
    log = tools.parent / "uv.log"
    return done, log.read_text().splitlines() if log.exists() else []


def test_setup_installs_once(checkout, tools):
    done, calls = run_setup(checkout, tools)
    assert done.returncode == 0, done.stderr
    python = f"{checkout}/.venv/bin/python"
    assert done.stdout.strip() == python
    assert calls[0].startswith("venv ") and calls[0].endswith(f"{checkout}/.venv")
    assert calls[1:] == [f"pip install --python {python} -c requirements.txt -e ."]

    done, calls = run_setup(checkout, tools)
    assert (done.returncode, done.stderr, len(calls)) == (0, "", 2)

    _, calls = run_setup(checkout, tools, "test")  # an extra not yet there
    assert calls[2:] == [f"pip install --python {python} -c requirements.txt -e .[test]"]
    run_setup(checkout, tools, "tpu")
    run_setup(checkout, tools)
    _, calls = run_setup(checkout, tools, "test")
    assert len(calls) == 4

    with (checkout / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    _, calls = run_setup(checkout, tools)
    assert len(calls) == 5
    assert len(list((checkout / ".venv").glob(".dapo_jax-*"))) == 1


def test_setup_after_a_failed_install_tries_again(checkout, tools):
    run_setup(checkout, tools)
    (checkout / "setup.py").write_text("# other\n")
    executable(tools / "uv", "#!/bin/sh\nexit 1\n")
    for _ in range(2):
        done, _ = run_setup(checkout, tools)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("error: the install failed")


def test_setup_after_a_move_installs_again(checkout, tools):
    run_setup(checkout, tools)
    moved = checkout.rename(checkout.with_name("moved"))
    _, calls = run_setup(moved, tools)
    assert calls[2:] == [f"pip install --python {moved}/.venv/bin/python -c requirements.txt -e ."]


def test_setup_keeps_a_venv_that_is_already_there(checkout, tools):
    python = checkout / ".venv/bin/python"
    executable(python, THIS_PYTHON)
    done, calls = run_setup(checkout, tools)
    assert done.returncode == 0, done.stderr
    assert calls == [f"pip install --python {python} -c requirements.txt -e ."]


def test_setup_refuses_a_broken_venv(checkout, tools):
    executable(checkout / ".venv/bin/python", "#!/bin/sh\nexit 127\n")
    done, calls = run_setup(checkout, tools)
    assert (done.returncode, calls) == (1, [])
    assert "remove that folder and run this again" in done.stderr


def test_setup_passes_over_a_python_that_does_not_run(checkout, tools):
    """As a pyenv shim of a version that is not activated: on PATH, and it only prints an error."""
    executable(tools / "python3", "#!/bin/sh\necho 'python3: command not found' >&2\nexit 127\n")
    executable(tools / "python3.13", THIS_PYTHON)
    for tool in ("bash", "cat", "cksum", "dirname", "cp", "grep", "mkdir", "rm"):
        (tools / tool).symlink_to(shutil.which(tool))
    done, calls = run_setup(checkout, tools, path=tools)
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"venv --quiet --python {sys.executable} {checkout}/.venv"


def test_setup_without_any_python_says_so(checkout, tools):
    (tools / "uv").unlink()
    for tool in ("bash", "cat", "cksum", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool))
    done, _ = run_setup(checkout, tools, path=tools)
    assert done.returncode == 69
    assert done.stderr.startswith("error: no Python 3.11-3.14 found")


def test_setup_rejects_an_unsupported_version(checkout, tools):
    done, calls = run_setup(checkout, tools, "", "3.9")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith("error: --python=3.9: not supported; choose 3.11")


# --------------------------------------------------------------------------------------------------
# All scripts
# --------------------------------------------------------------------------------------------------


def test_shellcheck():
    found = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(found) if found.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (it is in the extra 'test')")
    done = subprocess.run(
        [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", *map(str, SCRIPTS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
