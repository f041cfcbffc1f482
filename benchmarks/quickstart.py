"""DAPO against naive GRPO on the quickstart, seed by seed: accuracy at equal updates and tokens.

    python benchmarks/quickstart.py --seeds=5 --out=runs/seeds

Trains one base model (seed `--base_seed`), then from it configs/quickstart.py and
configs/quickstart_grpo.py once a seed, `--jobs` at a time, each pinned to one core where the system
can; finished runs are kept. `--own_base` gives each seed a base of its own instead, as the
quickstart does. Prints held-out accuracy (T=1, 128 problems x 4 samples) at every evaluation, with
95% t-intervals over seeds. The headline of a run is fixed in advance: the mean of its evaluations
after the start. (`python -m dapo_jax.experiments.ladder` has the techniques one by one.)
"""

import argparse
import importlib.util
import pathlib

import numpy as np

from dapo_jax import config
from dapo_jax.experiments import figures, ladder, pool, stats
from dapo_jax.log import metrics

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {"DAPO": "quickstart", "naive GRPO": "quickstart_grpo"}
TAG = "eval/heldout/avg@k"


def fields(arm: str, **changes) -> dict:
    """Leaves of the arm's config file, with `changes`."""
    file = ROOT / "configs" / f"{ARMS[arm]}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return config.leaves(module.get_config()) | changes


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
    parser.add_argument("--jobs", type=int, default=0, help="0: one a core")
    parser.add_argument("--base_seed", type=int, default=0)
    parser.add_argument("--own_base", action="store_true")
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
    headline, last = {}, {}
    for arm, of in records.items():
        steps = figures.curve(of[0], TAG, "step")[0].astype(int)
        curves = np.array([figures.curve(r, TAG, "step")[1] for r in of])
        last[arm] = [r[-1]["spent/tokens"] for r in of]
        print(f"\n{arm}: held-out accuracy, T=1, after rollout step {', '.join(map(str, steps))}")
        for seed, curve in enumerate(curves):
            values = " ".join(f"{v:.3f}" for v in curve)
            print(f"  seed {seed}: {values}   ({last[arm][seed] / 1e6:.2f} M tokens)")
        for step, column in zip(steps, curves.T, strict=True):
            print(f"  step {step:3d}: {stats.interval(column)}")
        headline[arm] = curves[:, 1:].mean(1)
        print(f"  mean of the evaluations after the start: {stats.interval(headline[arm])}")

    difference = stats.paired(headline["DAPO"], headline["naive GRPO"])
    print(f"\nDAPO - naive GRPO, same seed: {difference}")
    budgets = last["naive GRPO"]
    dapo, grpo = (
        stats.interval([at_tokens(r, n) for r, n in zip(records[arm], budgets, strict=True)])
        for arm in ARMS
    )
    print(
        f"at naive GRPO's tokens ({np.mean(budgets) / 1e6:.2f} M): DAPO {dapo}, naive GRPO {grpo}"
    )


if __name__ == "__main__":
    main()
