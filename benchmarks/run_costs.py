"""What saving costs a run of the quickstart, as a share of the rollout steps' own time.

    python -m benchmarks run_costs --full [--every=10]

One run of configs/quickstart.py, base model included, on one core, with a journal and a save every
`--every` steps: the wall time that the loop waits in the saver (copying the state, awaiting the
save before), and the CPU time of all threads for whole saves, measured at rest after the run.
"""

import pathlib
import runpy
import tempfile
import time

import numpy as np

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax import train
from dapo_jax.checkpoint import saver

FLAGS = {
    "steps": Flag(6, 60),
    "every": Flag(2, 20, "steps between saves"),
    "saves": Flag(3, 20, "of the measurement at rest"),
    "warm_up": Flag(45, 100, "of the base model's own supervised steps, in percent"),
}


def now() -> np.ndarray:
    """Seconds so far: (CPU of this process, wall)."""
    return np.array([time.process_time(), time.perf_counter()])


def timed(function, calls: list):
    """`function`, each call of which puts its (CPU, wall) seconds into `calls`."""

    def run(*args, **kwargs):
        begun = now()
        result = function(*args, **kwargs)
        calls.append(now() - begun)
        return result

    return run


def measure(args) -> list[harness.Table]:
    c = runpy.run_path(str(harness.ROOT / "configs" / "quickstart.py"))["get_config"]()
    c.steps, c.eval.every, c.checkpoint.every = args.steps, 0, args.every
    c.checkpoint.journal_gb, base = c.checkpoint.journal_gb or 1.0, c.supervised_warmup
    for kind in ("skill_steps", "habit_steps"):
        setattr(base, kind, getattr(base, kind) * args.warm_up // 100)
    steps, waits, saves, states = [], [], [], []
    saver.Saver.after_step = timed(saver.Saver.after_step, waits)

    def begin(phase: str) -> None:
        if phase == "rollout":
            steps.append(now())

    def end(state, record) -> None:
        steps[-1] = now() - steps[-1]
        states[:] = [state]

    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        train.train(c, run, hooks=train.Hooks(phase=begin, step=end))
        with saver.Saver(pathlib.Path(folder) / "rest", c, {}, print) as at_rest:
            save = timed(at_rest.last, saves)
            for i in range(args.saves):
                save(states[0].count(step=i))
    return [saving(args.every, *map(np.array, (steps, waits, saves)))]


def saving(every: int, steps_Nx2, waits_Nx2, saves_Nx2) -> harness.Table:
    """(CPU, wall) seconds of each rollout step, of each wait for the saver, from that before the
    first step on, and of each save at rest. What compiles is left out: the first step and save, and
    the wait after step 1, for the save of step 0. The loop does not wait after its last step."""
    (step, _), (work, _) = steps_Nx2[1:].mean(0), saves_Nx2[1:].mean(0)
    waited = waits_Nx2[2:, 1].sum() / steps_Nx2[1:-1, 1].sum()
    table = harness.Table("what", "share", name="checkpoint_cost")
    table.row("the loop waits, of the steps' wall time", f"{waited:.2%}")
    table.row("saves in the background, of the steps' CPU time", f"{work / every / step:.2%}")
    table.note(f"A step takes {step:.3f} CPU-s, a save every {every} of them {work:.3f}.")
    return table
