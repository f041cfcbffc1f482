"""Reports why a process of several is gone, where it cannot report it itself; a child process.

JAX aborts all others when process 0, the coordinator, is gone, before any thread of Python runs
again. This child of each process reads lines until its standard input closes. Without a last line
'bye' it checks whether process 0 answers. A process that sends no line for `limit_s` is stopped, or
stuck in the kernel; its launcher would wait for ever, so the child kills it.
"""

import os
import select
import signal
import socket
import sys
from collections.abc import Callable

AGAIN = "The same command, on all hosts, goes on from the last checkpoint"
GONE = f"it crashed, was preempted or lost its network; see its log. {AGAIN}"


def report(lines: list[str], address: str, me: int, total: int) -> str:
    """The line to print after `lines` came and the pipe closed; '' after an orderly end. A line
    other than 'bye' holds the host and the pid of process 0."""
    if lines and lines[-1] == "bye":
        return ""
    host, _, port = address.rpartition(":")
    try:
        if me:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError:
        who = f" ({lines[-1]})" if lines else ""
        main = f"process 0 of {total}{who}, the coordinator {address},"
        return f"error: {main} does not answer: {GONE}"
    return f"error: process {me} of {total} broke off; see above and the system's log. {AGAIN}"


def listen(pipe: int, limit_s: float, silent: Callable[[], None]) -> list[str]:
    """The last line before the pipe closed, if any. silent: called when no line has come for
    limit_s after the first. Time is counted in tenths of it: a frozen machine misses one."""
    text, quiet = "", 0
    while True:
        if not select.select([pipe], [], [], limit_s / 10)[0]:
            quiet += bool(text)
            if quiet == 10:
                silent()
            continue
        if not (data := os.read(pipe, 1 << 12)):
            return text.split("\n")[-2:-1]
        text, quiet = "\n".join((text + data.decode()).split("\n")[-2:]), 0


def main(address: str, me: int, total: int, limit_s: float) -> None:
    parent = os.getppid()

    def kill() -> None:
        said = f"error: process {me} of {total} gave no sign of life for {limit_s:g} s: ending it"
        print(said, file=sys.stderr, flush=True)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)

    if said := report(listen(0, limit_s, kill), address, me, total):
        print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4]))
