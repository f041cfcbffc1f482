"""Ports of this machine, and waiting, for tests that start several processes."""

import contextlib
import random
import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """Below those that the system hands out by itself: nobody gets it before it is used here."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
