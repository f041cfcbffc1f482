"""What saving, logging and the journal cost a run of the quickstart, of the steps' own time.

    python -m benchmarks run_costs --full [--every=10]

One run of configs/quickstart.py, base model included, on one core, with its metrics.jsonl,
TensorBoard, text samples, alarms, console, a journal and a save every `--every` steps. Shares are
of the rollout steps' own time in that run, so that the machine's speed and load cancel:

    saving      wall time that the loop waits in the saver (copying the state, awaiting the save
                before), and CPU time of all threads for whole saves, measured at rest after the run
    logging     CPU time of the main thread in all that computes, writes and prints, and of the
                journal's own thread, from the second step on (the first compiles). Not counted:
                entropies and sums that the jitted programs return anyway. Waiting for the disk
                (fsync) is no CPU time, so the share of the wall time stands beside it
"""

import pathlib
import runpy
import tempfile
import time

import numpy as np

from benchmarks import harness
from benchmarks.harness import Clock, Flag
from dapo_jax import train
from dapo_jax.checkpoint import journal, remembered, saver
from dapo_jax.log import guards, metrics, report

LIMIT = 0.02  # that all logging may take of the CPU time
REMEMBERS = remembered.Responses
FLAGS = {
    "steps": Flag(6, 60),
    "every": Flag(2, 20, "steps between saves"),
    "saves": Flag(3, 20, "of the measurement at rest"),
}
# Part -> (module or class, name) of what belongs to it. None calls another one.
PARTS = {
    "numbers of what was drawn": [(metrics, "rollout_metrics")],
    "numbers of the updates": [(metrics, "update_metrics")],
    "alarms": [(guards, "remember"), (guards, "count_alarms")],
    "text samples": [(metrics.Writer, "lines")],
    "files and TensorBoard": [(metrics.Writer, "record")],
    "console": [(report.Progress, "update")],
    "journal": [(journal.Journal, "open"), (REMEMBERS, "get"), (REMEMBERS, "put")],
    "journal, in the background": [(journal.Journal, "flush")],
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
    clocks = {name: Clock(time.thread_time) for name in PARTS}
    for name, places in PARTS.items():
        for owner, attribute in places:
            setattr(owner, attribute, clocks[name].around(getattr(owner, attribute)))
    after, save = Clock(), Clock()
    saver.Saver.after_step = after.around(saver.Saver.after_step)
    steps, Clock.on = Steps(), False
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        train.train(c, run, hooks=train.Hooks(phase=steps.phase, step=steps.step))
        written = {
            name: sum(
                p.stat().st_size for p in [run / name, *(run / name).rglob("*")] if p.is_file()
            )
            for name in ("metrics.jsonl", "tensorboard", "rollouts")
        }
        with saver.Saver(pathlib.Path(folder) / "rest", c, {}, print) as at_rest:
            last = save.around(at_rest.last)
            for i in range(args.saves):
                last(steps.state.count(step=i))
    return [saving(args, steps, after, save), logging(steps, clocks, written)]


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


def logging(steps: Clock, clocks: dict[str, Clock], written: dict[str, int]) -> harness.Table:
    spent = {name: (sum(k.cpu), sum(k.wall)) for name, k in clocks.items()}
    spent["all logging"] = tuple(map(sum, zip(*spent.values(), strict=True)))
    all_cpu, all_wall = spent["all logging"]
    cpu, wall, n = sum(steps.cpu) + all_cpu, sum(steps.wall) + all_wall, len(steps.cpu)
    table = harness.Table(
        "part", "ms per step", "share of CPU time", "of wall time", name="logging_cost"
    )
    for name, (k, w) in spent.items():
        table.row(name, f"{k / n * 1e3:.2f}", f"{k / cpu:.2%}", f"{w / wall:.2%}")
    sizes = ", ".join(f"{name} {size / 1e3:.0f} kB" for name, size in written.items())
    table.note(f"{n} steps of {cpu / n * 1e3:.0f} CPU ms. Written: {sizes}.")
    if all_cpu > LIMIT * cpu:
        table.note(f"Logging takes more than the {LIMIT:.0%} of the CPU time that it may take.")
    return table
