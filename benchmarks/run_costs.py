"""What saving costs a run of the quickstart, as a share of the rollout steps' own time.

    python -m benchmarks run_costs --full [--every=10]

One run of configs/quickstart.py, base model included, on one core, with a journal and a save every
`--every` steps: the wall time that the loop waits in the saver (copying the state, awaiting the
save before), and the CPU time of all threads for whole saves, measured at rest after the run.
"""

import pathlib
import runpy
import tempfile

import numpy as np

from benchmarks import harness
from benchmarks.harness import Clock, Flag
from dapo_jax import train
from dapo_jax.checkpoint import saver

FLAGS = {
    "steps": Flag(6, 60),
    "every": Flag(2, 20, "steps between saves"),
    "saves": Flag(3, 20, "of the measurement at rest"),
}


class Steps(Clock):
    """Clock of the rollout steps of a run; `phase` and `step` are two of `train.Hooks`. Other
    clocks start to count after the first step, which compiles."""

    state = None  # after the last step

    def phase(self, name: str) -> None:
        if name == "rollout":
            self.start()

    def step(self, state, record) -> None:
        self.stop()
        self.state, Clock.on = state, True


def measure(args) -> list[harness.Table]:
    c = runpy.run_path(str(harness.ROOT / "configs" / "quickstart.py"))["get_config"]()
    c.steps, c.eval.every, c.checkpoint.every = args.steps, 0, args.every
    c.checkpoint.journal_gb = c.checkpoint.journal_gb or 1.0
    after, save = Clock(), Clock()
    saver.Saver.after_step = after.around(saver.Saver.after_step)
    steps, Clock.on = Steps(), False
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        train.train(c, run, hooks=train.Hooks(phase=steps.phase, step=steps.step))
        with saver.Saver(pathlib.Path(folder) / "rest", c, {}, print) as at_rest:
            last = save.around(at_rest.last)
            for i in range(args.saves):
                last(steps.state.count(step=i))
    return [saving(args, steps, after, save)]


def saving(args, steps: Clock, after: Clock, save: Clock) -> harness.Table:
    # The first call with the clocks on, of step 1, awaits the save of step 0, which compiles; the
    # last step is not followed by one.
    waits = sum(after.wall[1:]) / sum(steps.wall[:-1])
    step, work = np.mean(steps.cpu), np.mean(save.cpu[1:])
    table = harness.Table("what", "share", name="checkpoint_cost")
    table.row("the loop waits, of the steps' wall time", f"{waits:.2%}")
    share = f"{work / args.every / step:.2%}"
    table.row("saves in the background, of the steps' CPU time", share)
    table.note(f"A step takes {step:.3f} CPU-s, a save every {args.every} of them {work:.3f}.")
    return table
