"""Curricula on the quickstart's task: generated tokens to a held-out accuracy of .9.

    python benchmarks/curricula.py --seeds=5 --out=runs/curricula [--write]

The task has 512 problems here and not 4,096, so that several epochs pass. Trains one base model
(seed 0), then from it each of `ARMS` once per seed, `--jobs` at a time; the same command resumes.
Accuracy is that at T=1 of 128 problems x 4 samples, every third step; between evaluations the curve
is a straight line, and it has come to .9 where it first does. With 95% t-intervals over seeds, and
of the differences from the arm without a curriculum seed by seed. A run that never comes to .9
counts with all its tokens, which is too few.
"""

import argparse
import pathlib
import runpy
from collections.abc import Mapping, Sequence

import numpy as np
import one_base
import results

from dapo_jax import config
from dapo_jax.lab.experiments import figures, stats

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {
    "none": {},
    "no_positive": {"pass_rate_cap": 0.9},
    "revisit": {"pass_rate_cap": 0.9, "revisit_epochs": 2},
    "band": {"band_low": 0.2, "band_high": 0.8},
    "temperature": {"temperature_schedule": "linear", "temperature_steps": 24},  # 1.2 to 1
}
TAG, LEVEL = "eval/heldout/avg@k", 0.9
HEADING = "## Curricula on the quickstart"


def fields(arm: str, **changes) -> dict:
    """Leaves of the quickstart under the curriculum `arm`, with `changes`."""
    c = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]()
    c.steps, c.data.embedded_problems = 36, 512
    c.eval.every, c.eval.top_p = 3, 1.0
    if "temperature_schedule" in ARMS[arm]:
        c.rollout.temperature = 1.2
    c.curriculum.update(ARMS[arm])
    return config.leaves(c) | changes


def tokens_to(records: Sequence[dict], level: float) -> tuple[float, bool]:
    """(tokens drawn until the accuracy of `TAG` came to `level`, whether it did)."""
    at, values = figures.curve(records, TAG, "spent/tokens")
    above = np.flatnonzero(values >= level)
    if not len(above):
        return float(at[-1]), False
    i = max(above[0], 1)
    return float(np.interp(level, values[i - 1 : i + 1], at[i - 1 : i + 1])), True


def summary(records: Mapping[str, Sequence[Sequence[dict]]]) -> str:
    """Markdown of the runs (arm -> seed -> records), 'none' among them."""
    head = ("curriculum", f"thousand tokens to {LEVEL}", "less none's", "came to it")
    rows = [(*head, "at the end", "epochs", "left out at the end")]
    reached = {arm: [tokens_to(run, LEVEL) for run in of] for arm, of in records.items()}
    thousands = {arm: [tokens / 1e3 for tokens, _ in found] for arm, found in reached.items()}
    one = lambda x: f"{x.mean:.1f}" + ("" if np.isnan(x.half) else f" +- {x.half:.1f}")
    for arm, of in records.items():
        last = [run[-1] for run in of]
        rows.append(
            (
                arm,
                one(stats.interval(thousands[arm])),
                "" if arm == "none" else one(stats.paired(thousands[arm], thousands["none"])),
                f"{sum(came for _, came in reached[arm])} of {len(of)}",
                stats.interval([figures.curve(run, TAG, "spent/tokens")[1][-1] for run in of]),
                f"{np.mean([r['data/epochs'] for r in last]):.1f}",
                f"{np.mean([r.get('curriculum/left_out', 0) for r in last]):.0f}",
            )
        )
    return results.table(*rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), help="arms to run")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "curricula")
    parser.add_argument("--jobs", type=int, default=0, help="0: one per core")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()

    arms = ["none", *(arm for arm in args.only if arm != "none")]
    records = one_base.train(fields, arms, "none", args.seeds, args.out, args.jobs)
    section = f"{HEADING}\n\n{results.made_by('jax', 'flax')}.\n\n{summary(records)}"
    print("\n" + section)
    if args.write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
