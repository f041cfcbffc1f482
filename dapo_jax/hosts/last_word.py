"""Says why a process of several is gone, where it cannot say so itself; a process of its own.

JAX aborts all others at once when process 0, the coordinator, is gone: with a stack trace, and
before any thread of Python comes to run. This child of each process waits until its standard input
closes. A last line 'bye' is an orderly end; without it, it asks whether process 0 still answers.

    python -I -S last_word.py HOST:PORT PROCESS_ID NUM_PROCESSES
"""

import socket
import sys

AGAIN = "The same command, on all hosts, goes on from the last checkpoint"


def answers(address: str, seconds: float = 3.0) -> bool:
    """Whether anybody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True


def word(lines: list[str], address: str, me: int, total: int) -> str:
    """The line to say after `lines` came and the pipe closed; '' after an orderly end. Before
    'bye', a line is what was last known of process 0: its host and number."""
    if lines and lines[-1] == "bye":
        return ""
    who = f" ({lines[-1]})" if lines else ""
    if me and not answers(address):
        return (
            f"error: process 0 of {total}{who}, the coordinator {address}, does not answer: it"
            f" crashed, was preempted or lost its network; see its log. {AGAIN}"
        )
    return f"error: process {me} of {total} broke off; see above and the system's log. {AGAIN}"


if __name__ == "__main__":
    said = word([x.strip() for x in sys.stdin], sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    if said:
        print(said, file=sys.stderr, flush=True)
