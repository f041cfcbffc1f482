"""Leaving when asked: SIGTERM, which announces a preemption, and Ctrl-C.

A cloud gives 15 to 30 s of notice, and a step may take an hour. So a run checks between two chunks
of decoding and between two updates whether a signal came (`Asked.check`), and leaves there, on all
processes at the same point. Where it cannot check, in a compilation or a long save, a thread ends
the process in time, and the run loses only what was not saved yet.
"""

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from absl import flags

from dapo_jax import parallel
from dapo_jax.config import cli

GRACE_S = 8.0  # from SIGTERM to the end of the process, at most
FLUSH_S = 0.2  # seconds of GRACE_S reserved to flush each output stream


class Leave(BaseException):
    """Ends the run, on every process. No Exception: a handler of failed saves would catch it."""


class Asked(list[int]):
    """The numbers of the signals that came."""

    def __init__(self, wakeup: int):
        self._wakeup = wakeup  # file descriptor that the thread listens at

    def check(self) -> None:
        """Raise Leave if any process has received a signal. A collective."""
        if parallel.any_process(bool(self)):
            if parallel.any_process(signal.SIGTERM in self):  # then all have little time
                os.write(self._wakeup, bytes([signal.SIGTERM]))
            raise Leave


@contextlib.contextmanager
def signals() -> Iterator[Asked]:
    """Within this scope SIGTERM and a first Ctrl-C are only noted; a second Ctrl-C is
    KeyboardInterrupt. The process ends GRACE_S after SIGTERM, unless the scope has ended before."""
    listening, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    asked = Asked(wakeup)

    def ask(number, _) -> None:
        asked.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # Not by print, which may be what the signal has interrupted.
            os.write(2, b"\ninterrupt: saving and leaving; Ctrl-C again ends at once\n")

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] == signal.SIG_IGN:  # a job in a shell's background
        del before[signal.SIGINT]
    threading.Thread(target=_end_in_time, args=(listening,), daemon=True).start()
    # Python runs a handler only when its main thread is back from the device or the compiler; the
    # signal's number is in the pipe at once.
    wakeup_before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    try:
        for number in before:
            signal.signal(number, ask)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set by Python
        signal.set_wakeup_fd(wakeup_before)
        os.close(wakeup)  # ends the thread


def ending() -> None:
    """Ignore SIGTERM from now on: the run is complete, and must end with its own status, not with
    that of a SIGTERM, after which a launcher would start it again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_in_time(listening: int) -> None:
    """End the process GRACE_S after SIGTERM came through the pipe; return when it is closed."""
    deadline = math.inf
    wait_s = lambda: None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
    while select.select([listening], [], [], wait_s())[0]:
        if not (numbers := os.read(listening, 64)):
            os.close(listening)
            return
        if signal.SIGTERM in numbers:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    said = f"terminated: not ready to leave {GRACE_S:g} s after SIGTERM; the same command goes on\n"
    os.write(2, said.encode())
    for stream in (sys.stdout, sys.stderr):  # the thread that is stuck may hold its lock
        flushing = threading.Thread(target=stream.flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
    # A program without our command line expects the status that the signal alone would give.
    os._exit(cli.TERMINATED_STATUS.value if flags.FLAGS.is_parsed() else 128 + signal.SIGTERM)
