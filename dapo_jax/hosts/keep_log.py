"""Keep what a host prints: copy a growing log file into a folder of the workdir, until SIGTERM.

    python -m dapo_jax.hosts.keep_log FILE gs://BUCKET/RUN/logs

The copy is FOLDER/<start, UTC>_<host>.log, so that each start of each host has its own. An object
of a bucket cannot grow: it is written again, once a minute at most, less often the longer it is.
Launch scripts start this beside the training (launch/until_done.sh); it imports no JAX.
"""

import os
import pathlib
import signal
import socket
import sys
import threading
import time

from etils import epath

EVERY_S, LAST_S = 60, 6  # seconds between two copies; seconds for the last one, after SIGTERM
BYTES_PER_S = 100_000  # upper limit of what is sent, on average


def keep(log: pathlib.Path, folder: str, ends: threading.Event) -> None:
    """Copy `log` as it grows, and a last time when `ends` is set. A copy that fails is tried again
    with the next one; the first failure in a row prints a warning."""
    name = time.strftime(f"%Y%m%dT%H%M%SZ_{socket.gethostname()}.log", time.gmtime())
    target, sent, failing = epath.Path(folder) / name, 0, False
    while True:
        last = ends.wait(max(EVERY_S, sent / BYTES_PER_S))
        try:
            text = log.read_bytes()
            if len(text) != sent:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(text)
            sent, failing = len(text), False
        except Exception as error:  # whatever a bucket's client throws: a log must not end a run
            if not failing:
                print(f"warning: {target}: not written ({error})", file=sys.stderr, flush=True)
            failing = True
        if last:
            return


def main(log: str, folder: str) -> None:
    ends = threading.Event()

    def stop(*_) -> None:
        ends.set()
        timer = threading.Timer(LAST_S, os._exit, [0])  # a bucket that does not answer
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep(pathlib.Path(log), folder, ends)


if __name__ == "__main__":
    main(*sys.argv[1:])
