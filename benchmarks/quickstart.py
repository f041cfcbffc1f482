"""DAPO against naive GRPO on the quickstart, seed by seed: accuracy at equal updates and tokens.

    python benchmarks/quickstart.py --seeds=5 --out=runs/seeds [--write]

Trains one base model (seed `--base_seed`), then from it configs/quickstart.py and
configs/quickstart_grpo.py once per seed, `--jobs` at a time, each pinned to one core where the
system can; finished runs are kept. `--own_base` gives each seed a base of its own instead, as the
quickstart does. Prints held-out accuracy (T=1, 128 problems x 4 samples) at every evaluation, with
95% t-intervals over seeds. The headline of a run is fixed in advance: the mean of its evaluations
after the start. (`python -m dapo_jax.lab ladder` has the techniques one by one.)
"""

import argparse
import pathlib
import runpy

import numpy as np
import results

from dapo_jax import config
from dapo_jax.lab.experiments import figures, ladder, pool, stats
from dapo_jax.log import metrics

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {"DAPO": "quickstart", "naive GRPO": "quickstart_grpo"}
TAG = "eval/heldout/avg@k"
HEADING = "## The quickstart"


def fields(arm: str, **changes) -> dict:
    """Leaves of the arm's config file, with `changes`."""
    file = runpy.run_path(str(ROOT / "configs" / f"{ARMS[arm]}.py"))
    return config.leaves(file["get_config"]()) | changes


def folder(arm: str, seed: int) -> str:
    return f"{ARMS[arm]}/seed_{seed}"


def at_tokens(records, budget: float) -> float:
    """Accuracy of the last evaluation that had spent at most `budget` tokens."""
    spent, values = figures.curve(records, TAG, "spent/tokens")
    return values[spent <= budget][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "seeds")
    parser.add_argument("--jobs", type=int, default=0, help="0: one per core")
    parser.add_argument("--base_seed", type=int, default=0)
    parser.add_argument("--own_base", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the tables into RESULTS.md")
    args = parser.parse_args()

    base, after = [], ()
    if not args.own_base:
        start = fields("DAPO", steps=0, seed=args.base_seed)
        base, after = [pool.Task("base", ladder.run, (start,))], ("base",)
    seeds = range(args.seeds)
    runs = [
        pool.Task(folder(arm, s), ladder.run, (fields(arm, seed=s), *after), after)
        for arm in ARMS
        for s in seeds
    ]
    pool.run_all(base + runs, args.out, args.jobs)

    records = {
        arm: [metrics.read(args.out / folder(arm, s) / "metrics.jsonl") for s in seeds]
        for arm in ARMS
    }
    heading = HEADING + (", a base per seed" if args.own_base else "")
    section = f"{heading}\n\n{results.made_by('jax', 'flax')}.\n\n{summary(records)}"
    print("\n" + section)
    if args.write:
        results.write(heading, section)


def summary(records: dict[str, list[list[dict]]]) -> str:
    """Markdown of the runs (arm -> seed -> records): accuracy by seed and step."""
    lines, headline, last = [], {}, {}
    for arm, of in records.items():
        steps = figures.curve(of[0], TAG, "step")[0].astype(int)
        curves = np.array([figures.curve(r, TAG, "step")[1] for r in of])
        last[arm] = [r[-1]["spent/tokens"] for r in of]
        headline[arm] = curves[:, 1:].mean(1)
        rows = [(arm, *(f"step {n}" for n in steps), "mean after the start", "M tokens")]
        for seed, (curve, mean, n) in enumerate(zip(curves, headline[arm], last[arm], strict=True)):
            rows.append((f"seed {seed}", *(f"{v:.3f}" for v in (*curve, mean)), f"{n / 1e6:.2f}"))
        every = map(stats.interval, (*curves.T, headline[arm]))
        rows.append(("95% t-interval", *every, f"{np.mean(last[arm]) / 1e6:.2f}"))
        lines += [results.table(*rows), ""]
    difference = stats.paired(headline["DAPO"], headline["naive GRPO"])
    budgets = last["naive GRPO"]
    dapo, grpo = (
        stats.interval([at_tokens(r, n) for r, n in zip(records[arm], budgets, strict=True)])
        for arm in ARMS
    )
    return "\n".join(
        [
            *lines,
            f"DAPO - naive GRPO, same seed, mean after the start: {difference}. At naive GRPO's"
            f" tokens ({np.mean(budgets) / 1e6:.2f} M): DAPO {dapo}, naive GRPO {grpo}.",
        ]
    )


if __name__ == "__main__":
    main()
