"""SIGTERM and Ctrl-C ask; whoever does not come to listen is ended in time."""

import signal
import subprocess
import sys
import time

import pytest
from levels import slow
from ports import wait_until

from dapo_jax.hosts import leaving

RUN = """
import signal, sys, time
from dapo_jax.config import cli
from dapo_jax.hosts import leaving

def main():
    with leaving.signals() as asked:
        print("begun", flush=True)
        while not asked:
            time.sleep(0.01)
        print("asked", *asked, flush=True)
        if "again" in sys.argv:
            time.sleep(60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if "ending" in sys.argv:
        leaving.ending()
    print("saved", flush=True)
    if "after" in sys.argv:
        time.sleep(60)
    if "ending" in sys.argv:
        signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may be in a background
cli.flags.FLAGS(["run"])
cli._guarded(main, [])
"""
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("how", "numbers", "code", "said"),
    [
        ("", [signal.SIGINT], 0, ["asked 2", "saved"]),
        slow("again", [signal.SIGINT, signal.SIGINT], 130, ["asked 2"]),
        ("again", [signal.SIGTERM, signal.SIGINT, signal.SIGINT], 130, ["asked 15"]),
        slow("after", [signal.SIGTERM, signal.SIGINT], 130, ["asked 15", "saved"]),
        ("ending", [signal.SIGTERM], 0, ["asked 15", "saved"]),  # and once more, late
    ],
)
def test_signals(how, numbers, code, said):
    """The first asks, a second Ctrl-C ends at once, in a line."""
    process = subprocess.Popen([sys.executable, "-c", RUN, how], **PIPES)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(numbers[0])
    for line in said:
        assert process.stdout.readline() == line + "\n"
    for number in numbers[1:-1]:
        process.send_signal(number)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline().startswith("interrupt: saving and leaving;")
    if numbers[1:]:
        process.send_signal(numbers[-1])
    out, err = process.communicate(timeout=120)
    assert process.returncode == code and out == "" and "Traceback" not in err
    assert code == 0 or err.endswith("interrupted\n")


def test_a_job_in_the_background_ignores_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with leaving.signals() as asked:
            signal.raise_signal(signal.SIGINT)
            assert not asked
            signal.raise_signal(signal.SIGTERM)
            assert asked == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before)


STUCK = """
import hashlib, sys
from dapo_jax.config import cli
from dapo_jax.hosts import leaving

leaving.GRACE_S, leaving.FLUSH_S = 0.5, 60.0
if "flags" in sys.argv:
    cli.flags.FLAGS(["run", "--terminated_status=75"])
with leaving.signals():
    print("begun", flush=True)
    print("not flushed")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # no handler of Python runs meanwhile
"""


@pytest.mark.parametrize(("parsed", "code"), [("flags", 75), slow("", 143)])
def test_a_process_that_is_stuck_is_ended_in_time(parsed, code, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with subprocess.Popen([sys.executable, "-c", STUCK, parsed], **PIPES) as process:
        assert process.stdout.readline() == "begun\n"
        asked = time.monotonic()
        for _ in range(3):  # each of them counts from the first
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        out, err = process.communicate(timeout=120)
        assert time.monotonic() - asked >= 0.5
        assert process.returncode == code and out == "not flushed\n"
        assert err.startswith("terminated: not ready to leave 0.5 s after SIGTERM")


def test_all_leave_where_one_is_asked(monkeypatch):
    """A process that no signal has reached has to be gone in time after another's SIGTERM; Ctrl-C
    has no deadline."""
    ended = []
    monkeypatch.setattr(leaving.os, "_exit", ended.append)
    monkeypatch.setattr(leaving, "GRACE_S", 0.05)
    with leaving.signals() as asked:
        asked.check()
        asked.append(signal.SIGINT)
        with pytest.raises(leaving.Leave):
            asked.check()
        time.sleep(0.1)
        assert not ended and not issubclass(leaving.Leave, Exception)
        monkeypatch.setattr(leaving.parallel, "any_process", lambda flag: True)
        with pytest.raises(leaving.Leave):
            asked.check()
        wait_until(lambda: ended)
