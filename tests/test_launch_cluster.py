"""The cluster scripts: what they would run, and a whole life of a TPU slice with a gcloud that is
fake but runs what it is told to run on its "hosts", which are folders."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_launch
from test_launch import ROOT, bash, executable

from dapo_jax.pods import slices

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


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Path:
    """The scripts in a checkout whose dapo_jax is empty, so that it checks no training's flags."""
    return test_launch.checkout.__wrapped__(tmp_path_factory.mktemp("launch")) / "launch"


def printed(script, *args, **env) -> list[list[str]]:
    """The commands of a dry run, as words."""
    done = bash(script, *args, "--dry-run", "--", *ODD, cwd=ROOT, **env)
    assert done.returncode == 0, done.stderr
    return commands_in(done.stdout + done.stderr)


def commands_in(text: str) -> list[list[str]]:
    lines = [x.removeprefix("+ ") for x in text.splitlines() if not x.startswith("[set-up] ")]
    return [shlex.split(x) for x in lines if "<<" not in x]


ODD = ["--config=configs/dapo_qwen2_5_7b.py", "--workdir=gs://bucket/x"]
ODD += ['--config.data.train=it\'s $x "y" $(HOME) $$.json']


# --------------------------------------------------------------------------------------------------
# tpu_vm.sh
# --------------------------------------------------------------------------------------------------


def test_tpu_vm_dry_run(launch):
    commands = printed(
        launch / "tpu_vm.sh", "run", "--name=n", "--zone=z", "--project=p", "--type=v5p-256",
        "--spot", "--prepare=echo 'a b'", "--delete",
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


def test_tpu_vm_of_several_slices(launch):
    """One request; every step on each of its nodes, the log from the first."""
    commands = printed(launch / "tpu_vm.sh", "run", "--name=n", "--zone=z", "--type=2xv5p-256")
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
    stops = printed(launch / "tpu_vm.sh", "stop", "--name=n", "--zone=z", "--type=2xv5p-256")
    assert [x[5] for x in stops] == ["n-0", "n-1"]


def test_tpu_vm_stop_fetch_delete(launch):
    (stop,) = printed(launch / "tpu_vm.sh", "stop", "--name=n", "--zone=z")
    assert stop[-2:] == ["--worker=all", "--command=bash dapo_jax/launch/worker.sh stop"]
    mkdir, rsync = printed(launch / "tpu_vm.sh", "fetch", "--workdir=gs://b/x", "--to=my dir")
    assert mkdir == ["mkdir", "-p", "--", "my dir"]
    assert rsync == [
        "gcloud", "storage", "rsync", "--recursive", "--exclude=(checkpoints|xla)/.*", "gs://b/x",
        "my dir",
    ]  # fmt: skip
    _, rsync = printed(
        launch / "tpu_vm.sh", "fetch", "--workdir=gs://b/x", "--to=d", "--checkpoints"
    )
    assert "--exclude=xla/.*" in rsync and not any("checkpoints" in word for word in rsync)
    (logs,) = printed(
        launch / "tpu_vm.sh", "logs", "--name=n", "--zone=z", "--worker=3", "--ssh=iap"
    )
    assert logs[:6] == ["gcloud", "alpha", "compute", "tpus", "tpu-vm", "ssh"]
    assert {"--worker=3", "--tunnel-through-iap"} < {*logs} and logs[-1].endswith("follow")


def test_tpu_vm_hands_on_what_gcloud_takes(launch):
    """Values with commas and equals signs as they are; hosts without public addresses are reached
    from within their network."""
    given = ["--service-account=a@p.iam.gserviceaccount.com", "--network=n1", "--subnetwork=n2"]
    given += [
        "--labels=team=rl,run=a",
        "--data-disk=source=projects/p/zones/z/disks/d,mode=read-only",
    ]
    given += ["--scopes=cloud-platform", "--tags=t1,t2", "--valid-until-duration=6h"]
    flags = ("run", "--name=n", "--zone=z", "--type=v6e-8")
    create, _, *others = printed(launch / "tpu_vm.sh", *flags, *given, "--internal-ips")
    assert {*given, "--internal-ips"} < {*create} and len(others) == 4
    assert all("--internal-ip" in words for words in others)
    create, *others = printed(launch / "tpu_vm.sh", *flags)
    words = {w.partition("=")[0] for command in [create, *others] for w in command}
    assert not words & {g.partition("=")[0] for g in given} | words & {"--internal-ip"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "--name=n"], "--zone"),
        (["run", "--name=n", "--zone=z", "--type=v5p-8"], "gs://"),
        (["run", "--name=n", "--zone=z", "--", "--workdir=gs://b"], "--type"),
        (["run", "--name=n", "--zone=z", "--type=v9", "--", "--workdir=gs://b"], "no TPU slice"),
        (["run", "--name=n", "--zone=z", "--type=v5p-255", "--", "--workdir=gs://b"], "v5p-255"),
        (["run", "--name=n", "--zone=z", "--spot", "--reserved"], "not both"),
        (["run", "stop", "--name=n", "--zone=z"], "one command"),
        (["fetch", "--to=d"], "gs://"),
        (["--name=n"], "say what to do"),
    ],
)
def test_tpu_vm_says_what_is_missing(args, said):
    done = bash(LAUNCH / "tpu_vm.sh", *args, cwd=ROOT)
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("\n") == 1


def test_several_slices_are_waited_for_and_driven_together(launch, tmp_path):
    """A gcloud that answers at once, but for the second node, which is ready at the third look, and
    fails where the training is started: then so does the launcher, once it has run out of tries."""
    fake = """#!/usr/bin/env bash
    cd "$CLOUD"; call=$(printf '%q ' "$@"); echo "$call" >>calls  # at once
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
        launch / "tpu_vm.sh", "run", "--name=n", "--zone=z", "--type=2xv6e-8", "--retries=0", "--",
        *ODD, cwd=ROOT, DAPO_POLL_SECONDS="0.05", **env,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    calls = [shlex.split(x) for x in (tmp_path / "calls").read_text().splitlines()]
    ssh = [(x[4], x[-1]) for x in calls if x[3] == "ssh"]
    assert sorted(n for n, command in ssh if "worker.sh start" in command) == ["n-0", "n-1"]
    assert not any("follow" in command for _, command in ssh)
    assert sorted(x[5].split(":")[0] for x in calls if x[3] == "scp") == ["n-0", "n-1"]


GCLOUD = r"""#!/usr/bin/env bash
# A cloud in the folder CLOUD: `request` and `node` are states, host0 and host1 the home folders.
set -u
cd "$CLOUD"
call=$(printf '%q ' "$@"); echo "$call" >>calls  # at once
for word in "$@"; do
    case "$word" in --worker=*) worker="${word#*=}" ;; --command=*) command="${word#*=}" ;; esac
done
hosts() { [[ $worker == all ]] && echo host0 host1 || echo "host$worker"; }
case "$3 $4" in
    "queued-resources create") echo ACCEPTED >request ;;
    "queued-resources describe")
        [[ -f request ]] || { echo "ERROR: NOT_FOUND: no such request" >&2; exit 1; }
        [[ ! -f offline ]] || { rm offline; echo "ERROR: no route to host" >&2; exit 1; }
        case "$*" in *failedData*) echo "no capacity in z"; exit ;; esac
        cat request
        # What is asked for is there at the next look.
        if [[ $(<request) == ACCEPTED && -f refuse ]]; then
            echo FAILED >request
        elif [[ $(<request) == ACCEPTED ]]; then
            echo ACTIVE >request; echo READY >node; mkdir host0 host1
        fi ;;
    "queued-resources delete")
        for host in host0 host1; do  # and with it all that runs there
            kill -KILL -- "-$(cat $host/dapo_jax/run.pid)" 2>/dev/null
        done
        rm -rf request node host0 host1 ;;
    "tpu-vm describe") cat node ;;
    "tpu-vm scp") for host in $(hosts); do cp "$5" "$host/dapo_jax.tar.gz"; done ;;
    "tpu-vm ssh")
        if [[ $command == *"worker.sh follow"* && ! -e preempted ]]; then
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
sys.exit(int(sys.argv[-1].removeprefix("--terminated_status=")))
"""


@pytest.fixture
def cloud(tmp_path) -> Path:
    """A folder `cloud`, and beside it a checkout with a stand-in for the trainer, and the tools."""
    (tmp_path / "cloud").mkdir()
    tools = test_launch.tools.__wrapped__(tmp_path)
    executable(tools / "gcloud", GCLOUD)
    checkout = test_launch.checkout.__wrapped__(tmp_path)
    (checkout / "dapo_jax/train.py").write_text(TRAIN)
    (checkout / "dapo_jax/hosts").mkdir()  # an installed one would look for a real bucket
    (checkout / "dapo_jax/hosts/keep_log.py").write_text("")
    (checkout / ".git").mkdir()
    (checkout / ".git/secret").write_text("")
    return tmp_path / "cloud"


# Buries what the command leaves behind, as an init does at once or, in a container, seconds later:
# until then it counts as alive.
REAPER = """
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
command = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
while (ended := os.wait())[0] != command:
    pass
sys.exit(os.waitstatus_to_exitcode(ended[1]))
"""


def tpu_vm(cloud, *args):
    env = dict(
        CLOUD=cloud, PATH=f"{cloud.parent / 'tools'}:{os.environ['PATH']}", DAPO_POLL_SECONDS="0.1"
    )
    script = next(cloud.parent.glob("a checkout*")) / "launch/tpu_vm.sh"
    call = f'exec {shlex.quote(sys.executable)} -ISc {shlex.quote(REAPER)} bash "$@"'
    return bash("-c", call, "-", script, *args, cwd=cloud.parent, **env)


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
    assert out[0] == str(
        [*ODD, "--terminated_status=75"]
    )  # the flags came through two shells as they were
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
    deadline = time.monotonic() + 120
    for host in ("host0", "host1"):
        home = cloud / host / "dapo_jax"
        while "done: 2 steps" not in (home / "run.log").read_text():  # it follows the first alone
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not (home / ".git").exists()


def test_a_request_that_fails_ends_with_cloud_s_reason(cloud):
    """Once it is ours: one from before is made anew."""
    run = ("run", "--name=n", "--zone=z", "--type=v6e-8", "--", *ODD)
    (cloud / "refuse").touch()
    done = tpu_vm(cloud, *run)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "error: slice n: Cloud has refused the request: no capacity in z"
    )
    (cloud / "refuse").unlink()
    (cloud / "preempted").touch()
    (cloud / "bucket").mkdir()
    done = tpu_vm(cloud, *run)
    assert done.returncode == 0 and "done: 2 steps" in done.stdout, done.stderr
    assert "an earlier request failed (no capacity in z)" in done.stderr
    assert (cloud / "calls").read_text().count("queued-resources delete") == 1


def test_a_network_that_is_away_deletes_no_slice(cloud):
    """Of a slice that is there nothing can be said for a moment; and never anything: give up."""
    run = ("run", "--name=n", "--zone=z", "--type=v6e-8", "--", *ODD)
    (cloud / "request").write_text("ACTIVE\n")
    (cloud / "node").write_text("READY\n")
    (cloud / "offline").touch()
    done = tpu_vm(cloud, *run)
    assert done.returncode == 1 and "gcloud cannot say what there is of n" in done.stderr
    assert "ERROR: no route to host" in done.stderr
    for name in ("preempted", "bucket", "host0", "host1"):
        (cloud / name).mkdir()
    gcloud = cloud.parent / "tools/gcloud"
    once = (
        '"tpu-vm describe") [[ -e asked ]] || { touch asked; echo "ERROR: timeout" >&2; exit 1; }; '
    )
    gcloud.write_text(gcloud.read_text().replace('"tpu-vm describe") ', once))
    done = tpu_vm(cloud, *run)
    assert done.returncode == 0 and (cloud / "asked").exists(), done.stderr
    calls = (cloud / "calls").read_text()
    assert "create" not in calls and "delete" not in calls


def test_a_broken_connection_shows_no_line_twice(cloud):
    (cloud / "request").write_text("ACTIVE\n")
    (cloud / "node").write_text("READY\n")
    for name in ("preempted", "bucket", "host0", "host1"):
        (cloud / name).mkdir()
    gcloud = cloud.parent / "tools/gcloud"
    broken = """
        if [[ $command == *"worker.sh follow"* && ! -e broken ]]; then
            touch broken
            until grep -qs done host0/dapo_jax/run.log; do sleep 0.05; done
            head -n 1 host0/dapo_jax/run.log
            exit 255
        fi
        status=0
"""
    gcloud.write_text(gcloud.read_text().replace("        status=0\n", broken))
    # Alive where it is asked, so that the same training is followed again.
    worker = next(cloud.parent.glob("a checkout*")) / "launch/worker.sh"
    worker.write_text(
        worker.read_text().replace("    alive) alive ;;", "    alive) [[ -f $pid ]] ;;")
    )
    done = tpu_vm(cloud, "run", "--name=n", "--zone=z", "--type=v6e-8", "--", *ODD)
    assert done.returncode == 0 and (cloud / "broken").exists(), done.stderr
    shown = [x for x in done.stdout.splitlines() if not x.startswith("[")]
    assert shown == ["resumed after step 1", "done: 2 steps"]
    assert done.stdout.count("--terminated_status=75") == 1  # the line that was shown before


def test_a_host_without_uv_gets_the_one_that_is_pinned(cloud):
    """By a python3 whose pip is fake: the version and its checksum are said, and nothing is piped
    into a shell."""
    tools, home = cloud.parent / "tools", cloud / "home"
    uv = (tools / "uv").rename(tools / "real-uv")
    fake = f"""#!/usr/bin/env bash
    printf '%s\\n' "$@" >'{cloud}/pip'
    for word in "$@"; do case "$word" in --target=*) folder="${{word#*=}}/bin" ;; esac; done
    mkdir -p "$folder" && cp '{uv}' "$folder/uv" && cp '{tools}/this-python' "$folder/"
    """
    executable(tools / "python3", fake)
    for tool in ("bash", "cat", "cksum", "dirname", "cp", "grep", "mkdir", "rm"):
        (tools / tool).symlink_to(shutil.which(tool))
    checkout = next(cloud.parent.glob("a checkout*"))
    (checkout / ".venv/bin").mkdir(parents=True)
    shutil.copy(tools / "this-python", checkout / ".venv/bin/python")
    done = bash(checkout / "launch/worker.sh", "install", cwd=cloud, PATH=tools, HOME=home)
    assert done.returncode == 0, done.stderr
    words = (cloud / "pip").read_text().splitlines()
    assert words[:3] == ["-m", "pip", "install"] and "--require-hashes" in words
    (requirements,) = (w.partition("=")[2] for w in words if w.startswith("--requirement="))
    pinned = Path(requirements).read_text().splitlines()[-1]
    assert re.fullmatch(r"uv==\d+\.\d+\.\d+ --hash=sha256:[0-9a-f]{64}", pinned)
    assert "pip install" in (home / ".cache/dapo_jax/uv/uv.log").read_text()


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
    ("code", "status"),
    [
        ("echo done; exit 0", 0),
        ("echo terminated after step 4; exit 0", 0),  # what it says does not count
        ("exit 3", 3),
        ("exit 255", 255),
        ("exit ${0#--terminated_status=}", 75),
        ("kill -TERM $$", 143),  # not told by us
    ],
)
def test_until_done_hands_on_the_exit_status(code, status, tmp_path):
    note = tmp_path / "status"
    done = bash(LAUNCH / "until_done.sh", "bash", "-c", code, cwd=tmp_path, DAPO_STATUS_FILE=note)
    assert done.returncode == status
    assert note.read_text() == f"{status}\n"
    assert done.stderr == "" and done.stdout.strip() in code


@pytest.mark.parametrize(
    ("on_term", "status"),
    [("exit 75", 75), ("exit 0", 0), ("exit 4", 4), ("sleep 0.3; exit 75", 75), ("", 75)],
)
def test_until_done_asks_to_leave_and_waits(on_term, status, tmp_path):
    """The last: a training that has not come to take SIGTERM yet."""
    trap = f"trap {shlex.quote(on_term)} TERM; " if on_term else ""
    code = trap + "echo up; while :; do sleep 0.02; done"
    running = subprocess.Popen(
        ["bash", LAUNCH / "until_done.sh", "bash", "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "up\n"
    for _ in range(2):  # Slurm and Kubernetes may say it twice
        running.send_signal(signal.SIGTERM)
    assert running.wait(120) == status
    running.stdout.close()


def test_until_done_does_not_take_bash_s_word_for_it(tmp_path):
    """Its `wait` says 255 where the child ends just as it begins, whatever that ends with."""
    first = 'builtin wait "$@"; set -- $?; [[ -e waited ]] && return $1; touch waited; return 255'
    env = {"BASH_FUNC_wait%%": f"() {{ {first}; }}"}
    done = bash(LAUNCH / "until_done.sh", "bash", "-c", "exit 75", cwd=tmp_path, **env)
    assert done.returncode == 75 and (tmp_path / "waited").exists()


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument whose variables have the value VALUE: $$ is a $, $(NAME)
    a variable, any other $ itself (its docs on dependent environment variables)."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda m: "$" if m[0] == "$$" else "VALUE", text)


def test_gke_manifest_is_what_kubernetes_wants(launch):
    yaml = pytest.importorskip("yaml")
    odd = "--config.x=a\\b\n\tc\r\u00e4\u20ac $(A)$$(B)$"
    done = bash(
        launch / "gke.sh", "run", "--name=dapo", "--type=v5p-256", "--image=a/b:c",
        "--namespace=ns", "--restarts=007", "--dry-run", "--", *ODD, odd, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 7
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
    assert [expanded(x) for x in container["args"]] == ["--start_timeout=600", *ODD, odd]
    assert container["resources"] == {
        "requests": {"ephemeral-storage": "20Gi"},
        "limits": {"google.com/tpu": 4, "ephemeral-storage": "20Gi"},
    }
    assert container["command"][-1] == "dapo_jax.train"
    assert pod["terminationGracePeriodSeconds"] == 600 and "tolerations" not in pod
    commands = commands_in(done.stderr)
    assert commands[0] == ["kubectl", "--namespace=ns", "apply", "--filename=-"]
    assert [c[2:4] for c in commands[1:]] == [["get", "jobset"], ["get", "pods"]]


def test_gke_on_spot_nodes_and_with_a_command_before(launch):
    """A grace that is true there; the command is a script of its own, whose words Kubernetes does
    not touch, and the training gets its flags and its signals."""
    yaml = pytest.importorskip("yaml")
    prepare = "echo \"$HOME\" '$(x)' > prepared; false || true"
    done = bash(
        launch / "gke.sh", "run", "--name=dapo", "--type=v6e-16", "--image=i", "--spot",
        "--disk=80", f"--prepare={prepare}", "--dry-run", "--", *ODD, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)["spec"]
    (rule,) = manifest["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    job = manifest["replicatedJobs"][0]["template"]["spec"]
    exits, taken = job["podFailurePolicy"]["rules"]
    assert exits["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [75]}
    assert taken["onPodConditions"] == [{"type": "DisruptionTarget"}]
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 15
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"] == [
        dict(key="cloud.google.com/gke-spot", operator="Equal", value="true", effect="NoSchedule")
    ]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["ephemeral-storage"] == "80Gi"
    *shell, script, name = (expanded(x) for x in container["command"])
    assert shell == ["bash", "-c"] and name == "prepare"
    assert script.splitlines() == [
        "set -e", prepare, 'exec bash launch/until_done.sh python -um dapo_jax.train "$@"'
    ]  # fmt: skip


KUBECTL = r"""#!/usr/bin/env bash
# A job in the folder CLUSTER: a pod whose log comes in two parts, lost with its restart; a second.
cd "$CLUSTER"; echo "$@" >>calls
looks=$(grep -c 'get pods' calls)
case "$1 $2" in
    "get jobset")
        [[ ! -e gone ]] || { echo 'Error from server (NotFound): no "dapo"' >&2; exit 1; }
        echo "StartupPolicyCompleted: x"
        ((looks < 5)) || cat end ;;
    "get pods")
        echo "dapo-0-aaa $( ((looks < 3)) && echo Running || echo Failed)"
        ((looks < 3)) || echo "dapo-0-bbb $( ((looks < 4)) && echo Pending || echo Succeeded)" ;;
    "logs --follow")
        case "$4:$looks" in
            *aaa:1) echo one ;;  # the connection breaks
            *aaa:*) echo one; echo two ;;
            *bbb:*) echo three ;;
        esac ;;
esac
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("Completed: jobset completed successfully", 0, "[set-up] Completed: jobset completed"),
        ("Failed: reached maximum restarts", 1, "error: the job has failed: reached maximum"),
    ],
)
def test_gke_follows_through_restarts_to_the_end(end, status, said, launch, tmp_path):
    executable(tmp_path / "bin/kubectl", KUBECTL)
    (tmp_path / "end").write_text(end + "\n")
    env = dict(CLUSTER=tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = bash(
        launch / "gke.sh", "logs", "--name=dapo", cwd=tmp_path, DAPO_POLL_SECONDS="0.01", **env
    )
    assert (done.returncode, done.stdout) == (status, "one\ntwo\nthree\n"), done.stderr
    assert done.stderr.splitlines()[-1].startswith(said)


def test_gke_follows_no_job_that_is_gone(launch, tmp_path):
    executable(tmp_path / "bin/kubectl", KUBECTL)
    (tmp_path / "gone").touch()
    env = dict(CLUSTER=tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = bash(launch / "gke.sh", "logs", "--name=dapo", cwd=tmp_path, **env)
    assert done.returncode == 1 and done.stderr.endswith("error: there is no job dapo\n")


def test_until_done_keeps_the_log_in_the_workdir(tmp_path):
    """What the training has printed to the last line, also where it was told to leave."""
    code = "echo up; trap 'echo last words; exit 75' TERM; while :; do sleep 0.02; done"
    shell = tmp_path / "python"  # the training, and by -m what copies its log
    executable(
        shell,
        f"""#!/usr/bin/env bash
        [[ $2 != dapo_jax.hosts.keep_log ]] || exec '{sys.executable}' -c "$COPIER" "${{@:3}}"
        {code}
        """,
    )
    copier = f"""
import pathlib, sys
from dapo_jax.hosts import keep_log
keep = keep_log.keep
keep_log.keep = lambda *what: pathlib.Path({str(tmp_path / "copies")!r}).touch() or keep(*what)
keep_log.main(*sys.argv[1:])
"""
    env = {**os.environ, "DAPO_LOG": str(tmp_path / "run.log"), "PYTHONPATH": str(ROOT)}
    env["COPIER"] = copier
    running = subprocess.Popen(
        ["bash", LAUNCH / "until_done.sh", shell, "-m", "x", f"--workdir={tmp_path}/w"],
        stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert running.stdout.readline() == "up\n"
    while not (tmp_path / "copies").exists():  # the copier has come to take SIGTERM
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == 75
    assert running.stdout.read() == "last words\n"
    running.stdout.close()
    (kept,) = (tmp_path / "w/logs").iterdir()
    assert kept.read_text() == "up\nlast words\n" == (tmp_path / "run.log").read_text()


def test_gke_of_several_slices(launch):
    yaml = pytest.importorskip("yaml")
    flags = ("--name=dapo", "--type=2xv6e-256", "--image=i", "--dry-run")
    done = bash(launch / "gke.sh", "run", *flags, "--", *ODD, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"]
    assert job["replicas"] == 2 and job["template"]["spec"]["parallelism"] == 64  # each
    commands = commands_in(done.stderr)
    assert any("jobset.sigs.k8s.io/job-index=0," in word for word in commands[-1])


def test_gke_of_one_host(launch):
    """Eight chips in one pod, which meets nobody; GKE joins no such slices."""
    yaml = pytest.importorskip("yaml")
    flags = ("--name=dapo", "--image=i", "--dry-run", "--", *ODD)
    done = bash(launch / "gke.sh", "run", "--type=v6e-8", *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"]
    job = job["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["parallelism"] == job["completions"] == 1
    assert container["resources"]["limits"]["google.com/tpu"] == 8
    assert container["args"][0] == "--num_processes=1"
    assert "ct6e-standard-8t, topology 2x4, 1 nodes" in done.stderr
    done = bash(launch / "gke.sh", "run", "--type=2xv6e-8", *flags, cwd=ROOT)
    assert done.returncode == 2 and "slices of several hosts" in done.stderr


# Machine type, topology, hosts and chips a host, as Google's pages on each TPU version and on TPUs
# in GKE give them (slices.txt names them); runtime of a TPU VM.
DOCUMENTED = [
    ("v4-8", "tpu-v4-podslice", "ct4p-hightpu-4t", "2x2x1", 1, 4, "tpu-ubuntu2204-base"),
    ("v4-128", "tpu-v4-podslice", "ct4p-hightpu-4t", "4x4x4", 16, 4, "tpu-ubuntu2204-base"),
    ("v5litepod-1", "tpu-v5-lite-podslice", "ct5lp-hightpu-1t", "1x1", 1, 1, "v2-alpha-tpuv5-lite"),
    ("v5litepod-8", "tpu-v5-lite-podslice", "ct5lp-hightpu-8t", "2x4", 1, 8, "v2-alpha-tpuv5-lite"),
    (
        "v5litepod-16",
        "tpu-v5-lite-podslice",
        "ct5lp-hightpu-4t",
        "4x4",
        4,
        4,
        "v2-alpha-tpuv5-lite",
    ),
    (
        "v5litepod-256",
        "tpu-v5-lite-podslice",
        "ct5lp-hightpu-4t",
        "16x16",
        64,
        4,
        "v2-alpha-tpuv5-lite",
    ),
    ("v5p-8", "tpu-v5p-slice", "ct5p-hightpu-4t", "2x2x1", 1, 4, "v2-alpha-tpuv5"),
    ("v5p-128", "tpu-v5p-slice", "ct5p-hightpu-4t", "4x4x4", 16, 4, "v2-alpha-tpuv5"),
    ("v5p-256", "tpu-v5p-slice", "ct5p-hightpu-4t", "4x4x8", 32, 4, "v2-alpha-tpuv5"),
    ("v5p-12288", "tpu-v5p-slice", "ct5p-hightpu-4t", "16x16x24", 1536, 4, "v2-alpha-tpuv5"),
    ("v6e-1", "tpu-v6e-slice", "ct6e-standard-1t", "1x1", 1, 1, "v2-alpha-tpuv6e"),
    ("v6e-8", "tpu-v6e-slice", "ct6e-standard-8t", "2x4", 1, 8, "v2-alpha-tpuv6e"),
    ("v6e-16", "tpu-v6e-slice", "ct6e-standard-4t", "4x4", 4, 4, "v2-alpha-tpuv6e"),
    ("v6e-256", "tpu-v6e-slice", "ct6e-standard-4t", "16x16", 64, 4, "v2-alpha-tpuv6e"),
]


@pytest.mark.parametrize(
    ("type", "label", "machine", "topology", "hosts", "chips", "runtime"),
    DOCUMENTED,
    ids=[row[0] for row in DOCUMENTED],
)
def test_dry_runs_have_the_documented_shapes(
    type, label, machine, topology, hosts, chips, runtime, launch
):
    yaml = pytest.importorskip("yaml")
    flags = ("--name=n", f"--type={type}", "--dry-run", "--", *ODD)
    done = bash(launch / "gke.sh", "run", "--image=i", *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["parallelism"] == job["completions"] == hosts
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] == chips
    assert f"machine type {machine}, topology {topology}, {hosts} nodes each" in done.stderr
    done = bash(launch / "tpu_vm.sh", "run", "--zone=z", *flags, cwd=ROOT)
    create = commands_in(done.stderr)[0]
    assert {f"--accelerator-type={type}", f"--runtime-version={runtime}"} < {*create}


@pytest.mark.parametrize(
    "bad",
    [
        "--type=0xv6e-16", "--type=v6e-7", "--type=h100-8", "--type=v5e-16", "--name=No",
        "--image=", "--image=a b", "--image=i\nx: y", "--namespace=-n", "--service-account=$(id)",
        "--restarts=1\n  suspend: true", "--type=08xv6e-16",
    ],
)  # fmt: skip
def test_gke_refuses(bad, launch):
    flag, value = bad.split("=", 1)
    good = {"--name": "n", "--type": "v6e-16", "--image": "i"} | {flag: value}
    flags = [f"{k}={v}" for k, v in good.items() if v]
    done = bash(launch / "gke.sh", "run", *flags, "--dry-run", "--", *ODD, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and flag in done.stderr


@pytest.mark.parametrize("character", ["\x01", "\x1b", "\x7f", "\x85", "\u2028"])
def test_gke_refuses_characters_that_are_not_for_yaml(character, launch):
    flags = ("--name=n", "--type=v6e-16", "--image=i", "--dry-run", "--", *ODD)
    done = bash(launch / "gke.sh", "run", *flags, f"--config.x=a{character}b", cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: '--config.x=a")


# --------------------------------------------------------------------------------------------------
# Numbers and other values of flags, and what is checked before anything is made
# --------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("value", ["0x1F90", "99999", "0", "x[$(touch own)]"])
def test_the_port_of_local_is_a_number(value, launch, tmp_path):
    done = bash(launch / "local.sh", "--dry-run", cwd=tmp_path, DAPO_PORT=value)
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: DAPO_PORT=") and done.stderr.count("\n") == 1


def test_numbers_are_decimal(launch):
    (command, *others) = printed(launch / "local.sh", "--processes=08", "--devices=010")
    assert len(others) == 7 and "--num_processes=8" in command
    assert any(x.endswith("--xla_force_host_platform_device_count=10") for x in command)


@pytest.mark.parametrize(
    ("script", "bad"),
    [
        ("tpu_vm.sh", "--name=-x"), ("tpu_vm.sh", "--zone=a b"), ("tpu_vm.sh", "--project=$(id)"),
        ("tpu_vm.sh", "--runtime=a;b"), ("tpu_vm.sh", "--to=a\nb"), ("slurm.sh", "--time=1:00 x"),
        ("slurm.sh", "--name=a\nb"), ("slurm.sh", "--extra=a]b"), ("slurm.sh", "--python=../x"),
        ("local.sh", "--python=3.9"), ("quickstart.sh", "--python=../x"), ("gke.sh", "--name=n\n"),
        ("quickstart.sh", "--extra=a]; id"), ("tpu_vm.sh", "--labels=a=b;id"),
        ("tpu_vm.sh", "--labels=$(id)=1"), ("tpu_vm.sh", "--labels=a"), ("tpu_vm.sh", "--ssh=a b"),
        ("tpu_vm.sh", "--data-disk=source=/x y"), ("tpu_vm.sh", "--network=a\nb"),
        ("tpu_vm.sh", "--service-account=`id`"), ("tpu_vm.sh", "--worker=x[$(id)]"),
        ("gke.sh", "--disk=1Gi"), ("gke.sh", "--disk=1\n    limits: {}"),
    ],
)  # fmt: skip
def test_other_values_are_checked_too(script, bad, launch, tmp_path):
    done = bash(launch / script, "--dry-run", bad, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {bad.split('=')[0]}=")


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
    done = bash("-euo", "pipefail", "-c", code, "-", ROOT, *names, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == names and len(names) > 100
    for name, shape, hosts, chips, machine in rows:
        pod = slices.parse(name)
        assert shape == "x".join(map(str, pod.sides)) and int(hosts) == pod.hosts
        assert int(hosts) * int(chips) == pod.chips and machine.endswith(f"-{chips}t")


MISTAKES = [
    (["--config=configs/nope.py"], "--config=configs/nope.py: no such file"),
    (["--config.optim.lrr=3"], "config.optim.lrr: no such field; did you mean optim.lr"),
    (["--config.mesh.tensor=3"], "config.mesh: "),
    (["--hearbeat_timeout=3"], "Unknown command line flag 'hearbeat_timeout'"),
    (["--config.data.train=no.jsonl"], "config.data.train: no.jsonl: no such file or folder"),
    (["--config.rollout.cache_fraction=1.0", "--config.rollout.slots=8192"], "by arithmetic"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [("tpu_vm.sh", *mistake) for mistake in MISTAKES]
    + [("gke.sh", *mistake) for mistake in MISTAKES[-2:]],
)
def test_a_training_is_checked_before_a_slice_is_made(script, flags, said, tmp_path):
    """With the real package; neither gcloud nor kubectl is called. The check is one function, of
    launch/slice.sh: that gke.sh calls it is seen by two mistakes of different kinds."""
    for tool in ("gcloud", "kubectl"):
        executable(tmp_path / tool, f"#!/bin/sh\ntouch '{tmp_path}/called'\n")
    executable(tmp_path / "python3", test_launch.THIS_PYTHON)
    where = ["--zone=z"] if script == "tpu_vm.sh" else ["--image=i"]
    if not any("data.train" in flag for flag in flags):
        where.append("--prepare=fetch")  # of the config's own files
    done = bash(
        LAUNCH / script, "run", "--name=n", *where, "--type=v5p-256", "--",
        "--config=configs/dapo_qwen2_5_32b.py", *flags, "--workdir=gs://b/x",
        cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"error: {said}") and len(lines) <= 2
    assert not (tmp_path / "called").exists()


def test_what_by_arithmetic_does_not_fit_is_for_the_user_to_try(tmp_path):
    executable(tmp_path / "python3", test_launch.THIS_PYTHON)
    done = bash(
        LAUNCH / "gke.sh", "run", "--name=n", "--image=i", "--type=v5p-256", "--prepare=fetch",
        "--skip-plan", "--dry-run", "--", "--config=configs/dapo_qwen2_5_32b.py",
        "--workdir=gs://b/x", "--config.rollout.cache_fraction=1.0", "--config.rollout.slots=8192",
        cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and "warning: by arithmetic this needs" in done.stderr


def test_a_training_that_is_right_passes_the_check(tmp_path):
    executable(tmp_path / "python3", test_launch.THIS_PYTHON)
    done = bash(
        LAUNCH / "gke.sh", "run", "--name=n", "--image=i", "--type=v5p-256", "--dry-run",
        "--prepare=fetch", "--", "--config=configs/dapo_qwen2_5_32b.py", "--workdir=gs://b/x",
        "--heartbeat_timeout=30",
        cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr


def test_sbatch_gets_a_constraint_as_one_word():
    done = bash(LAUNCH / "slurm.sh", "--nodes=1", "--constraint=[a|b]*2&c", "--dry-run", cwd=ROOT)
    assert "--constraint=[a|b]*2&c" in shlex.split(done.stdout.partition(" <<")[0])


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


def test_local_starts_and_ends_all(launch, tmp_path):
    commands = printed(launch / "local.sh", "--processes=3", "--devices=4", NPROC=64)
    for i, command in enumerate(commands):
        at = command.index("dapo_jax.train")
        assert command[at + 1 :] == [
            "--workdir=gs://bucket/x", *ODD, "--coordinator=127.0.0.1:8476", "--num_processes=3",
            f"--process_id={i}",
        ]  # fmt: skip
        assert any(x.endswith("--xla_force_host_platform_device_count=4") for x in command)
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
