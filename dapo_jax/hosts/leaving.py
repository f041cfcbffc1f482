"""Leaving when asked: SIGTERM, which announces a preemption, and Ctrl-C.

A cloud gives 15 to 30 s of notice, and a step may take an hour. So a run looks between two chunks
of decoding and between two updates whether it has been asked (`Asked.check`), and leaves there, on
all processes at the same point. Where it does not come to look, in a compilation or a long save, a
thread ends the process in time: a run may be cut anywhere, at the price of what was not yet kept.
"""

import contextlib
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
FLUSH_S = 0.2  # of which for what was printed, per stream


class Leave(BaseException):
    """The run is to end here, on every process. Not an Exception: whoever handles the errors of a
    file or a save must not swallow it."""


class Asked(list[int]):
    """The numbers of the signals that came."""

    def __init__(self, wakeup: int):
        self._wakeup = wakeup  # file descriptor that the thread listens at

    def check(self) -> None:
        """Raise Leave where any process has been asked. A collective."""
        if parallel.any_process(bool(self)):
            if parallel.any_process(signal.SIGTERM in self):  # then there is little time for all
                os.write(self._wakeup, bytes([signal.SIGTERM]))
            raise Leave


@contextlib.contextmanager
def signals() -> Iterator[Asked]:
    """Within this scope SIGTERM and a first Ctrl-C only ask; a second Ctrl-C is KeyboardInterrupt.
    The process is gone GRACE_S after SIGTERM, unless the scope has ended before."""
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
    # Python runs a handler when its main thread comes back from the device or the compiler; the
    # number of the signal is in the pipe at once.
    wakeup_before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    try:
        for number in before:
            signal.signal(number, ask)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: another language's
        signal.set_wakeup_fd(wakeup_before)
        os.close(wakeup)  # ends the thread


def ending() -> None:
    """The process has done all it was to do and ends: with its own status, not that of a SIGTERM,
    which a launcher would answer by the same command."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_in_time(listening: int) -> None:
    """End the process GRACE_S after SIGTERM came through the pipe; return when it is closed."""
    deadline = None
    while True:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not select.select([listening], [], [], left)[0]:
            break
        numbers = os.read(listening, 64)
        if not numbers:
            os.close(listening)
            return
        if signal.SIGTERM in numbers and deadline is None:
            deadline = time.monotonic() + GRACE_S
    said = f"terminated: not ready to leave {GRACE_S:g} s after SIGTERM; the same command goes on\n"
    os.write(2, said.encode())
    for stream in (sys.stdout, sys.stderr):  # which whoever is stuck may hold
        flushing = threading.Thread(target=stream.flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
    # Without a command line, a program of its own expects what the signal alone would have done.
    parsed = flags.FLAGS.is_parsed()
    os._exit(cli.TERMINATED_STATUS.value if parsed else 128 + signal.SIGTERM)
