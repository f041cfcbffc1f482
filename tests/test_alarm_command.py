"""log.alarm_command: gets the alarm, is bounded in time, and never stops a run."""

import contextlib
import pathlib
import shlex
import sys
import time

import pytest
from ports import wait_until

from dapo_jax.config import schema
from dapo_jax.log import alarm_command


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    for limit in (1, 8, 60):  # s; by then it has to have begun, however busy the machine
        monkeypatch.setattr(alarm_command, "LIMIT_S", limit)
        said, pid = [], tmp_path / f"pid_{limit}"
        command = shlex.join(["sh", "-c", 'sleep 600 & echo $! >"$0"; wait', str(pid)])
        b = alarm_command.AlarmCommand(command, "w", said.append)
        began = time.monotonic()
        b.start(1, 1, ["a"])
        b.start(2, 2, ["a"])  # the first still runs
        waited = time.monotonic() - began
        b._running.join(2 * limit + 60)
        if waited < limit and pid.is_file() and pid.read_text():
            break
    assert waited < limit  # the run does not wait
    assert said == [f"warning: log.alarm_command: ended after {limit} s"]
    # The child of a killed parent is the system's to bury.
    wait_until(lambda: not running(int(pid.read_text())))


def running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


def test_a_command_that_fails_is_said_and_none_is_not_run():
    said, command = [], shlex.join([sys.executable, "-c", "raise SystemExit(3)"])
    none, fails = (alarm_command.AlarmCommand(c, "w", said.append) for c in ("", command))
    for b in (none, fails):
        b.start(1, 1, ["a"])
    assert none._running is None
    fails._running.join(60)
    assert said == ["warning: log.alarm_command: exit status 3"]


@pytest.mark.parametrize(
    ("command", "why"), [("no-such-program x", "no such program"), ("curl 'x", "No closing")]
)
def test_a_command_that_cannot_be_is_refused(command, why):
    with pytest.raises(schema.ConfigError, match=f"config.log.alarm_command: .*{why}"):
        alarm_command.words(command)
