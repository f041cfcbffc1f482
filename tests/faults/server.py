"""Starts runs for the fault tests: imports everything once, then forks a process for each request.

    python tests/faults/server.py      (requests and answers are JSON lines on stdin and stdout)

Every run is a process of its own, with its own devices, and can be killed like any other; only the
seconds of importing are saved. Nothing of jax is running before the fork. A request:

    {"module": "train" | "evaluate", "argv": [...], "devices": n, "log": path,
     "marks": FIFO that receives the name of every phase as it begins,
     "faults": [name, or name=argument, ...],
     "soon": whether programs are compiled with few of XLA's optimisations}
"""

import contextlib
import dataclasses
import fcntl
import fnmatch
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import stubbed_train
import typed

from benchmarks import start
from dapo_jax import evaluate, parallel, train
from dapo_jax.checkpoint import journal, saver, seal
from dapo_jax.checkpoint.remembered import Responses
from dapo_jax.config import cli
from dapo_jax.data import tokenizer
from dapo_jax.reward.tools import Reply


def become(
    module: str, argv: list[str], devices: int, log: str, marks: str, faults: list[str], soon: bool
):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)  # until its last copy is closed: `typed._is_open`
    for here, there in ((null, 0), (file, 1), (file, 2)):
        os.dup2(here, there)
    os.close(file)
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{typed.SOON} {flag}" if soon else flag
    stubbed_train.know_programs_of_others(argv)
    hooks = marked(os.open(marks, os.O_WRONLY))
    for fault in faults:
        name, *argument = fault.split("=")
        hooks = FAULTS[name](hooks, *argument)
    main = functools.partial(train.main, score=stubbed_train.JUDGE, hooks=hooks)
    if module == "evaluate":
        evaluate.define_flags()
        main = lambda: hooks.step(evaluate.main(stubbed_train.JUDGE), None)
    sys.argv = [module, *argv]
    cli.run(main)


PHASES = ("start-up", "rollout", "update", "evaluation", "save", "commit")


def marked(pipe: int) -> train.Hooks:
    """Hooks that write the name of each phase to `pipe` when it begins. `commit` begins in the
    thread that writes the checkpoint, just before its directory gets its name."""
    mark, write = lambda phase: os.write(pipe, f"{phase}\n".encode()), seal.write

    def sealed(*args):
        mark("commit")
        return write(*args)

    seal.write = sealed
    return train.Hooks(phase=mark)


# --- Faults: hooks -> hooks ---


def clock_jumps(hooks: train.Hooks) -> train.Hooks:
    """The wall clock jumps at every step, forwards and backwards by up to ten years, also while a
    checkpoint is being written."""
    real, real_ns = time.time, time.time_ns
    jumps, ten_years, offset = random.Random(0), 10 * 365 * 24 * 3600, 0

    def phase(name: str) -> None:
        nonlocal offset
        hooks.phase(name)
        if name == "rollout":
            offset = jumps.randint(-ten_years, ten_years)

    time.time = lambda: real() + offset
    time.time_ns = lambda: real_ns() + offset * 10**9
    return hooks._replace(phase=phase)


def killed(hooks: train.Hooks, rollout: str) -> train.Hooks:
    """As that rollout begins: from outside, the signal may come when the run has gone on."""
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return stubbed_train.at(hooks, "rollout", int(rollout), kill)


def full_disk(hooks: train.Hooks, since: int = 3, until: int = 6) -> train.Hooks:
    """From one step to the other a file takes all the room that is left beside the run."""
    filler = None

    def step(state, record) -> None:
        nonlocal filler
        if state.counters.step == since:
            filler = pathlib.Path(cli.WORKDIR.value) / "filler"
            while not (filler.parent / "checkpoints" / str(since - 1)).exists():
                time.sleep(0.001)
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if state.counters.step == until:
            filler.unlink()

    return hooks._replace(step=step)


def with_setting(hooks: train.Hooks, module, name: str, value: float) -> train.Hooks:
    setattr(module, name, value)
    return hooks


def stands_still() -> None:
    """On process 1, in the third rollout."""
    if jax.process_index() == 1:
        time.sleep(3600)


def breaks() -> None:
    if jax.process_index() == 1:
        raise ValueError("no more of this")


def flipped(hooks: train.Hooks) -> train.Hooks:
    """From the third rollout on, one bit of one log-prob, as process 1 sees it."""
    real = parallel.to_host

    def to_host(tree):
        out = real(tree)
        if jax.process_index() == 1 and hasattr(out, "logp_SxN"):
            logp_SxN = np.array(out.logp_SxN)
            logp_SxN.view(np.uint32)[0, 0] ^= np.uint32(1)
            out = out._replace(logp_SxN=logp_SxN)
        return out

    return stubbed_train.at(hooks, "rollout", 3, lambda: setattr(parallel, "to_host", to_host))


def unreadable(hooks: train.Hooks, of_step: str = "") -> train.Hooks:
    """Where process 1 restores arrays: of one step they are damaged, or the disk is away twice."""
    real, tries = ocp.CheckpointManager.restore, 0

    def restore(self, step, *arguments, **named):
        nonlocal tries
        tries += jax.process_index() == 1  # it reads arrays alone, not the JSON of a step
        if not of_step and 0 < tries < 3:
            raise OSError(5, "Input/output error")
        if of_step == str(step) and tries:
            raise ValueError("DATA_LOSS: a checksum does not match")
        return real(self, step, *arguments, **named)

    ocp.CheckpointManager.restore = restore
    return hooks


def counted(hooks: train.Hooks, hub: str) -> train.Hooks:
    """This folder is the Hugging Face hub, and nothing was compiled before. After each step, and at
    the end of an evaluation, WORKDIR/counts_<process>.json says what the start has cost."""

    def fetch(name, patterns):
        here = pathlib.Path(tempfile.mkdtemp())
        for file in pathlib.Path(hub, name).iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
                shutil.copy(file, here)
        return str(here), sum(file.stat().st_size for file in here.iterdir())

    counts = start.counting(fetch)

    def write_counts(*_) -> None:
        name = f"counts_{jax.process_index()}.json"
        pathlib.Path(cli.WORKDIR.value, name).write_text(json.dumps(counts))

    jax.config.update("jax_compilation_cache_dir", None)
    return hooks._replace(step=write_counts)


# ------------------------------------------------------------------------------------------------
# Responses of several turns
# ------------------------------------------------------------------------------------------------


def talks(hooks: train.Hooks, log: str) -> train.Hooks:
    """Ten tokens end a turn, and who is asked takes its time and answers otherwise at each call.
    `log` gets JSON lines (`harness.Replies`): who is asked, what is about to be kept, what is."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    note = lambda *words: os.write(file, f"{json.dumps(words)}\n".encode())
    rng, load, keep = random.SystemRandom(), tokenizer.load, Responses.keep

    def reply(problem, transcript):
        note("asked", jax.process_index())
        time.sleep(rng.uniform(0.005, 0.03))
        said = rng.choice(["3", "+ 4", "Wait 5", "none", "grade"])
        note("answered", said)
        if said == "none":
            return None
        graded = stubbed_train.accept_half(problem, transcript[-1][1])
        return graded if said == "grade" else Reply(said)

    def kept(self, said):
        names = [_turn(self, name) for name in said]
        for name, payload in zip(names, said.values(), strict=True):
            note("said", name, payload.decode())
        keep(self, said)
        note("kept", *(f"{self._journal._policy} {name}" for name in names))

    tokenizer.load = lambda *where: dataclasses.replace(load(*where), stop_ids={*range(1, 11)})
    stubbed_train.JUDGE = stubbed_train.JUDGE._replace(reply=reply)
    Responses.keep = kept
    return hooks


def told(hooks: train.Hooks, log: str) -> train.Hooks:
    """As `talks`, but each turn is given what the run used that wrote `log`. A turn that other
    devices have drawn otherwise, at a tie, ends its response."""
    lines = map(json.loads, pathlib.Path(log).read_text().splitlines())
    said = {name: payload for kind, name, *payload in lines if kind == "said"}
    hooks = talks(hooks, os.devnull)
    Responses.recall = lambda self, name: said.get(_turn(self, name), ["null"])[0]
    return hooks


def _turn(store: Responses, name: bytes) -> str:
    """A turn of one step: the policy of a step is another on other devices, by its last bits."""
    return f"{store._journal._step} {name.hex()}"


partial = functools.partial
in_third_rollout = partial(stubbed_train.at, phase="rollout", times=3)
FAULTS = {
    "clock_jumps": clock_jumps,
    "full_disk": full_disk,
    "full_for_good": partial(full_disk, until=10**9),
    "killed": killed,
    "hang": partial(in_third_rollout, action=stands_still),
    "break": partial(in_third_rollout, action=breaks),
    "flip": flipped,
    "unreadable": unreadable,
    "talks": talks,
    "told": told,
    "counted": counted,
    # No wait between the last tries of the last save.
    "impatient": partial(with_setting, module=saver, name="_LAST_WAIT_S", value=0.0),
    # Finished responses are kept at once, as steps take hundredths of a second.
    "eager": partial(with_setting, module=journal, name="EVERY_S", value=0.002),
}


if __name__ == "__main__":
    typed.serve(become)
