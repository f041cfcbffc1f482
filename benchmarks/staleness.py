"""Learning where responses outlive steps: S = 0, 1 and 2 at equal updates, seed by seed.

    python benchmarks/staleness.py --seeds=5 --out=runs/staleness [--write]

On two tasks, configs/quickstart.py and the full-DAPO rung of configs/ladder.py: trains one base
model (seed 0), then from it `rollout.staleness` = 0, 1 and 2 once per seed, `--jobs` at a time; the
same command resumes. S = 0 is the config as it is shipped; the others have the weight of importance
that they need, capped at 5, and slots for all that may be in flight, (S + 1) x groups x group_size,
so that tokens grow as old as S allows: in the 128 slots of S = 0 the rows of half a batch are drawn
at a time, all that began in one step ends in the next, and S = 2 is S = 1, bit for bit. An accuracy
(held-out, T=1, 128 problems x 4 samples) is the mean at 4/6, 5/6 and 6/6 of the updates; between
evaluations the curve is a straight line. With 95% t-intervals over seeds, and of the differences
from S = 0 seed by seed.
"""

import argparse
import functools
import pathlib
import runpy
from collections.abc import Mapping, Sequence

import numpy as np
import one_base
import results

from dapo_jax import config
from dapo_jax.lab.experiments import ladder, stats

ROOT = pathlib.Path(__file__).parent.parent
TASKS = {"quickstart": "The quickstart", "ladder": "The ladder's rung +dynamic_sampling"}
ARMS = {"S=0": 0, "S=1": 1, "S=2": 2}
TAG, UPDATES = "eval/heldout/avg@k", "optim/updates"
HEADING = "## Responses that outlive steps: learning"
# Means over the steps of a run, and over seeds: head -> (tag, format).
BESIDE = {
    "mean age, steps": ("staleness/age_mean", "{:.2f}"),
    "effective samples": ("policy/importance_ess", "{:.3f}"),
    "slots busy": ("perf/slot_occupancy", "{:.0%}"),
}


def fields(task: str, arm: str, **changes) -> dict:
    """Leaves of the task's config file at the staleness of `arm`, with `changes`."""
    c = runpy.run_path(str(ROOT / "configs" / f"{task}.py"))["get_config"]()
    c.rollout.staleness, c.loss.old_logprobs = ARMS[arm], "recompute"
    if ARMS[arm]:
        c.loss.importance_cap = 5.0
        c.rollout.slots = (1 + ARMS[arm]) * c.rollout.groups * c.rollout.group_size
    return config.leaves(c) | changes


def summary(records: Mapping[str, Sequence[Sequence[dict]]]) -> str:
    """Markdown of the runs of one task (arm -> seed -> records), 'S=0' among them."""
    end = min(run[-1][UPDATES] for of in records.values() for run in of)
    reached = {
        arm: [ladder.accuracy(run, TAG, UPDATES, end) for run in of] for arm, of in records.items()
    }
    head = ("rollout.staleness", f"accuracy at {end:.0f} updates", "less that of S=0", "verdict")
    rows = [(*head, "M tokens", *BESIDE)]
    for arm, of in records.items():
        less = stats.paired(reached[arm], reached["S=0"])
        told = "behind" if less.high < 0 else "ahead" if less.low > 0 else "not told apart"
        compared = ("-", "-") if arm == "S=0" else (ladder.signed(less), told)
        spent = stats.interval([run[-1]["spent/tokens"] / 1e6 for run in of])
        rows.append((arm, stats.interval(reached[arm]), *compared, spent, *_beside(of)))
    return results.table(*rows)


def _beside(runs: Sequence[Sequence[dict]]) -> list[str]:
    known = {
        head: [np.mean([r[tag] for r in run if tag in r]) for run in runs if tag in run[-1]]
        for head, (tag, _) in BESIDE.items()
    }
    return [BESIDE[h][1].format(np.mean(x)) if x else "-" for h, x in known.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="tasks")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "staleness")
    parser.add_argument("--jobs", type=int, default=0, help="0: one per core")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    args = parser.parse_args()

    parts = [HEADING, f"{results.made_by('jax', 'flax')}."]
    for task in args.only:
        of = functools.partial(fields, task)
        records = one_base.train(of, list(ARMS), "S=0", args.seeds, args.out / task, args.jobs)
        parts += [f"{TASKS[task]}:", summary(records)]
    section = "\n\n".join(parts)
    print("\n" + section)
    if args.write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
