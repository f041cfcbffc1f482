"""log.alarm_command: gets the alarm, is bounded in time, and never stops a run."""

import json
import os
import pathlib
import shlex
import sys
import time

import pytest

from dapo_jax import schema
from dapo_jax.log import bell

ALARMS = ["entropy is low; $(touch x)", "\u00e9"]


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_the_command_gets_the_alarm(tmp_path):
    said, out = [], tmp_path / "a file with spaces"
    b = bell.Bell(f"tee {shlex.quote(str(out))}", "gs://b/run", said.append)
    b.ring(7, 2, ALARMS)
    b.close()
    message = json.loads(out.read_text())
    assert abs(message.pop("time") - time.time()) < 60
    assert message == {
        "workdir": "gs://b/run", "step": 7, "in_row": 2, "alarms": ALARMS,
    }  # fmt: skip
    assert said == []


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(bell, "LIMIT_S", 1)
    said, pid = [], tmp_path / "pid"
    code = f"""
import pathlib, subprocess
child = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
child.wait()
"""
    b = bell.Bell(python(code), "w", said.append)
    began = time.monotonic()
    b.ring(1, 1, ["a"])
    assert time.monotonic() - began < 0.9  # the run does not wait
    b.ring(2, 2, ["a"])  # the first still runs
    b._ringing.join(20)
    assert said == ["warning: log.alarm_command: ended after 1 s"]
    for _ in range(100):  # the child of a killed parent is the system's to bury
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            break
        if pathlib.Path(f"/proc/{pid.read_text()}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child goes on")


def test_a_command_that_fails_is_said(tmp_path):
    said = []
    b = bell.Bell(python("raise SystemExit(3)"), "w", said.append)
    b.ring(1, 1, ["a"])
    b._ringing.join(20)
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
