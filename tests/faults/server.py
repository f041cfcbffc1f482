"""Starts runs for the fault tests: imports everything once, then forks a process for each request.

    python tests/faults/server.py      (requests and answers are JSON lines on stdin and stdout)

Every run is a process of its own, with its own devices, and can be killed like any other; only the
seconds of importing are saved. Nothing of jax is running before the fork. A request:

    {"module": "train" | "evaluate", "argv": [...], "devices": n, "log": path,
     "marks": FIFO that receives the name of every phase as it begins, "faults": [name, ...]}

The verifier accepts about half of all responses (`stubbed_train.accept_half`): random weights then
learn something.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

import stubbed_train

from dapo_jax import build, cli, evaluate, train
from dapo_jax.checkpoint import checkpoint, saver, seal
from dapo_jax.data import verifier


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork() or child(request)
        print(json.dumps(answer), flush=True)


def child(request: dict):
    """Never returns."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((null, 0), (log, 1), (log, 2)):
        os.dup2(here, there)
    flag = f"--xla_force_host_platform_device_count={request.get('devices', 1)}"
    os.environ["XLA_FLAGS"] = flag
    if "marks" in request:
        mark_phases(os.open(request["marks"], os.O_WRONLY))
    for name in request.get("faults", []):
        FAULTS[name]()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may be in a background
    verifier.verify = stubbed_train.accept_half
    module = {"train": train, "evaluate": evaluate}[request["module"]]
    if module is evaluate:
        evaluate.define_flags()
    sys.argv = [request["module"], *request["argv"]]
    code = 1
    try:
        cli.run(module.main)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ------------------------------------------------------------------------------------------------
# Phases
# ------------------------------------------------------------------------------------------------

PHASES = ("start-up", "rollout", "update", "evaluation", "save", "commit")


def mark_phases(pipe: int) -> None:
    """Write the name of each phase to `pipe` when it begins. `commit` begins in the thread that
    writes the checkpoint, just before its directory gets its name."""

    def marked(owner, name, phase):
        real = getattr(owner, name)

        def wrapper(*args, **kwargs):
            os.write(pipe, f"{phase}\n".encode())
            return real(*args, **kwargs)

        setattr(owner, name, wrapper)

    marked(build, "load_text", "start-up")
    marked(train, "sample_batch", "rollout")
    marked(train, "update_policy", "update")
    marked(train, "evaluate_sets", "evaluation")
    marked(checkpoint, "save", "save")
    marked(seal, "write", "commit")


# ------------------------------------------------------------------------------------------------
# Faults
# ------------------------------------------------------------------------------------------------


def clock_jumps() -> None:
    """The wall clock jumps at every step, forwards and backwards by up to ten years, also while a
    checkpoint is being written."""
    real, real_ns, real_step = time.time, time.time_ns, train.train_step
    jumps, ten_years, offset = random.Random(0), 10 * 365 * 24 * 3600, 0

    def step(*args):
        nonlocal offset
        offset = jumps.randint(-ten_years, ten_years)
        return real_step(*args)

    train.train_step = step
    time.time = lambda: real() + offset
    time.time_ns = lambda: real_ns() + offset * 10**9


def full_disk(until: int = 6) -> None:
    """From step 3 to step `until` a file takes all the room that is left beside the run."""
    real, filler = train.train_step, None

    def step(c, text, machine, stream, state):
        nonlocal filler
        out = real(c, text, machine, stream, state)
        if out[0].step == 3:
            filler = pathlib.Path(cli.WORKDIR.value) / "filler"
            while not (filler.parent / "checkpoints" / "2").exists():
                time.sleep(0.001)
            with filler.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        if out[0].step == until:
            filler.unlink()
        return out

    train.train_step = step


def full_for_good() -> None:
    full_disk(until=10**9)


def impatient() -> None:
    """Does not wait between the last tries of the last save."""
    saver._LAST_WAIT_S = 0.0


FAULTS = {f.__name__: f for f in (clock_jumps, full_disk, full_for_good, impatient)}


if __name__ == "__main__":
    main()
