"""DAPO against naive GRPO on the embedded task, seed by seed: accuracy at equal updates and tokens.

    python benchmarks/quickstart.py --seeds=5 --out=runs/seeds

Trains one base model (seed `--base_seed`), then from it configs/quickstart.py and
configs/quickstart_grpo.py once a seed, `--jobs` at a time, each pinned to one core where the system
can; finished runs are kept. `--own_base` gives each seed a base of its own instead, as the
quickstart does. Prints held-out accuracy (T=1, 128 problems x 4 samples) at every evaluation, with
95% t-intervals over seeds. The headline of a run is fixed in advance: the mean of its evaluations
after the start.
"""

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import subprocess
import sys

import numpy as np
from scipy import stats
from tqdm import tqdm

from dapo_jax.run import metrics

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {"DAPO": "quickstart", "naive GRPO": "quickstart_grpo"}
TAG = "eval/heldout/avg@k"


def train(arm: str, workdir: pathlib.Path, core: int, *overrides: str) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "dapo_jax.train",
        f"--config={ROOT}/configs/{ARMS[arm]}.py",
        f"--workdir={workdir}",
        *(f"--config.{o}" for o in overrides),
    ]
    pin = {}
    if hasattr(os, "sched_setaffinity"):
        pin["preexec_fn"] = lambda: os.sched_setaffinity(0, {core})
    with (workdir / "log.txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, **pin)


def interval(values) -> str:
    """mean +- half of the 95% t-interval."""
    values = np.asarray(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.3f} +- {half:.3f}"


def at_tokens(records, budget: float) -> float:
    """Accuracy of the last evaluation that had spent at most `budget` tokens."""
    return [r[TAG] for r in records if TAG in r and r.get("spent/tokens", 0) <= budget][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--base_seed", type=int, default=0)
    parser.add_argument("--own_base", action="store_true")
    args = parser.parse_args()

    base = []
    if not args.own_base:
        train("DAPO", args.out / "base", 0, "steps=0", f"seed={args.base_seed}")
        base = [f"init_from={args.out / 'base' / 'checkpoints'}"]

    runs = list(itertools.product(ARMS, range(args.seeds)))
    folder = {run: args.out / f"{ARMS[run[0]]}_{run[1]}" for run in runs}
    cores = list(range(args.jobs))

    def one(run):
        core = cores.pop()
        train(run[0], folder[run], core, f"seed={run[1]}", *base)
        cores.append(core)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(tqdm(pool.map(one, runs), total=len(runs), desc="runs", unit="run"))

    records = {run: metrics.read(folder[run] / "metrics.jsonl") for run in runs}
    headline = {}
    for arm in ARMS:
        curves = [[r[TAG] for r in records[arm, s] if TAG in r] for s in range(args.seeds)]
        steps = [r["step"] for r in records[arm, 0] if TAG in r]
        print(f"\n{arm}: held-out accuracy, T=1, after rollout step {', '.join(map(str, steps))}")
        for seed, curve in enumerate(curves):
            spent = records[arm, seed][-1]["spent/tokens"]
            values = " ".join(f"{v:.3f}" for v in curve)
            print(f"  seed {seed}: {values}   ({spent / 1e6:.2f} M tokens)")
        for step, column in zip(steps, zip(*curves, strict=True), strict=True):
            print(f"  step {step:3d}: {interval(column)}")
        headline[arm] = [np.mean(curve[1:]) for curve in curves]
        print(f"  mean of the evaluations after the start: {interval(headline[arm])}")

    a, b = headline.values()
    print(f"\nDAPO - naive GRPO, same seed: {interval(np.subtract(a, b))}")
    last = [records["naive GRPO", s][-1]["spent/tokens"] for s in range(args.seeds)]
    equal = [
        (at_tokens(records["DAPO", s], n), at_tokens(records["naive GRPO", s], n))
        for s, n in enumerate(last)
    ]
    dapo, grpo = map(interval, zip(*equal, strict=True))
    print(f"at naive GRPO's tokens ({np.mean(last) / 1e6:.2f} M): DAPO {dapo}, naive GRPO {grpo}")


if __name__ == "__main__":
    main()
