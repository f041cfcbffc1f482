"""log.alarm_command: gets the alarm, is bounded in time, and never stops a run."""

import json
import os
import pathlib
import shlex
import sys
import time

import pytest

from dapo_jax.config import schema
from dapo_jax.log import bell

ALARMS = ["entropy is low; $(touch x)", "\u00e9"]


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_the_command_gets_the_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(bell, "CLOSE_S", 60)
    said, out = [], tmp_path / "a file with spaces"
    b = bell.Bell(f"tee {shlex.quote(str(out))}", "gs://b/run", said.append)
    b.ring(7, 2, ALARMS)
    b.close()
    message = json.loads(out.read_text())
    assert abs(message.pop("time") - time.time()) < 600
    assert message == {
        "workdir": "gs://b/run", "step": 7, "in_row": 2, "alarms": ALARMS,
    }  # fmt: skip
    assert said == []


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    for limit in (1, 8, 60):  # s; by then it has to have begun, however busy the machine
        monkeypatch.setattr(bell, "LIMIT_S", limit)
        said, pid = [], tmp_path / f"pid_{limit}"
        b = bell.Bell(shlex.join(["sh", "-c", 'sleep 600 & echo $! >"$0"; wait', str(pid)]), "w",
                      said.append)  # fmt: skip
        began = time.monotonic()
        b.ring(1, 1, ["a"])
        b.ring(2, 2, ["a"])  # the first still runs
        waited = time.monotonic() - began
        b._ringing.join(2 * limit + 60)
        if waited < limit and pid.is_file() and pid.read_text():
            break
    assert waited < limit  # the run does not wait
    assert said == [f"warning: log.alarm_command: ended after {limit} s"]
    deadline = time.monotonic() + 60
    while running(int(pid.read_text())):  # the child of a killed parent is the system's to bury
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_command_that_fails_is_said(tmp_path):
    said = []
    b = bell.Bell(python("raise SystemExit(3)"), "w", said.append)
    b.ring(1, 1, ["a"])
    b._ringing.join(60)
    assert said == ["warning: log.alarm_command: exit status 3"]


@pytest.mark.parametrize(
    ("command", "why"), [("no-such-program x", "no such program"), ("curl 'x", "No closing")]
)
def test_a_command_that_cannot_be_is_refused(command, why):
    with pytest.raises(schema.ConfigError, match=f"config.log.alarm_command: .*{why}"):
        bell.words(command)


def test_without_a_command_nothing_runs():
    b = bell.Bell("", "w", print)
    b.ring(1, 1, ["a"])
    b.close()
    assert b._ringing is None
