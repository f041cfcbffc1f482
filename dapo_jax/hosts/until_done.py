"""Run a training; exit with 75 (EX_TEMPFAIL) where it was only told to leave (a preemption), so
that whoever restarts what failed starts it again. Every host of a cluster runs this; it imports no
JAX.

    python -um dapo_jax.hosts.until_done [TRAINING FLAG ...]

    DAPO_STATUS_FILE=FILE   gets the status as well
    DAPO_LOG=FILE           what the training prints goes there too, and, as it grows, to
                            WORKDIR/logs/<start, UTC>_<host>.log: one for each start of each host
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

from etils import epath

SIGNALS = signal.SIGTERM, signal.SIGINT
EVERY_S, LAST_S = 60, 6  # seconds between two copies of the log; seconds for the last one
BYTES_PER_S = 100_000  # of copies, on average: an object of a bucket cannot grow, all is sent again


def main(command: list[str]) -> int:
    """Run `command`, hand on signals to leave, and return its status as a shell gives it."""
    told, children = False, []

    def leave(*_) -> None:
        nonlocal told
        told = True
        for child in children:
            child.terminate()

    for number in SIGNALS:
        signal.signal(number, leave)
    log, ends, tee, copier = os.environ.get("DAPO_LOG"), threading.Event(), None, None
    if log:
        pathlib.Path(log).write_bytes(b"")
        tee = subprocess.Popen(["tee", "-a", "--", log], stdin=subprocess.PIPE, preexec_fn=_deaf)
        pairs = zip(command, [*command[1:], ""], strict=True)
        flag = re.compile("--?workdir(=|$)")
        named = [x.partition("=")[2] or after for x, after in pairs if flag.match(x)]
        if any(named[-1:]):
            folder = os.path.expanduser(named[-1]).rstrip("/") + "/logs"
            copier = threading.Thread(target=keep, args=(pathlib.Path(log), folder, ends))
            copier.daemon = True  # a bucket that does not answer holds nothing up
            copier.start()
    output = dict(stdout=tee.stdin, stderr=subprocess.STDOUT) if tee else {}
    children.append(child := subprocess.Popen([*command, "--terminated_status=75"], **output))
    if told:  # before that line
        child.terminate()
    # A wait without an end would not see a signal that comes just as it begins.
    while (status := child.poll()) is None:
        time.sleep(0.05)
    status = 128 - status if status < 0 else status
    if status == 128 + signal.SIGTERM and told:
        status = 75  # it came before the training had anything to save, and ended it
    if path := os.environ.get("DAPO_STATUS_FILE"):
        pathlib.Path(path).write_text(f"{status}\n")
    if tee:
        tee.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tee.wait(timeout=1)  # it ends with the last writer, for which nobody waits long
    if copier:
        ends.set()
        copier.join(LAST_S)
    return status


def _deaf() -> None:
    """Signals to leave are for the training: its last words come after them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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


if __name__ == "__main__":
    sys.exit(main([sys.executable, "-um", "dapo_jax.train", *sys.argv[1:]]))
