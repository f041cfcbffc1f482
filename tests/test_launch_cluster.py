"""The cluster scripts at work: whole lives of a TPU slice with a gcloud that is fake but runs what
it is told to run on its "hosts", which are folders; a fake kubectl; local processes. The fakes are
in tests/data/fakes."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import scripts
from ports import wait_until
from scripts import FAKES, LAUNCH, ODD, ROOT, THIS_PYTHON, bash, executable, link_tools, on_path

PYTHON = {"DAPO_TPU_PYTHON": "{}.{}".format(*sys.version_info)}  # the only one there is

# --- tpu_vm.sh ---


class Cloud:
    """`folder` is the cloud, `checkout` has a stand-in for the trainer."""

    def __init__(self, folder: Path):
        self.folder, self.checkout = folder, scripts.make_checkout(folder)
        self.tools = scripts.make_tools(folder)
        shutil.copy(FAKES / "gcloud", self.tools)
        shutil.copy(FAKES / "trainer", self.checkout / "dapo_jax/train.py")
        (self.checkout / "dapo_jax/hosts").mkdir()
        shutil.copy(ROOT / "dapo_jax/hosts/until_done.py", self.checkout / "dapo_jax/hosts")
        (self.checkout / ".git").mkdir()
        (self.checkout / ".git/secret").write_text("")

    def run(self, *flags) -> subprocess.CompletedProcess:
        call = f'exec {shlex.join([sys.executable, "-IS", str(FAKES / "reaper")])} bash "$@"'
        command = ("-", self.checkout / "launch/tpu_vm.sh", "run", "--name=n", "--zone=z")
        env = dict(CLOUD=self.folder, PATH=on_path(self.tools), DAPO_POLL_SECONDS="0.1", **PYTHON)
        flags = ("--type=v6e-8", *flags, "--", *ODD)
        return bash("-c", call, *command, *flags, cwd=self.folder, **env)

    def has_slice(self) -> None:
        """That is not taken away, where a run has been."""
        (self.folder / "request").write_text("ACTIVE\n")
        (self.folder / "node").write_text("READY\n")
        for name in ("preempted", "bucket", "host0", "host1"):
            (self.folder / name).mkdir()

    def calls(self) -> list[list[str]]:
        return [shlex.split(x) for x in (self.folder / "calls").read_text().splitlines()]

    def kinds(self) -> list[str]:
        return [call[3] for call in self.calls() if call[3] != "describe"]


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path)


def shown(done) -> list[str]:
    """What the training has printed, but for its arguments."""
    return [x for x in done.stdout.splitlines() if not x.startswith("[")]


def test_a_slice_is_made_taken_away_made_again_and_deleted(cloud):
    done = cloud.run("--spot", "--delete")
    assert done.returncode == 0, done.stderr
    assert shown(done) == [
        "start", "step 1", "terminated after step 1, saved; the same command goes on from there",
        "resumed after step 1", "done: 2 steps",
    ]  # fmt: skip
    # The flags came through two shells as they were.
    told = str(["--num_processes=1", *ODD, "--terminated_status=75"])
    assert done.stdout.startswith(told + "\n")
    # Look whether something runs, copy, install, start, follow, delete; and all of it again.
    one = ["create", "ssh", "scp", "ssh", "ssh", "ssh"]
    assert cloud.kinds() == [*one, "delete", *one, "delete"]
    assert not (cloud.folder / "host0").exists() and not (cloud.folder / "request").exists()


def test_a_slice_that_is_there_is_used_and_not_deleted(cloud):
    """A look at it that fails changes nothing."""
    cloud.has_slice()
    (cloud.folder / "silent").touch()
    done = cloud.run()
    assert done.returncode == 0 and shown(done)[-1] == "done: 2 steps", done.stderr
    assert not (cloud.folder / "silent").exists() and not {"create", "delete"} & {*cloud.kinds()}
    for home in (cloud.folder / host / "dapo_jax" for host in ("host0", "host1")):
        log = home / "run.log"  # it follows the first host's alone
        wait_until(lambda log=log: "done: 2 steps" in log.read_text())
        assert not (home / ".git").exists()


def test_a_slice_at_work_with_other_flags_is_left_alone(cloud):
    """Its log would be taken for that of this run."""
    cloud.has_slice()
    shutil.copytree(LAUNCH, cloud.folder / "host0/dapo_jax/launch")
    for name, text in (("pid", os.getpid()), ("flags", "--config.optim.lr=1e-3 ")):
        (cloud.folder / f"host0/dapo_jax/run.{name}").write_text(f"{text}\n")
    done = cloud.run()
    said = "error: slice n is at work with other flags: stop it, or give those"
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == said
    assert cloud.kinds() == ["ssh"]


def test_a_request_that_fails_ends_with_cloud_s_reason(cloud):
    """Once it is ours: one from before is made anew."""
    (cloud.folder / "refuse").touch()
    done = cloud.run()
    assert (done.returncode, done.stdout) == (1, "")
    refused = "error: slice n: Cloud has refused the request: no capacity in z"
    assert done.stderr.splitlines()[-1] == refused
    (cloud.folder / "refuse").unlink()
    for name in ("preempted", "bucket"):
        (cloud.folder / name).mkdir()
    done = cloud.run()
    assert done.returncode == 0 and shown(done)[-1] == "done: 2 steps", done.stderr
    assert "an earlier request failed (no capacity in z)" in done.stderr
    assert cloud.kinds().count("delete") == 1


def test_a_network_that_is_away_from_the_first_gives_up_and_deletes_nothing(cloud):
    cloud.has_slice()
    (cloud.folder / "offline").touch()
    done = cloud.run()
    assert done.returncode == 1 and "gcloud cannot say what there is of n" in done.stderr
    assert "ERROR: no route to host" in done.stderr and cloud.kinds() == []


def test_a_broken_connection_shows_no_line_twice(cloud):
    """Nor is the training started anew where the next look at it breaks off, too."""
    cloud.has_slice()
    (cloud.folder / "breaks").touch()
    # Alive where it is asked, so that the same training is followed again.
    worker = cloud.checkout / "launch/worker.sh"
    text, runs = worker.read_text(), ' && kill -0 "$(<"$pid")" 2>/dev/null'
    assert runs in text
    worker.write_text(text.replace(runs, ""))
    done = cloud.run()
    assert done.returncode == 0 and not (cloud.folder / "breaks").exists(), done.stderr
    assert shown(done) == ["resumed after step 1", "done: 2 steps"]
    assert done.stdout.count("--terminated_status=75") == 1  # the line that was shown before


def test_a_training_that_fails_is_started_again_and_given_up(cloud):
    (cloud.checkout / "dapo_jax/train.py").write_text("raise SystemExit('error: no such field')")
    (cloud.folder / "preempted").mkdir()
    done = cloud.run("--retries=1")
    assert done.returncode == 1 and shown(done) == ["error: no such field"] * 2
    assert cloud.kinds().count("create") == 1 and "delete" not in cloud.kinds()


def test_several_slices_are_waited_for_and_driven_together(cloud):
    """Where one fails the launcher does, once it has run out of tries."""
    shutil.copy(FAKES / "gcloud_two_nodes", cloud.tools / "gcloud")
    done = cloud.run("--type=2xv6e-8", "--retries=0")
    assert done.returncode == 1, done.stderr
    ssh = [(x[4], x[-1]) for x in cloud.calls() if x[3] == "ssh"]
    assert sorted(n for n, command in ssh if "worker.sh start" in command) == ["n-0", "n-1"]
    assert not any("follow" in command for _, command in ssh)
    assert sorted(x[5].split(":")[0] for x in cloud.calls() if x[3] == "scp") == ["n-0", "n-1"]


def test_a_host_without_uv_gets_the_one_that_is_pinned(cloud):
    """By a python3 whose pip is fake: the version and its checksum are said, and nothing is piped
    into a shell."""
    tools, folder, home = cloud.tools, cloud.folder, cloud.folder / "home"
    (tools / "uv").rename(tools / "real-uv")
    shutil.copy(FAKES / "pip", tools / "python3")
    link_tools(tools, "bash", "cat", "cksum", "dirname", "cp", "grep", "mkdir", "rm")
    venv = f".venv-{PYTHON['DAPO_TPU_PYTHON']}"
    executable(cloud.checkout / venv / "bin/python", THIS_PYTHON)
    done = bash(
        cloud.checkout / "launch/worker.sh", "install", cwd=folder, PATH=tools, HOME=home, **PYTHON
    )
    assert done.returncode == 0, done.stderr
    words = (folder / "pip").read_text().splitlines()
    assert words[:3] == ["-m", "pip", "install"] and "--require-hashes" in words
    (requirements,) = (w.partition("=")[2] for w in words if w.startswith("--requirement="))
    pinned = Path(requirements).read_text().splitlines()[-1]
    assert re.fullmatch(r"uv==\d+\.\d+\.\d+ --hash=sha256:[0-9a-f]{64}", pinned)
    assert f"/{venv}/bin/python" in (home / ".cache/dapo_jax/uv/uv.log").read_text()


# --- What is checked before anything is made, with the real package -------------------------------

BIG = ["--config.rollout.cache_fraction=1.0", "--config.rollout.slots=8192"]
PREPARED = ["--prepare=fetch"]  # of the config's own files
# (script, flags of a run of the 32B on 128 chips, flags of the training, exit status, what is said)
CHECKED = [
    ("tpu_vm.sh", [], ["--config=configs/nope.py"], 2, "error: --config=configs/nope.py: "),
    ("tpu_vm.sh", [], ["--hearbeat_timeout=3"], 2, "error: Unknown command line flag 'hearbeat"),
    ("tpu_vm.sh", [], ["--config.data.train=no.jsonl"], 2, "error: config.data.train: no.jsonl"),
    ("tpu_vm.sh", PREPARED, BIG, 2, "error: by arithmetic"),
    ("gke.sh", PREPARED, ["--config.optim.lrr=3"], 2, "error: config.optim.lrr: no "),
    ("gke.sh", [*PREPARED, "--skip-plan", "--dry-run"], BIG, 0, "warning: by arithmetic"),
    ("gke.sh", [*PREPARED, "--dry-run"], ["--heartbeat_timeout=30"], 0, "[set-up] node"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "training", "status", "said"),
    [*(pytest.param(*case, marks=pytest.mark.nightly) for case in CHECKED[:2]), *CHECKED[2:]],
)  # by day one line that is wrong in itself
def test_a_training_is_checked_before_a_slice_is_made(
    script, flags, training, status, said, tmp_path
):
    """The check is one function, of launch/slice.sh: by both scripts some mistakes of each kind.
    Neither gcloud nor kubectl may be called."""
    for tool in ("gcloud", "kubectl"):
        executable(tmp_path / tool, f"#!/bin/sh\ntouch '{tmp_path}/called'\n")
    executable(tmp_path / "python3", THIS_PYTHON)
    where = ["--zone=z"] if script == "tpu_vm.sh" else ["--image=i"]
    done = bash(
        LAUNCH / script, "run", "--name=n", *where, "--type=v5p-256", *flags,
        "--", "--config=configs/dapo_qwen2_5_32b.py", *training, "--workdir=gs://b/x",
        cwd=tmp_path, PATH=on_path(tmp_path), PYTHONPATH=ROOT,
    )  # fmt: skip
    assert done.returncode == status and not (tmp_path / "called").exists(), done.stderr
    assert done.stderr.startswith(said) and (not status or done.stderr.count("\n") <= 2)
    assert bool(done.stdout) == (not status)


# --- gke.sh, local.sh -----------------------------------------------------------------------------


ENDS = [
    ("Completed: jobset completed successfully", 0, "[set-up] Completed: jobset completed"),
    ("Failed: reached maximum restarts", 1, "error: the job has failed: reached maximum"),
    (None, 1, "error: there is no job dapo"),
]


@pytest.mark.parametrize(("end", "status", "said"), ENDS)
def test_gke_follows_through_restarts_to_the_end(end, status, said, tmp_path):
    if end:
        (tmp_path / "end").write_text(end + "\n")
    env = dict(CLUSTER=tmp_path, PATH=on_path(FAKES), DAPO_POLL_SECONDS="0.01")
    done = bash(LAUNCH / "gke.sh", "logs", "--name=dapo", cwd=tmp_path, **env)
    assert (done.returncode, done.stdout) == (status, "one\ntwo\nthree\n" if end else "")
    assert done.stderr.splitlines()[-1].startswith(said)


def test_local_starts_and_ends_all(tmp_path):
    checkout, tools = scripts.make_checkout(tmp_path), scripts.make_tools(tmp_path)
    code = "import sys, time; number = int(sys.argv[-1][-1]); print('process', number, flush=True)"
    executable(tmp_path / "dapo_jax/train.py", code + "; sys.exit(3) if number else time.sleep(50)")
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    places = {f"{tmp_path}/w": tmp_path / "w", f"{tmp_path}/w x/": tmp_path / "w x"}
    places |= {"~/h": tmp_path / "h", "gs://b/run": checkout / "runs/run"}
    for workdir, logs in places.items():
        flags, where = ("--", f"--workdir={workdir}"), dict(PATH=on_path(tools), HOME=tmp_path)
        done = bash(checkout / "launch/local.sh", *flags, cwd=tmp_path, **where)
        assert (done.returncode, done.stdout) == (3, "process 0\n")
        assert Path(f"{logs}.process_1.log").read_text() == "process 1\n"
    flags = ("--", "--workdir=/dev/null/x/w")
    done = bash(checkout / "launch/local.sh", *flags, cwd=tmp_path, **where)
    assert (done.returncode, done.stdout) == (1, "")  # of none that would wait for the others


def test_ctrl_c_waits_until_all_have_saved(tmp_path):
    """In a terminal it goes to the script's own `sleep`, too."""
    checkout, tools = scripts.make_checkout(tmp_path), scripts.make_tools(tmp_path)
    code = (
        "import signal, time; signal.signal(15, lambda *_: exit(time.sleep(1) or print('done')));"
    )
    executable(tmp_path / "dapo_jax/train.py", f"{code} print('up', flush=True); time.sleep(60)")
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    command = [checkout / "launch/local.sh", "--processes=1", "--", f"--workdir={tmp_path}/w"]
    how = dict(env=os.environ | {"PATH": on_path(tools)}, cwd=tmp_path, text=True)
    how |= dict(stdout=subprocess.PIPE, start_new_session=True)
    with subprocess.Popen(["bash", *command], **how) as script:
        assert script.stdout.readline() == "up\n"
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(20) == 0 and script.stdout.read() == "done\n"


def test_a_run_that_fails_on_slurm_does_not_go_into_the_queue_again(tmp_path):
    """Where Slurm tells the others of a failed process to leave, these say that they go on."""
    checkout, tools = scripts.make_checkout(tmp_path), scripts.make_tools(tmp_path)
    fails = "import os, time; time.sleep(int(os.environ['SLURM_PROCID'])); raise SystemExit('no')"
    executable(checkout / "dapo_jax/train.py", fails)
    (checkout / "dapo_jax/hosts").mkdir()
    shutil.copy(ROOT / "dapo_jax/hosts/until_done.py", checkout / "dapo_jax/hosts")
    executable(checkout / ".venv/bin/python", THIS_PYTHON)
    executable(tools / "scontrol", "#!/bin/sh\necho scontrol $*\n")
    done = bash(checkout / "launch/slurm.sh", "--nodes=2", "--gpus=0", "--dry-run", cwd=checkout)
    job = done.stdout.partition(' <<"JOB"\n')[2].removesuffix("JOB\n")
    ran = bash("-c", job, cwd=checkout, PATH=f"{FAKES}:{on_path(tools)}", SLURM_JOB_ID=7)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", "no\nno\n")


def test_local_starts_a_process_for_each_gpu(tmp_path):
    """With a stand-in for nvidia-smi; one that lists too few, or fails, starts nothing."""
    checkout, tools = scripts.make_checkout(tmp_path), scripts.make_tools(tmp_path)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['JAX_PLATFORMS'])"
    executable(tmp_path / "dapo_jax/train.py", code)
    (tmp_path / "dapo_jax/__init__.py").write_text("")
    two = "#!/bin/sh\necho 'GPU 0: H100 (UUID: a)'; echo 'GPU 1: H100 (UUID: b)'\n"
    executable(tools / "nvidia-smi", two)

    def started(gpus: int, visible=""):
        flags = (f"--gpus={gpus}", "--", f"--workdir={tmp_path}/w")
        env = dict(PATH=on_path(tools), CUDA_VISIBLE_DEVICES=visible)
        return bash(checkout / "launch/local.sh", *flags, cwd=tmp_path, **env)

    done = started(2)
    assert (done.returncode, done.stdout) == (0, "0 cuda,cpu\n"), done.stderr
    assert (tmp_path / "w.process_1.log").read_text() == "1 cuda,cpu\n"
    assert started(2, "6, 3,1").stdout == "6 cuda,cpu\n"
    assert (tmp_path / "w.process_1.log").read_text() == "3 cuda,cpu\n"
    assert started(2, "6").stderr == "error: --gpus=2: CUDA_VISIBLE_DEVICES=6 names 1\n"
    assert started(3).stderr == "error: --gpus=3: nvidia-smi lists 2 on this machine\n"
    executable(tools / "nvidia-smi", "#!/bin/sh\necho no driver; exit 9\n")
    assert started(1).stderr == "error: nvidia-smi failed: no driver\n"
