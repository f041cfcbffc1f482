"""The cluster scripts: what they would run, and a whole life of a TPU slice with a gcloud that is
fake but runs what it is told to run on its "hosts", which are folders."""

import json
import os
import shlex
from pathlib import Path

import pytest
import test_launch
from test_launch import ROOT, bash, executable

LAUNCH = ROOT / "launch"
CLUSTER = ["tpu_vm.sh", "gke.sh", "slurm.sh", "local.sh"]


@pytest.mark.parametrize("script", [*CLUSTER, "worker.sh", "until_done.sh"])
def test_help(script):
    done = bash(LAUNCH / script, "--help", cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: launch/{script}")


@pytest.mark.parametrize("script", CLUSTER)
def test_unknown_arguments_are_refused(script):
    done = bash(LAUNCH / script, "--dry-run", "--nmae=x", cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown argument '--nmae=x'")


def printed(script, *args, **env) -> list[list[str]]:
    """The commands of a dry run, as words."""
    done = bash(LAUNCH / script, *args, "--dry-run", "--", *ODD, cwd=ROOT, **env)
    assert done.returncode == 0, done.stderr
    lines = [x.removeprefix("+ ") for x in (done.stdout + done.stderr).splitlines()]
    return [shlex.split(x) for x in lines if "<<" not in x]


ODD = ["--config=a b.py", "--workdir=gs://bucket/x", '--config.name=it\'s $x "y"']


# --------------------------------------------------------------------------------------------------
# tpu_vm.sh
# --------------------------------------------------------------------------------------------------


def test_tpu_vm_dry_run():
    commands = printed(
        "tpu_vm.sh", "run", "--name=n", "--zone=z", "--project=p", "--type=v5p-256", "--spot",
        "--prepare=echo 'a b'", "--delete",
    )  # fmt: skip
    where = ["--zone=z", "--project=p", "--quiet"]
    create, tar, scp, install, start, follow, delete = commands
    request = ["gcloud", "compute", "tpus", "queued-resources"]
    assert create == [
        *request, "create", "n", *where, "--node-id=n", "--accelerator-type=v5p-256",
        "--runtime-version=v2-alpha-tpuv5", "--spot",
    ]  # fmt: skip
    assert tar[:2] == ["tar", "-czf"] and "--exclude=./.git" in tar
    assert scp == [
        "gcloud", "compute", "tpus", "tpu-vm", "scp", tar[2], "n:dapo_jax.tar.gz", *where,
        "--worker=all",
    ]  # fmt: skip
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "n", *where]
    for command, worker in ((install, "all"), (start, "all"), (follow, "0")):
        assert command[:-1] == [*ssh, f"--worker={worker}"]
    assert install[-1].endswith("launch/worker.sh install tpu && echo 'a b'")
    remote = shlex.split(start[-1].removeprefix("--command="))
    assert remote == ["bash", "dapo_jax/launch/worker.sh", "start", *ODD]
    assert delete == [*request, "delete", "n", *where, "--force"]


def test_tpu_vm_of_several_slices():
    """One request; every step on each of its nodes, the log from the first."""
    commands = printed("tpu_vm.sh", "run", "--name=n", "--zone=z", "--type=2xv5p-256")
    create, _, scp0, scp1, install0, install1, start0, start1, follow = commands
    assert {"--node-count=2", "--node-prefix=n", "--accelerator-type=v5p-256"} < set(create)
    assert "--runtime-version=v2-alpha-tpuv5" in create
    assert [x[6].split(":")[0] for x in (scp0, scp1)] == ["n-0", "n-1"]
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh"]
    for i, pair in enumerate(zip((install0, start0), (install1, start1), strict=True)):
        assert [x[:6] for x in pair] == [[*ssh, "n-0"], [*ssh, "n-1"]]
        assert pair[0][6:] == pair[1][6:] and "--worker=all" in pair[0]
        assert ("worker.sh install", "worker.sh start")[i] in pair[0][-1]
    assert follow[:6] == [*ssh, "n-0"] and "--worker=0" in follow and "follow" in follow[-1]
    stops = printed("tpu_vm.sh", "stop", "--name=n", "--zone=z", "--type=2xv5p-256")
    assert [x[5] for x in stops] == ["n-0", "n-1"]


def test_tpu_vm_stop_fetch_delete():
    (stop,) = printed("tpu_vm.sh", "stop", "--name=n", "--zone=z")
    assert stop[-2:] == ["--worker=all", "--command=bash dapo_jax/launch/worker.sh stop"]
    mkdir, rsync = printed("tpu_vm.sh", "fetch", "--workdir=gs://b/x", "--to=my dir")
    assert mkdir == ["mkdir", "-p", "--", "my dir"]
    assert rsync == [
        "gcloud", "storage", "rsync", "--recursive", "--exclude=checkpoints/.*", "gs://b/x",
        "my dir",
    ]  # fmt: skip
    _, rsync = printed("tpu_vm.sh", "fetch", "--workdir=gs://b/x", "--to=d", "--checkpoints")
    assert not any("exclude" in word for word in rsync)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "--name=n"], "--zone"),
        (["run", "--name=n", "--zone=z", "--type=v5p-8"], "gs://"),
        (["run", "--name=n", "--zone=z", "--", "--workdir=gs://b"], "--type"),
        (["run", "--name=n", "--zone=z", "--type=v9", "--", "--workdir=gs://b"], "--runtime"),
        (["fetch", "--to=d"], "gs://"),
        (["--name=n"], "say what to do"),
    ],
)
def test_tpu_vm_says_what_is_missing(args, said):
    done = bash(LAUNCH / "tpu_vm.sh", *args, cwd=ROOT)
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1


def test_several_slices_are_waited_for_and_driven_together(tmp_path):
    """A gcloud that answers at once, but for the second node, which is ready at the third look, and
    fails where the training is started: then so does the launcher, once it has run out of tries."""
    fake = """#!/usr/bin/env bash
    cd "$CLOUD"; printf '%q ' "$@" >>calls; echo >>calls
    case "$3 $4 $5" in
        queued-resources*describe*) echo ACTIVE ;;
        tpu-vm*describe*n-0) echo READY ;;
        tpu-vm*describe*n-1)
            echo x >>looks
            (($(wc -l <looks) < 3)) && echo CREATING || echo READY ;;
        tpu-vm*ssh*n-1) [[ "$*" != *worker.sh\\ start* ]] || exit 9 ;;
        tpu-vm*ssh*n-0) [[ "$*" != *alive* ]] || exit 1 ;;
    esac
    """
    executable(tmp_path / "bin/gcloud", fake)
    env = dict(CLOUD=tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = bash(
        LAUNCH / "tpu_vm.sh", "run", "--name=n", "--zone=z", "--type=2xv6e-8", "--retries=0", "--",
        *ODD, cwd=ROOT, DAPO_POLL_SECONDS="0.05", **env,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    calls = [shlex.split(x) for x in (tmp_path / "calls").read_text().splitlines()]
    ssh = [(x[4], x[-1]) for x in calls if x[3] == "ssh"]
    assert sorted(n for n, command in ssh if "worker.sh start" in command) == ["n-0", "n-1"]
    assert not any("follow" in command for _, command in ssh)
    assert [x[5].split(":")[0] for x in calls if x[3] == "scp"] == ["n-0", "n-1"]


GCLOUD = r"""#!/usr/bin/env bash
# A cloud in the folder CLOUD: `request` and `node` are states, host0 and host1 the home folders.
set -u
cd "$CLOUD"
printf '%q ' "$@" >>calls; echo >>calls
for word in "$@"; do
    case "$word" in --worker=*) worker="${word#*=}" ;; --command=*) command="${word#*=}" ;; esac
done
hosts() { [[ $worker == all ]] && echo host0 host1 || echo "host$worker"; }
case "$3 $4" in
    "queued-resources create") echo ACCEPTED >request ;;
    "queued-resources describe")
        [[ -f request ]] || exit 1
        cat request
        # What is asked for is there at the next look.
        if [[ $(<request) == ACCEPTED ]]; then
            echo ACTIVE >request; echo READY >node; mkdir host0 host1
        fi ;;
    "queued-resources delete") rm -rf request node host0 host1 ;;
    "tpu-vm describe") cat node ;;
    "tpu-vm scp") for host in $(hosts); do cp "$5" "$host/dapo_jax.tar.gz"; done ;;
    "tpu-vm ssh")
        if [[ $command == *follow && ! -e preempted ]]; then
            touch preempted
            ( until grep -qs "step 1" host0/dapo_jax/run.log; do sleep 0.05; done
              kill -TERM $(cat host?/dapo_jax/run.pid) ) &
            taken=1
        fi
        status=0
        for host in $(hosts); do
            (cd "$host" && HOME="$PWD" bash -c "$command") || status=$?
        done
        if [[ -n ${taken:-} ]]; then echo SUSPENDED >request; echo PREEMPTED >node; fi
        exit $status ;;
esac
"""

# Killed in its first life; the bucket is a folder that both lives know.
TRAIN = """
import os, pathlib, signal, sys, time
bucket = pathlib.Path(os.environ["CLOUD"], "bucket")
resumed = bucket.exists()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print(sys.argv[1:])
print("resumed after step 1" if resumed else "start")
if resumed:
    print("done: 2 steps")
    sys.exit()
print("step 1", flush=True)
while not told:
    time.sleep(0.02)
time.sleep(0.3)  # saving
bucket.mkdir(exist_ok=True)
print("terminated after step 1, saved; the same command goes on from there")
"""


@pytest.fixture
def cloud(tmp_path) -> Path:
    """A folder `cloud`, and beside it a checkout with a stand-in for the trainer, and the tools."""
    (tmp_path / "cloud").mkdir()
    tools = test_launch.tools.__wrapped__(tmp_path)
    executable(tools / "gcloud", GCLOUD)
    checkout = test_launch.checkout.__wrapped__(tmp_path)
    (checkout / "dapo_jax").mkdir()
    (checkout / "dapo_jax/train.py").write_text(TRAIN)
    (checkout / "dapo_jax/__init__.py").write_text("")
    (checkout / ".git").mkdir()
    (checkout / ".git/secret").write_text("")
    return tmp_path / "cloud"


def tpu_vm(cloud, *args):
    env = dict(
        CLOUD=cloud, PATH=f"{cloud.parent / 'tools'}:{os.environ['PATH']}", DAPO_POLL_SECONDS="0.1"
    )
    checkout = next(cloud.parent.glob("a checkout*"))
    return bash(checkout / "launch/tpu_vm.sh", *args, cwd=cloud.parent, **env)


def test_a_slice_is_made_taken_away_made_again_and_deleted(cloud):
    run = ("run", "--name=n", "--zone=z", "--type=v6e-8", "--spot", "--delete", "--", *ODD)
    done = tpu_vm(cloud, *run)
    assert done.returncode == 0, done.stderr
    out = done.stdout.splitlines()
    assert [x for x in out if not x.startswith("[")] == [
        "start",
        "step 1",
        "terminated after step 1, saved; the same command goes on from there",
        "resumed after step 1",
        "done: 2 steps",
    ]
    assert out[0] == str(ODD)  # the flags came through two shells as they were
    calls = [shlex.split(x) for x in (cloud / "calls").read_text().splitlines()]
    kinds = [c[3] for c in calls if c[3] != "describe"]
    # Look whether something runs, copy, install, start, follow, delete; and all of it again.
    one = ["create", "ssh", "scp", "ssh", "ssh", "ssh"]
    assert kinds == [*one, "delete", *one, "delete"]
    assert not (cloud / "host0").exists() and not (cloud / "request").exists()


def test_a_slice_that_is_there_is_used_and_not_deleted(cloud):
    (cloud / "request").write_text("ACTIVE\n")
    (cloud / "node").write_text("READY\n")
    for name in ("preempted", "bucket", "host0", "host1"):
        (cloud / name).mkdir()
    done = tpu_vm(cloud, "run", "--name=n", "--zone=z", "--type=v6e-8", "--", *ODD)
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout
    calls = (cloud / "calls").read_text()
    assert "create" not in calls and "delete" not in calls
    for host in ("host0", "host1"):
        home = cloud / host / "dapo_jax"
        assert "done: 2 steps" in (home / "run.log").read_text()
        assert not (home / ".git").exists()


def test_a_training_that_fails_is_started_again_and_given_up(cloud):
    checkout = next(cloud.parent.glob("a checkout*"))
    (checkout / "dapo_jax/train.py").write_text("raise SystemExit('error: no such field')")
    (cloud / "preempted").mkdir()
    done = tpu_vm(cloud, "run", "--name=n", "--zone=z", "--type=v6e-8", "--retries=1", "--", *ODD)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["error: no such field"] * 2
    calls = (cloud / "calls").read_text()
    assert calls.count("create") == 1 and "delete" not in calls


# --------------------------------------------------------------------------------------------------
# until_done.sh, gke.sh, slurm.sh, local.sh
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status"),
    [("echo done: 3", 0), ("exit 3", 3), ("echo 'terminated after step 4, saved'", 75)],
)
def test_until_done_tells_a_preemption_from_the_end(command, status, tmp_path):
    note = tmp_path / "status"
    done = bash(
        LAUNCH / "until_done.sh", "bash", "-c", command, cwd=tmp_path, DAPO_STATUS_FILE=note
    )
    assert done.returncode == status
    assert note.read_text() == f"{status}\n"
    assert done.stdout == ("" if status == 3 else command.removeprefix("echo ").strip("'") + "\n")


def test_gke_manifest_is_what_kubernetes_wants():
    yaml = pytest.importorskip("yaml")
    done = bash(
        LAUNCH / "gke.sh", "run", "--name=dapo", "--type=v5p-256", "--image=a/b:c",
        "--namespace=ns", "--dry-run", "--", *ODD, "--config.x=a\\b\n\tc", cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)["spec"]
    (job,) = spec["replicatedJobs"]
    job = job["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 32  # 128 chips, 4 a host
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x8",
    }
    assert spec["replicatedJobs"][0]["replicas"] == 1
    (container,) = pod["containers"]
    assert container["args"] == ["--start_timeout=600", *ODD, "--config.x=a\\b\n\tc"]
    assert container["command"][-1] == "dapo_jax.train"
    commands = [shlex.split(x.removeprefix("+ ")) for x in done.stderr.splitlines()]
    assert commands[0] == ["kubectl", "--namespace=ns", "apply", "--filename=-"]
    assert [c[2] for c in commands] == ["apply", "wait", "logs"]


def test_gke_of_several_slices():
    yaml = pytest.importorskip("yaml")
    flags = ("--name=dapo", "--type=2xv6e-256", "--image=i", "--dry-run")
    done = bash(LAUNCH / "gke.sh", "run", *flags, "--", *ODD, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"]
    assert job["replicas"] == 2 and job["template"]["spec"]["parallelism"] == 64  # each
    commands = [shlex.split(x) for x in done.stderr.splitlines()]
    assert all("jobset.sigs.k8s.io/job-index=0," in c[-1] for c in commands[1:])


@pytest.mark.parametrize(
    "bad", ["--type=0xv6e-8", "--type=v6e-7", "--type=h100-8", "--name=No", "--image="]
)
def test_gke_refuses(bad):
    good = {"--name": "n", "--type": "v6e-16", "--image": "i"}
    good[bad.split("=")[0]] = bad.split("=")[1]
    flags = [f"{k}={v}" for k, v in good.items() if v]
    done = bash(LAUNCH / "gke.sh", "run", *flags, "--dry-run", "--", *ODD, cwd=ROOT)
    assert done.returncode == 2 and bad.split("=")[0] in done.stderr


def test_slurm_job(tmp_path):
    done = bash(
        LAUNCH / "slurm.sh", "--nodes=4", "--gpus=8", "--partition=a b", "--dry-run", "--", *ODD,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, _, job = done.stdout.partition(' <<"JOB"\n')
    submit = shlex.split(head)
    assert submit[0] == "sbatch"
    assert {"--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--partition=a b"} < {*submit}
    assert "--signal=TERM@120" in submit and "--requeue" in submit
    # The script itself, with an srun that notes its words, and a scontrol.
    note = "import json, sys; print(json.dumps(sys.argv[1:]))"
    executable(tmp_path / "srun", f"#!/bin/sh\npython3 -c '{note}' \"$@\"\nexit $CODE\n")
    executable(tmp_path / "scontrol", "#!/bin/sh\necho scontrol $*\n")
    script = job.removesuffix("JOB\n")
    for code, requeued in ((0, []), (75, ["scontrol requeue 7"]), (1, [])):
        path = f"{tmp_path}:{os.environ['PATH']}"
        ran = bash("-c", script, cwd=tmp_path, PATH=path, CODE=code, SLURM_JOB_ID=7)
        words, *rest = ran.stdout.splitlines()
        assert json.loads(words)[-3:] == ODD and rest == requeued and ran.returncode == code


def test_local_starts_and_ends_all(tmp_path):
    commands = printed("local.sh", "--processes=3", "--devices=4", NPROC=64)
    for i, command in enumerate(commands):
        at = command.index("dapo_jax.train")
        assert command[at + 1 :] == [
            "--workdir=gs://bucket/x", *ODD, "--coordinator=127.0.0.1:8476", "--num_processes=3",
            f"--process_id={i}",
        ]  # fmt: skip
        assert "XLA_FLAGS=--xla_force_host_platform_device_count=4" in command
        assert "NPROC=64" in command
    assert len(commands) == 3

    checkout = test_launch.checkout.__wrapped__(tmp_path)
    tools = test_launch.tools.__wrapped__(tmp_path)
    code = """
import sys, time
number = int(sys.argv[-1][-1])
print("process", number, flush=True)
if number == 1:
    sys.exit(3)
time.sleep(50)
"""
    executable(tmp_path / "dapo_jax/train.py", code)
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    done = bash(
        checkout / "launch/local.sh", "--", f"--workdir={tmp_path}/w", cwd=tmp_path,
        PATH=f"{tools}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == "process 0\n"
    assert (tmp_path / "w.process_1.log").read_text() == "process 1\n"
