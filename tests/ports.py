"""Ports of this machine for tests that start several processes."""

import contextlib
import random
import socket


def free_port() -> int:
    """Below those that the system hands out by itself: nobody gets it before it is used here."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
