"""The launch scripts: what they print and refuse, and that set-up is done once and only when
needed. What they do is in test_launch_cluster.py."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import (
    LAUNCH,
    ODD,
    ROOT,
    THIS_PYTHON,
    bash,
    commands_in,
    executable,
    link_tools,
    make_checkout,
    make_tools,
    on_path,
)

from dapo_jax.pods import slices

SCRIPTS = sorted(LAUNCH.glob("*.sh"))
COMMANDS = [p.name for p in SCRIPTS if "usage: launch/" in p.read_text()]


@pytest.fixture
def checkout(tmp_path) -> Path:
    return make_checkout(tmp_path)


@pytest.fixture
def tools(tmp_path) -> Path:
    return make_tools(tmp_path)


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Path:
    """The scripts in a checkout of their own."""
    return make_checkout(tmp_path_factory.mktemp("launch")) / "launch"


# --------------------------------------------------------------------------------------------------
# Dry runs
# --------------------------------------------------------------------------------------------------

QUEUED = ["gcloud", "compute", "tpus", "queued-resources"]
TPU_VM = ["gcloud", "compute", "tpus", "tpu-vm"]
WHERE = ["--zone=z", "--quiet"]
TAR = ["tar", "-czf", "TMP", "-C", "ROOT", "--exclude=./.git", "--exclude=./.venv*"]
TAR += ["--exclude=./runs", "--exclude=__pycache__", "--exclude=./run.*", "."]
INSTALL = "mkdir -p dapo_jax && tar -xzf dapo_jax.tar.gz -C dapo_jax && "
INSTALL += "bash dapo_jax/launch/worker.sh install tpu"
START = "bash dapo_jax/launch/worker.sh start " + shlex.join(ODD)
FOLLOW = "bash dapo_jax/launch/worker.sh follow"


def create(type: str, runtime: str, *more: str, named=("--node-id=n",), where=WHERE) -> list[str]:
    kind = [f"--accelerator-type={type}", f"--runtime-version={runtime}"]
    return [*QUEUED, "create", "n", *where, *named, *kind, *more]


def copy(node: str, *where: str) -> list[str]:
    return [*TPU_VM, "scp", "TMP", f"{node}:dapo_jax.tar.gz", *(where or WHERE), "--worker=all"]


def ssh(node: str, worker, command: str, *where: str) -> list[str]:
    last = [f"--worker={worker}", f"--command={command}"]
    return [*TPU_VM, "ssh", node, *(where or WHERE), *last]


RSYNC = ["gcloud", "storage", "rsync", "--recursive"]
V5P, V6E = ("v5p-256", "v2-alpha-tpuv5"), ("v6e-8", "v2-alpha-tpuv6e")
NODES = ("--node-count=2", "--node-prefix=n")
PROJECT = ["--zone=z", "--project=p", "--quiet"]
# Values with commas and equals signs as they are.
GIVEN = ["--service-account=a@p.iam.gserviceaccount.com", "--scopes=cloud-platform"]
GIVEN += ["--network=n1", "--subnetwork=n2", "--tags=t1,t2", "--labels=team=rl,run=a"]
GIVEN += ["--data-disk=source=projects/p/zones/z/disks/d,mode=read-only"]
GIVEN += ["--valid-until-duration=6h"]
INTERNAL = [*WHERE, "--internal-ip"]  # of hosts that are reached from within their network
DRY_RUNS = {
    "a slice made, used and deleted": (
        ["run", "--project=p", "--type=v5p-256", "--spot", "--prepare=echo 'a b'", "--delete"],
        [
            create(*V5P, "--spot", where=PROJECT), TAR, copy("n", *PROJECT),
            ssh("n", "all", f"{INSTALL} && echo 'a b'", *PROJECT), ssh("n", "all", START, *PROJECT),
            ssh("n", 0, f"{FOLLOW} 0", *PROJECT), [*QUEUED, "delete", "n", *PROJECT, "--force"],
        ],
    ),
    "two slices: each step on both nodes, the log from the first": (
        ["run", "--type=2xv5p-256"],
        [
            create(*V5P, named=NODES), TAR, copy("n-0"), copy("n-1"),
            ssh("n-0", "all", INSTALL), ssh("n-1", "all", INSTALL),
            ssh("n-0", "all", START), ssh("n-1", "all", START), ssh("n-0", 0, f"{FOLLOW} 0"),
        ],
    ),
    "two slices stopped": (
        ["stop", "--type=2xv5p-256"],
        [ssh(f"n-{i}", "all", "bash dapo_jax/launch/worker.sh stop") for i in (0, 1)],
    ),
    "what gcloud takes": (
        ["run", "--type=v6e-8", *reversed(GIVEN), "--internal-ips"],
        [
            create(*V6E, "--internal-ips", *GIVEN), TAR, copy("n", *INTERNAL),
            ssh("n", "all", INSTALL, *INTERNAL), ssh("n", "all", START, *INTERNAL),
            ssh("n", 0, f"{FOLLOW} 0", *INTERNAL),
        ],
    ),
    "logs through a tunnel": (
        ["logs", "--worker=3", "--ssh=iap"],
        [["gcloud", "alpha", *ssh("n", 3, FOLLOW, *WHERE, "--tunnel-through-iap")[1:]]],
    ),
    "a run without its checkpoints": (
        ["fetch", "--workdir=gs://b/x", "--to=my dir"],
        [
            ["mkdir", "-p", "--", "my dir"],
            [*RSYNC, "--exclude=(checkpoints|xla)/.*", "gs://b/x", "my dir"],
        ],
    ),
    "a whole run": (
        ["fetch", "--workdir=gs://b/x", "--to=d", "--checkpoints"],
        [["mkdir", "-p", "--", "d"], [*RSYNC, "--exclude=xla/.*", "gs://b/x", "d"]],
    ),
}  # fmt: skip


def plain(words: list[str], root: Path) -> list[str]:
    """One spelling of a remote command's quotes, and of folders that differ between machines."""
    read = lambda w: ["--command", *shlex.split(w)] if w.startswith("--command=") else [w]
    known = lambda w: "ROOT" if w == str(root) else "TMP" if w.endswith(".tar.gz") else w
    return [known(x) if ":" not in x else x for word in words for x in read(word)]


@pytest.mark.parametrize(("flags", "commands"), DRY_RUNS.values(), ids=DRY_RUNS)
def test_tpu_vm_prints_its_commands(flags, commands, launch):
    where = [] if flags[0] == "fetch" else ["--name=n", "--zone=z"]
    done = bash(launch / "tpu_vm.sh", *where, *flags, "--dry-run", "--", *ODD)
    assert done.returncode == 0, done.stderr
    found = [plain(words, launch.parent) for words in commands_in(done.stderr)]
    assert found == [plain(words, launch.parent) for words in commands]


def test_sbatch_and_the_job_it_gets(tmp_path):
    flags = ("--nodes=4", "--gpus=8", "--partition=a b", "--constraint=[a|b]*2&c", "--dry-run")
    done = bash(LAUNCH / "slurm.sh", *flags, "--", *ODD)
    assert done.returncode == 0, done.stderr
    head, _, job = done.stdout.partition(' <<"JOB"\n')
    assert shlex.split(head) == [
        "sbatch", "--job-name=dapo_jax", "--nodes=4", "--ntasks-per-node=8", "--time=24:00:00",
        "--signal=TERM@120", "--requeue", "--open-mode=append", "--gpus-per-node=8",
        "--partition=a b", "--constraint=[a|b]*2&c",
    ]  # fmt: skip
    # The script itself, with an srun that notes its words, and a scontrol.
    note = "import json, sys; print(json.dumps(sys.argv[1:]))"
    executable(tmp_path / "srun", f"#!/bin/sh\npython3 -c '{note}' \"$@\"\nexit $CODE\n")
    executable(tmp_path / "scontrol", "#!/bin/sh\necho scontrol $*\n")
    script, path = job.removesuffix("JOB\n"), on_path(tmp_path)
    for code, requeued in ((0, []), (75, ["scontrol requeue 7"]), (1, [])):
        ran = bash("-c", script, cwd=tmp_path, PATH=path, CODE=code, SLURM_JOB_ID=7)
        words, *rest = ran.stdout.splitlines()
        assert json.loads(words)[-3:] == ODD and rest == requeued and ran.returncode == code


def test_local_prints_a_command_for_each_process(launch):
    flags = ("--processes=03", "--devices=010", "--dry-run", "--", *ODD)  # numbers are decimal
    done = bash(launch / "local.sh", *flags, NPROC=64)
    for i, command in enumerate(commands_in(done.stdout)):
        at = command.index("dapo_jax.train")
        assert command[at + 1 :] == [
            "--workdir=gs://bucket/x", *ODD, "--coordinator=127.0.0.1:8476", "--num_processes=3",
            f"--process_id={i}",
        ]  # fmt: skip
        assert any(x.endswith("--xla_force_host_platform_device_count=10") for x in command)
        assert "NPROC=64" in command
    assert i == 2


def quickstart(*args, cwd=ROOT, script=LAUNCH / "quickstart.sh", **env):
    """The environment and the arguments of the command that quickstart.sh would run."""
    done = bash(script, "--dry-run", *args, cwd=cwd, **env)
    assert done.returncode == 0, done.stderr
    (words,) = commands_in(done.stdout)
    assert words.pop(0) == "env"
    split = next(i for i, word in enumerate(words) if word.endswith("/bin/python"))
    return dict(word.split("=", 1) for word in words[:split]), words[split:]


def test_quickstart_has_defaults_and_passes_flags_on():
    env, command = quickstart(HOME="/home/someone", XDG_CACHE_HOME="")
    assert command == [
        f"{ROOT}/.venv/bin/python", "-m", "dapo_jax.train",
        f"--config={ROOT}/configs/quickstart.py", f"--workdir={ROOT}/runs/quickstart",
    ]  # fmt: skip
    assert env == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": "/home/someone/.cache/dapo_jax/xla",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    other, fields = "--config=other.py", ["--config.seed=3", "--noconfig.filter"]
    fields += ["--config.name=a 'b' $c"]
    _, command = quickstart(*fields, "--workdir=/data/my run", other)
    assert command[3:] == [other, "--workdir=/data/my run", *fields]


def test_quickstart_respects_what_the_user_set():
    given = dict(GLIBC_TUNABLES="glibc.malloc.arena_max=2", JAX_COMPILATION_CACHE_DIR="")
    env, _ = quickstart(**given, XDG_CACHE_HOME="/c")
    assert env["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    assert "JAX_COMPILATION_CACHE_DIR" not in env  # set, to nothing: no cache
    assert "GLIBC_TUNABLES" not in quickstart(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[0]


def test_quickstart_runs_what_the_dry_run_prints(checkout, tools, tmp_path):
    """From another folder, with a stand-in for dapo_jax.train, which prints what it was given."""
    train = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
    executable(tmp_path / "dapo_jax/train.py", train)
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    script = os.path.relpath(checkout / "launch/quickstart.sh", tmp_path)
    flag = "--config.name=a 'b' $c"
    env_printed, command_printed = quickstart(flag, cwd=tmp_path, script=script)
    assert command_printed[0] == f"{checkout}/.venv/bin/python"
    assert command_printed[3] == f"--config={checkout}/configs/quickstart.py"
    assert not (checkout / ".venv").exists()  # a dry run changes nothing
    done = bash(script, flag, cwd=tmp_path, PATH=on_path(tools))
    assert done.returncode == 0, done.stderr
    env, arguments = json.loads(done.stdout)
    assert arguments == command_printed[3:]
    assert len(env_printed) == 5 and env_printed.items() <= env.items()


# --------------------------------------------------------------------------------------------------
# The manifest of gke.sh
# --------------------------------------------------------------------------------------------------


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument whose variables have the value VALUE: $$ is a $, $(NAME)
    a variable, any other $ itself (its docs on dependent environment variables)."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda m: "$" if m[0] == "$$" else "VALUE", text)


def gke(launch, *flags, training=ODD):
    """(the manifest's spec, its job, that job's pod, the pod's container; what was said)."""
    yaml = pytest.importorskip("yaml")
    where = ("run", "--name=dapo", "--image=a/b:c", "--dry-run")
    done = bash(launch / "gke.sh", *where, *flags, "--", *training)
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)["spec"]
    (jobs,) = spec["replicatedJobs"]
    job = jobs["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return spec | {"replicas": jobs["replicas"]}, job, pod, container, done.stderr


def test_gke_manifest_is_what_kubernetes_wants(launch):
    odd = "--config.x=a\\b\n\tc\r\u00e4\u20ac $(A)$$(B)$ && @args@"
    flags = ("--type=v5p-256", "--namespace=ns", "--restarts=007")
    spec, _, pod, container, said = gke(launch, *flags, training=[*ODD, odd])
    assert (spec["failurePolicy"]["maxRestarts"], spec["replicas"]) == (7, 1)
    assert [expanded(x) for x in container["args"]] == ["--start_timeout=600", *ODD, odd]
    limits = {"google.com/tpu": 4, "ephemeral-storage": "20Gi"}
    assert container["resources"] == dict(requests={"ephemeral-storage": "20Gi"}, limits=limits)
    assert container["command"][-1] == "dapo_jax.train" and container["image"] == "a/b:c"
    assert pod["terminationGracePeriodSeconds"] == 600 and not pod.get("tolerations")
    commands = commands_in(said)
    assert commands[0] == ["kubectl", "--namespace=ns", "apply", "--filename=-"]
    assert [c[2:4] for c in commands[1:]] == [["get", "jobset"], ["get", "pods"]]


def test_gke_on_spot_nodes_and_with_a_command_before(launch):
    """A grace that is true there; the command is a script of its own, whose words Kubernetes does
    not touch, and the training gets its flags and its signals."""
    prepare = "echo \"$HOME\" '$(x)' > prepared && false || true"
    flags = ("--type=v6e-16", "--spot", "--disk=80", f"--prepare={prepare}")
    spec, job, pod, container, _ = gke(launch, *flags)
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    exits, taken = job["podFailurePolicy"]["rules"]
    assert exits["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [75]}
    assert taken["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert pod["terminationGracePeriodSeconds"] == 15
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"] == [
        dict(key="cloud.google.com/gke-spot", operator="Equal", value="true", effect="NoSchedule")
    ]
    assert container["resources"]["limits"]["ephemeral-storage"] == "80Gi"
    *shell, script, name = (expanded(x) for x in container["command"])
    assert shell == ["bash", "-c"] and name == "prepare"
    start = 'exec bash launch/until_done.sh python -um dapo_jax.train "$@"'
    assert script.splitlines() == ["set -e", prepare, start]


def test_gke_of_several_slices_and_of_one_host(launch):
    """Eight chips in one pod, which meets nobody; GKE joins no such slices (REFUSED)."""
    spec, job, *_, said = gke(launch, "--type=2xv6e-256")
    assert (spec["replicas"], job["parallelism"]) == (2, 64)  # each
    assert any("jobset.sigs.k8s.io/job-index=0," in word for word in commands_in(said)[-1])
    *_, container, _ = gke(launch, "--type=v6e-8")
    assert container["args"][0] == "--num_processes=1"


# Machine type, topology, hosts and chips a host, as Google's pages on each TPU version and on TPUs
# in GKE give them (slices.txt names them); runtime of a TPU VM.
FAMILIES = {
    "v4": ("tpu-v4-podslice", "ct4p-hightpu", "tpu-ubuntu2204-base"),
    "v5litepod": ("tpu-v5-lite-podslice", "ct5lp-hightpu", "v2-alpha-tpuv5-lite"),
    "v5p": ("tpu-v5p-slice", "ct5p-hightpu", "v2-alpha-tpuv5"),
    "v6e": ("tpu-v6e-slice", "ct6e-standard", "v2-alpha-tpuv6e"),
}
DOCUMENTED = [
    ("v4-8", "2x2x1", 1, 4),
    ("v4-128", "4x4x4", 16, 4),
    ("v5litepod-1", "1x1", 1, 1),
    ("v5litepod-8", "2x4", 1, 8),
    ("v5litepod-16", "4x4", 4, 4),
    ("v5litepod-256", "16x16", 64, 4),
    ("v5p-8", "2x2x1", 1, 4),
    ("v5p-128", "4x4x4", 16, 4),
    ("v5p-256", "4x4x8", 32, 4),
    ("v5p-12288", "16x16x24", 1536, 4),
    ("v6e-1", "1x1", 1, 1),
    ("v6e-8", "2x4", 1, 8),
    ("v6e-16", "4x4", 4, 4),
    ("v6e-256", "16x16", 64, 4),
]


@pytest.mark.parametrize(("type", "topology", "hosts", "chips"), DOCUMENTED)
def test_dry_runs_have_the_documented_shapes(type, topology, hosts, chips, launch):
    label, machine, runtime = FAMILIES[type.partition("-")[0]]
    _, job, pod, container, said = gke(launch, f"--type={type}")
    assert job["parallelism"] == job["completions"] == hosts
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert container["resources"]["limits"]["google.com/tpu"] == chips
    assert f"type {machine}-{chips}t, topology {topology}, {hosts} nodes each" in said
    flags = ("run", "--name=n", "--zone=z", f"--type={type}", "--dry-run", "--", *ODD)
    assert commands_in(bash(launch / "tpu_vm.sh", *flags).stderr)[0] == create(type, runtime)


def test_one_table_of_slices():
    """launch/slice.sh and pods/slices.py: of all slices name, shape, hosts and chips."""
    names = [
        slices.Pod(family, sides).cloud
        for family, known in slices.FAMILIES.items()
        for sides in known.shapes
    ]
    code = """
    cd "$1"; shift; source launch/common.sh; source launch/slice.sh
    for name in "$@"; do dapo_slice "$name"; echo "$type $shape $hosts $chips $machine"; done
    """
    done = bash("-euo", "pipefail", "-c", code, "-", ROOT, *names)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == names and len(names) > 100
    for name, shape, hosts, chips, machine in rows:
        pod = slices.parse(name)
        assert shape == "x".join(map(str, pod.sides)) and int(hosts) == pod.hosts
        assert int(hosts) * int(chips) == pod.chips and machine.endswith(f"-{chips}t")


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", COMMANDS)
def test_help(script):
    done = bash(LAUNCH / script, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: launch/{script}")


SLICE = ["run", "--name=n", "--zone=z"]
JOB = ["run", "--name=n", "--type=v6e-16", "--image=i"]
# (script, flags, how the one line begins)
REFUSED = [
    *(
        (script, ["--nmae=x"], "unknown argument '--nmae=x'")
        for script in ("tpu_vm.sh", "gke.sh", "slurm.sh", "local.sh")
    ),
    *(
        ("quickstart.sh", [bad], f"unknown argument '{bad}'")
        for bad in ("--wrokdir=x", "--workdir", "--config=", "runs/mine", "--config.")
    ),
    ("tpu_vm.sh", ["run", "--name=n"], "give --name and --zone"),
    ("tpu_vm.sh", [*SLICE, "--type=v5p-8"], "give the training a bucket, --workdir=gs://"),
    ("tpu_vm.sh", [*SLICE, "--", "--workdir=gs://b"], "--type: which slice?"),
    *(
        ("tpu_vm.sh", [*SLICE, f"--type={bad}", "--", *ODD], f"--type={bad}: no TPU slice")
        for bad in ("v9", "v5p-255")
    ),
    ("tpu_vm.sh", [*SLICE, "--spot", "--reserved"], "--spot or --reserved, not both"),
    ("tpu_vm.sh", ["run", "stop", "--name=n", "--zone=z"], "one command at a time"),
    ("tpu_vm.sh", ["fetch", "--to=d"], "fetch: give --workdir=gs://"),
    ("tpu_vm.sh", ["--name=n"], "say what to do"),
    *(
        (script, [bad], f"{bad.split('=')[0]}=")
        for script, bad in (
            ("tpu_vm.sh", "--name=-x"), ("tpu_vm.sh", "--zone=a b"),
            ("tpu_vm.sh", "--project=$(id)"), ("tpu_vm.sh", "--runtime=a;b"),
            ("tpu_vm.sh", "--to=a\nb"), ("tpu_vm.sh", "--labels=a=b;id"),
            ("tpu_vm.sh", "--labels=$(id)=1"), ("tpu_vm.sh", "--labels=a"),
            ("tpu_vm.sh", "--ssh=a b"), ("tpu_vm.sh", "--data-disk=source=/x y"),
            ("tpu_vm.sh", "--network=a\nb"), ("tpu_vm.sh", "--service-account=`id`"),
            ("tpu_vm.sh", "--worker=x[$(id)]"), ("slurm.sh", "--time=1:00 x"),
            ("slurm.sh", "--name=a\nb"), ("slurm.sh", "--extra=a]b"), ("slurm.sh", "--python=../x"),
            ("local.sh", "--python=3.9"), ("quickstart.sh", "--python=../x"),
            ("quickstart.sh", "--extra=a]; id"), ("gke.sh", "--name=n\n"), ("gke.sh", "--disk=1Gi"),
            ("gke.sh", "--disk=1\n    limits: {}"),
        )
    ),
    *(
        ("gke.sh", [*JOB, bad, "--", *ODD], bad.split("=")[0])
        for bad in (
            "--type=0xv6e-16", "--type=08xv6e-16", "--type=v6e-7", "--type=h100-8", "--type=v5e-16",
            "--name=No", "--image=a b", "--image=i\nx: y", "--namespace=-n",
            "--service-account=$(id)", "--restarts=1\n  suspend: true", "--type=2xv6e-8",
        )
    ),
    ("gke.sh", ["run", "--name=n", "--type=v6e-16", "--", *ODD], "--image: which one"),
    *(
        ("gke.sh", [*JOB, "--", *ODD, f"--config.x=a{odd}b"], "'--config.x=a")
        for odd in ("\x01", "\x1b", "\x7f", "\x85", "\u2028")  # not for YAML
    ),
]  # fmt: skip


@pytest.mark.parametrize(("script", "flags", "said"), REFUSED)
def test_what_is_wrong_is_one_line_and_nothing_runs(script, flags, said, launch, tmp_path):
    done = bash(launch / script, "--dry-run", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert done.stderr.startswith(f"error: {said}") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["0x1F90", "99999", "0", "x[$(touch own)]"])
def test_the_port_of_local_is_a_number(value, launch, tmp_path):
    done = bash(launch / "local.sh", "--dry-run", cwd=tmp_path, DAPO_PORT=value)
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: DAPO_PORT=") and done.stderr.count("\n") == 1


NUMBERS = [
    ("local.sh", "processes"), ("local.sh", "devices"), ("slurm.sh", "nodes"), ("slurm.sh", "gpus"),
    ("tpu_vm.sh", "retries"), ("gke.sh", "restarts"),
]  # fmt: skip
HOSTILE = [
    "2x", "-1", "+1", "1.5", "1e3", "0x10", "2 ", " 2", "1 2", "1\n", "1\n  suspend: true", "\t1",
    "99999999999", "18446744073709551617", "99999999999999999999", "8#7", "1+1", "1;touch own",
    "1&&touch own", "a", "a=1", "PATH", "RANDOM", "$((1))", "`touch own`", "$(touch own)", "1|id",
    "1+BASH_VERSINFO[$(touch own; echo 0)]", "x[$(touch own)]", "1,y=2", "*", "?",
    "[0-9]", "1}", "${IFS}", "\u0661", "\u00b2", "\uff11", "1'", '1"', "1\\", "#1", "!1",
    "~", "--", "1\r", "1\x01",
]  # fmt: skip


@pytest.mark.parametrize(("script", "flag"), NUMBERS)
def test_hostile_numbers_run_nothing(script, flag, launch, tmp_path):
    """With fixed values and with mixtures of their characters, a dry run's and a real one's."""
    rng = random.Random(f"{script} {flag}")
    characters = [*"0123456789", *"$([])`;&|+-x\n '\"\\", "touch own", "BASH_VERSINFO["]
    mixed = ["".join(rng.choices(characters, k=rng.randint(2, 12))) for _ in range(40)]
    tried = 0
    for value in [*HOSTILE, *(x for x in mixed if not x.isdecimal())]:
        args = (f"--{flag}={value}", *rng.choice([["--dry-run"], []]))
        done = bash(launch / script, *args, cwd=tmp_path, HOME=tmp_path, PATH="/usr/bin:/bin")
        assert done.returncode == 2 and done.stdout == "", (value, done)
        assert done.stderr.startswith(f"error: --{flag}=") and done.stderr.count("\n") == 1, value
        tried += 1
    assert tried > 60 and not list(tmp_path.iterdir())
    assert not (launch / "own").exists() and not (ROOT / "own").exists()


# --------------------------------------------------------------------------------------------------
# Set-up
# --------------------------------------------------------------------------------------------------


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


def test_setup_installs_once(checkout, set_up):
    done, calls = set_up()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{checkout}/.venv/bin/python"
    assert calls[0].startswith("venv ") and calls[0].endswith(f"{checkout}/.venv")
    assert calls[1:] == [install(checkout)]

    done, calls = set_up()
    assert (done.returncode, done.stderr, len(calls)) == (0, "", 2)

    _, calls = set_up("test")  # an extra not yet there
    assert calls[2:] == [install(checkout, "[test]")]
    set_up("tpu")
    set_up()
    _, calls = set_up("test")
    assert len(calls) == 4

    with (checkout / "requirements.txt").open("a") as file:
        file.write("# changed\n")
    _, calls = set_up()
    assert len(calls) == 5
    assert len(list((checkout / ".venv").glob(".dapo_jax-*"))) == 1


def test_setup_after_a_failed_install_tries_again(checkout, tools, set_up):
    set_up()
    (checkout / "setup.py").write_text("# other\n")
    executable(tools / "uv", "#!/bin/sh\nexit 1\n")
    for _ in range(2):
        done, _ = set_up()
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("error: the install failed")


def test_setup_after_a_move_installs_again(checkout, set_up):
    set_up()
    moved = checkout.rename(checkout.with_name("moved"))
    _, calls = set_up(root=moved)
    assert calls[2:] == [install(moved)]


def test_setup_keeps_a_venv_that_is_there_and_refuses_a_broken_one(checkout, set_up):
    executable(checkout / ".venv/bin/python", "#!/bin/sh\nexit 127\n")
    done, calls = set_up()
    assert (done.returncode, calls) == (1, [])
    assert "remove that folder and run this again" in done.stderr
    executable(checkout / ".venv/bin/python", THIS_PYTHON)
    done, calls = set_up()
    assert (done.returncode, calls) == (0, [install(checkout)]), done.stderr


def test_setup_passes_over_a_python_that_does_not_run(checkout, tools, set_up):
    """As a pyenv shim of a version that is not activated: on PATH, and it only prints an error."""
    executable(tools / "python3", "#!/bin/sh\necho 'python3: command not found' >&2\nexit 127\n")
    executable(tools / "python3.13", THIS_PYTHON)
    link_tools(tools, "bash", "cat", "cksum", "dirname", "cp", "grep", "mkdir", "rm")
    done, calls = set_up(path=tools)
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"venv --quiet --python {sys.executable} {checkout}/.venv"


def test_setup_without_a_supported_python_says_so(tools, set_up):
    done, calls = set_up("", "3.9")
    assert (done.returncode, calls) == (2, [])
    assert done.stderr.startswith("error: --python=3.9: not supported; choose 3.11")
    (tools / "uv").unlink()
    link_tools(tools, "bash", "cat", "cksum", "dirname")
    done, _ = set_up(path=tools)
    assert done.returncode == 69
    assert done.stderr.startswith("error: no Python 3.11-3.14 found")


# --------------------------------------------------------------------------------------------------
# All scripts, and the Dockerfile
# --------------------------------------------------------------------------------------------------


def test_the_image_has_what_the_scripts_need_at_pinned_versions():
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert len(copied) > 3 and all((ROOT / word).exists() for word in copied)
    pip, uv = (line for line in lines if "pip install" in line)
    assert "--require-hashes" in pip and "launch/uv.txt" in pip
    assert "-c requirements.txt" in uv and "'.[tpu]'" in uv
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= {*ignored}
    for needed in ("launch/until_done.sh", "configs", "dapo_jax", "requirements.txt"):
        assert not any(Path(needed).match(x) for x in ignored)


@pytest.mark.parametrize(
    ("linter", "files"),
    [
        ("shellcheck --external-sources --source-path=SCRIPTDIR", [ROOT / ".ci/run", *SCRIPTS]),
        ("hadolint", [ROOT / "Dockerfile"]),
    ],
    ids=["shellcheck", "hadolint"],
)
def test_linters(linter, files):
    linter, *flags = linter.split()
    found = shutil.which(linter, path=on_path(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{linter} is not installed (extras 'test' and 'lint')")
    command = [found, *flags, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
