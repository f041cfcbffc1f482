"""VAPO, DAPO and naive GRPO on the quickstart, at equal updates and at equal tokens.

    python benchmarks/vapo.py --seeds=5 --out=runs/vapo [--write]

Trains one base model (seed 0), then from it each method once per seed, `--jobs` at a time; the same
command resumes. Sizes and the policy's rate are the quickstart's, which were chosen for DAPO.
VAPO's own follow two runs on seed 100 (not reported; the same base): alpha 1.5 with a value rate of
3e-3 came to .885 in 160 updates, .4 with 1e-3 to .877, which tells nothing apart; the larger alpha
and the smaller rate were taken. The paper's .05 makes responses of up to 20 tokens, and that is all
of them, one-step TD, which learns from differences of values alone; with 1.5 the mean lambda is
about .95.

"explained" is the explained variance of the last of `PRETRAINED` steps of value pre-training,
before the policy's first update. An accuracy (held-out, T=1, 64 problems x 4 samples) is the mean
at 4/6, 5/6 and 6/6 of a budget, the fewest updates of the policy, or tokens, of any run; the tokens
of value pre-training count. Between evaluations the curve is a straight line. With 95% t-intervals
over seeds.
"""

import argparse
import pathlib
import runpy
from collections.abc import Mapping, Sequence

import numpy as np
import one_base
import results

from dapo_jax import config, presets
from dapo_jax.experiments import ladder, stats

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {"vapo": presets.vapo, "dapo": lambda c: c, "grpo": presets.grpo}
HEADING = "## VAPO on the quickstart"
PRETRAINED, ALPHA, VALUE_RATE = 10, 1.5, 1e-3
STEPS = 30  # in which the policy learns
TAG = "eval/heldout/avg@k"
BUDGETS = {"updates": "optim/updates", "tokens": "spent/tokens"}


def fields(arm: str, **changes) -> dict:
    """Leaves of the quickstart by the method `arm`, with `changes`."""
    c = ARMS[arm](runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]())
    c.steps, c.eval.every, c.eval.top_p, c.eval.k, c.eval.max_problems = STEPS, 5, 1.0, 4, 64
    c.checkpoint.every, c.log.tensorboard = 0, False
    if c.critic.enabled:
        c.steps += PRETRAINED
        c.critic.pretrain_steps, c.critic.length_alpha = PRETRAINED, ALPHA
        c.critic.lr = VALUE_RATE
    return config.leaves(c) | changes


def explained(records: Sequence[dict]) -> float:
    """Explained variance before the policy's first update; NaN without a value model."""
    before = [r for r in records if not r.get("optim/updates")]
    return next((r[k] for r in before[::-1] if (k := "critic/explained_variance") in r), np.nan)


def summary(records: Mapping[str, Sequence[Sequence[dict]]]) -> str:
    """Markdown of the runs (arm -> seed -> records)."""
    every = [run for of in records.values() for run in of]
    end = {x: min(run[-1][tag] for run in every) for x, tag in BUDGETS.items()}
    head = (f"at {end['updates']:.0f} updates", f"at {end['tokens'] / 1e6:.3f} M tokens")
    rows = [("method", *head, "M tokens", "length at the end", "explained")]
    for arm, of in records.items():
        scores = (
            stats.interval([ladder.accuracy(run, TAG, tag, end[x]) for run in of])
            for x, tag in BUDGETS.items()
        )
        mean = lambda tag, of=of: np.mean([run[-1][tag] for run in of])
        told = stats.interval([explained(run) for run in of])
        rows.append(
            (
                arm,
                *scores,
                f"{mean('spent/tokens') / 1e6:.3f}",
                f"{mean('response/length_mean'):.1f}",
                "" if np.isnan(told.mean) else told,
            )
        )
    return results.table(*rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), help="methods")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "vapo")
    parser.add_argument("--jobs", type=int, default=0, help="0: one per core")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()

    records = one_base.train(fields, args.only, "dapo", args.seeds, args.out, args.jobs)
    section = f"{HEADING}\n\n{results.made_by('jax', 'flax')}.\n\n{summary(records)}"
    print("\n" + section)
    if args.write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
