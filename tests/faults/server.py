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
import resource
import sys
import time

TESTS = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import stubbed_train

from dapo_jax import cli, evaluate, parts, train
from dapo_jax.data import verifier
from dapo_jax.run import checkpoint, saver, seal


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

    marked(parts, "load_text", "start-up")
    marked(train, "sample_batch", "rollout")
    marked(train, "update_policy", "update")
    marked(train, "evaluate_sets", "evaluation")
    marked(checkpoint, "save", "save")
    marked(seal, "write", "commit")


# ------------------------------------------------------------------------------------------------
# Faults
# ------------------------------------------------------------------------------------------------


def clock_jumps() -> None:
    """The wall clock goes forwards and backwards by up to ten years at every look."""
    real, real_ns, jump = time.time, time.time_ns, random.Random(0)
    ten_years = 10 * 365 * 24 * 3600
    time.time = lambda: max(0.0, real() + jump.uniform(-ten_years, ten_years))
    time.time_ns = lambda: max(0, real_ns() + int(jump.uniform(-ten_years, ten_years) * 1e9))


def full_disk() -> None:
    """From step 3 to step 6 a file takes all the room that is left beside the run."""
    real, filler = train.train_step, None

    def step(c, text, machine, stream, state):
        nonlocal filler
        out = real(c, text, machine, stream, state)
        if out[0].step == 3:
            filler = pathlib.Path(cli.WORKDIR.value) / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        if out[0].step == 6:
            filler.unlink()
        return out

    train.train_step = step


def no_large_files() -> None:
    """As on a quota: no file may grow beyond 8 KiB (the kernel's limit, EFBIG)."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    saver._LAST_WAIT_S = 0.0


FAULTS = {f.__name__: f for f in (clock_jumps, full_disk, no_large_files)}


if __name__ == "__main__":
    main()
