"""The alarm command: `log.alarm_command`, such as a curl to a webhook, runs for each alarm.

It gets one JSON object on standard input: workdir, step, in_row (steps in a row with an alarm),
alarms (sentences), time (seconds since 1970). It runs without a shell.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from dapo_jax.config import schema

LIMIT_S, CLOSE_S = 30, 3  # seconds: limit of a command; how long the end of a run waits for it


def words(command: str) -> list[str]:
    """The command, split as a shell would. ConfigError: it cannot be split, or no such program."""
    try:
        split = shlex.split(command)
    except ValueError as error:
        raise schema.ConfigError(f"config.log.alarm_command: {command!r}: {error}") from error
    if split and shutil.which(split[0]) is None:
        raise schema.ConfigError(f"config.log.alarm_command: {split[0]}: no such program")
    return split


class AlarmCommand:
    """Runs the alarm command. name: of the workdir; say: prints a warning."""

    def __init__(self, command: str, name: str, say: Callable[[str], None]):
        self._words, self._name, self._say = words(command), name, say
        self._running: threading.Thread | None = None

    def start(self, step: int, in_row: int, alarms: list[str]) -> None:
        """Start the command and return at once; do nothing while an earlier one still runs."""
        if not self._words or (self._running and self._running.is_alive()):
            return
        message = {"workdir": self._name, "step": step, "in_row": in_row, "alarms": alarms}
        message["time"] = round(time.time(), 3)
        self._running = threading.Thread(target=self._run, args=[json.dumps(message)], daemon=True)
        self._running.start()

    def _run(self, message: str) -> None:
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        how = dict(stdin=subprocess.PIPE, text=True, start_new_session=True)
        try:
            # In its own session: Ctrl-C reaches only the training, and children are killed too.
            with subprocess.Popen(self._words, **how, **quiet) as process:
                try:
                    process.communicate(message, timeout=LIMIT_S)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    self._say(f"warning: log.alarm_command: ended after {LIMIT_S} s")
            if process.returncode > 0:
                self._say(f"warning: log.alarm_command: exit status {process.returncode}")
        except (OSError, ValueError) as error:  # no argument can hold a NUL
            self._say(f"warning: log.alarm_command: {error}")

    def close(self) -> None:
        if self._running:
            self._running.join(CLOSE_S)
