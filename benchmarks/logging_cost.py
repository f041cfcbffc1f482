"""What logging and the journal cost a run of the quickstart, of the steps' own CPU time.

    taskset -c 0 python benchmarks/logging_cost.py [--steps=60] [--write]

One run of configs/quickstart.py, base model included, with its defaults: metrics.jsonl, TensorBoard
with histograms and texts, text samples with every token, alarms, the console, finished responses in
the journal. Counted: the CPU time of the main thread in all that computes, writes and prints these
(and of the journal's own thread), from the second step on (the first compiles), against the CPU
time of all threads in the rollout steps. Not counted: entropies and sums that the jitted programs
return anyway. Waiting for the disk (fsync) is no CPU time, so the share of the wall time stands
beside it.
"""

import argparse
import pathlib
import runpy
import tempfile
import time

import results
import timing

from dapo_jax import train
from dapo_jax.checkpoint import journal, remembered
from dapo_jax.log import guards, metrics, report

ROOT = pathlib.Path(__file__).parent.parent
HEADING = "## Logging"
LIMIT = 0.02
RESPONSES = remembered.Responses

# Part -> (module or class, name) of what belongs to it. None calls another one.
PARTS = {
    "numbers of what was drawn": [(metrics, "rollout_metrics")],
    "numbers of the updates": [(metrics, "update_metrics")],
    "alarms": [(guards, "remember"), (guards, "count_alarms")],
    "text samples": [(metrics.Writer, "lines")],
    "files and TensorBoard": [(metrics.Writer, "record")],
    "console": [(report.Progress, "update")],
    "journal": [(journal.Journal, "open"), (RESPONSES, "get"), (RESPONSES, "put")],
    "journal, in the background": [(journal.Journal, "flush")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    c = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
    c.steps, c.eval.every, c.checkpoint.every = args.steps, 0, 0

    clocks = {name: timing.Clock(time.thread_time) for name in PARTS}
    for name, places in PARTS.items():
        for owner, attribute in places:
            setattr(owner, attribute, clocks[name].around(getattr(owner, attribute)))
    steps, timing.Clock.on = timing.Steps(), False

    def step(state, record):
        steps.step(state, record)
        timing.Clock.on = True  # the first one, which compiles, is done

    with tempfile.TemporaryDirectory() as folder:
        hooks = train.Hooks(phase=steps.phase, step=step)
        train.train(c, pathlib.Path(folder) / "run", hooks=hooks)
        size = {p.name: _bytes(p) for p in (pathlib.Path(folder) / "run").iterdir()}

    spent = {name: (sum(k.cpu), sum(k.wall)) for name, k in clocks.items()}
    logging = tuple(map(sum, zip(*spent.values(), strict=True)))
    cpu, wall = sum(steps.cpu) + logging[0], sum(steps.wall) + logging[1]
    n = len(steps.cpu)
    rows = [("part", "ms per step", "share of CPU time", "of wall time")]
    for name, (k, w) in (spent | {"all logging": logging}).items():
        rows.append((name, f"{k / n * 1e3:.2f}", f"{k / cpu:.2%}", f"{w / wall:.2%}"))
    share = logging[0] / cpu
    text = (
        f"{HEADING}\n\n{results.made_by('jax')}. {n + 1} steps of the quickstart,"
        f" {cpu / n * 1e3:.0f} CPU ms per step."
        f" All logging takes {share:.2%} of the CPU time (at most {LIMIT:.0%} is wanted). Written:"
        f" metrics.jsonl {size['metrics.jsonl'] / 1e3:.0f} kB, tensorboard"
        f" {size['tensorboard'] / 1e3:.0f} kB, rollouts {size['rollouts'] / 1e3:.0f} kB.\n\n"
        + results.table(*rows)
    )
    print(text)
    if args.write:
        results.write(HEADING, text)
    if share > LIMIT:
        raise SystemExit(f"logging takes {share:.2%} of a step, more than {LIMIT:.0%}")


def _bytes(path: pathlib.Path) -> int:
    return sum(p.stat().st_size for p in [path, *path.rglob("*")] if p.is_file())


if __name__ == "__main__":
    main()
