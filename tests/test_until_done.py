"""What a host of a cluster runs: the training's status, and its log in the workdir."""

import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import threading

import pytest

from dapo_jax.hosts import until_done


def start(code: str, *flags: str, **env) -> subprocess.Popen:
    """With a training that is a script of bash."""
    command = ["bash", "-c", code, *flags]
    main = f"from dapo_jax.hosts import until_done; raise SystemExit(until_done.main({command}))"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", main], env=os.environ | env, **pipes)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("echo terminated after step 4; exit 0", 0), ("exit 3", 3), ("exit 255", 255),
        ("exit ${0#--terminated_status=}", 75), ("kill -TERM $$", 143),  # told by others
    ],
)  # fmt: skip
def test_the_exit_status_is_handed_on(code, status, tmp_path):
    note = tmp_path / "status"
    running = start(code, DAPO_STATUS_FILE=str(note))
    out, err = running.communicate(timeout=120)
    assert running.returncode == status and note.read_text() == f"{status}\n"
    assert err == "" and out.strip() in code


@pytest.mark.parametrize(
    ("on_term", "status"),
    [("exit 75", 75), ("exit 0", 0), ("exit 4", 4), ("sleep 0.3; exit 75", 75), ("", 75)],
)
def test_it_asks_to_leave_and_waits(on_term, status):
    """The last: a training that has not come to take SIGTERM yet."""
    trap = f"trap {shlex.quote(on_term)} TERM; " if on_term else ""
    running = start(trap + "echo up; while :; do sleep 0.02; done")
    assert running.stdout.readline() == "up\n"
    for _ in range(2):  # Slurm and Kubernetes may say it twice
        running.send_signal(signal.SIGTERM)
    running.communicate(timeout=120)
    assert running.returncode == status


@pytest.mark.parametrize("flag", [["--workdir=~/w/"], ["-workdir", "~/w"]])
def test_the_log_is_kept_in_the_workdir_to_the_last_line(tmp_path, flag):
    log, logs = tmp_path / "run.log", tmp_path / "w/logs"
    code = "trap 'echo last words; exit 75' TERM; echo up; while :; do sleep 0.02; done"
    running = start(code, *flag, DAPO_LOG=str(log), HOME=str(tmp_path))
    assert running.stdout.readline() == "up\n"
    running.send_signal(signal.SIGTERM)
    assert running.communicate(timeout=120) == ("last words\n", "") and running.returncode == 75
    (kept,) = logs.iterdir()
    assert kept.read_text() == log.read_text() == "up\nlast words\n"


@pytest.mark.parametrize("failing", [False, True])
def test_the_copy_grows_and_a_failure_is_named_once(failing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(until_done, "EVERY_S", 0.02)
    log, folder, ends = tmp_path / "run.log", tmp_path / "logs", threading.Event()
    log.write_text("one\n")
    if failing:
        folder.write_text("in the way")
    tries, read = [], pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: tries.append(path) or read(path))
    thread = threading.Thread(target=until_done.keep, args=[log, str(folder), ends])
    thread.start()
    while tries.count(log) < 4 or not (failing or list(folder.glob("*.log"))):
        thread.join(0.01)
    if failing:
        folder.unlink()
    log.write_text("one\ntwo\n")
    ends.set()
    thread.join(60)
    (copy,) = folder.iterdir()
    assert copy.read_text() == "one\ntwo\n" and copy.name.endswith(f"Z_{socket.gethostname()}.log")
    assert capsys.readouterr().err.count("not written") == failing
