"""A hang ends: what takes too long prints all stacks and leaves, and is started again.

A phase (`train.Hooks.phase`) lasts until the next one begins. Its usual duration is the median of
the run's own last ones; the first of each kind, which compiles, has a limit of its own.
"""

import collections
import faulthandler
import math
import os
import statistics
import sys
import threading
import time

from dapo_jax.hosts import exit_report, processes

TICK_S = 1.0  # between two looks at the clock
_GIL_S = 60.0  # so much later faulthandler ends the process if Python could not


class Watchdog:
    """A context. `phase(name)` says that a phase begins; `guard` has the limits
    (config.guard.hang_*). The process ends with os.EX_TEMPFAIL (75), and launchers run it again."""

    def __init__(self, guard):
        self._guard, self._file = guard, sys.__stderr__
        self._leave, self._clock = processes.leave, time.monotonic
        self._usual = collections.defaultdict(lambda: collections.deque(maxlen=31))  # s
        self._now = ("", 0.0, 0.0, 0.0)  # phase, when it began; when to print, and to end
        self._printed: tuple | None = None  # the phase whose stacks are printed
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._guard.hang_factor:
            self.phase("start-up")  # before the thread looks
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def phase(self, name: str) -> None:
        if not self._guard.hang_factor or self._closed.is_set():
            return
        (before, began, *_), now = self._now, self._clock()
        if before:
            self._usual[before].append(now - began)
        told, end = self._limits(name)
        self._now = (name, now, now + told, now + end)
        if end < math.inf:
            # Written in C, so it also ends a process that waits with Python's lock held. Status 1.
            faulthandler.dump_traceback_later(end + _GIL_S, exit=True, file=self._file)

    def _limits(self, name: str) -> tuple[float, float]:
        """Seconds after which all stacks are printed, and after which the process ends."""
        guard, known = self._guard, self._usual[name]
        if not known:
            return math.inf, guard.hang_first_s or math.inf
        usual = guard.hang_factor * statistics.median(known)
        end = max(guard.hang_end_s, usual) if guard.hang_end_s else math.inf
        return max(guard.hang_floor_s, usual), end

    def _run(self) -> None:
        while not self._closed.wait(TICK_S):
            self.look()

    def look(self) -> None:
        """Print, or end the process, if it is time."""
        turn = name, began, told, end = self._now
        now = self._clock()
        lasted = f"{name!r} has lasted for {now - began:.0f} s"
        if now > min(told, end) and turn is not self._printed:
            self._printed, usual = turn, "for the first time"
            if known := self._usual[name]:
                usual = f"usually {statistics.median(known):.1f} s"
            self._print_stacks(f"{lasted}, {usual}; all stacks:")
        if now > end and self._now is turn and not self._closed.is_set():
            self._print_stacks("all stacks at the end:")
            what = f"a hang: {lasted} (config.guard.hang_*); leaving with status {os.EX_TEMPFAIL}. "
            self._leave(what + exit_report.AGAIN, os.EX_TEMPFAIL)

    def _print_stacks(self, title: str) -> None:
        print(f"watchdog: {title}", file=self._file, flush=True)
        faulthandler.dump_traceback(self._file)
