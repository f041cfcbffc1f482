"""The field's recipes on the quickstart's task: accuracy at equal updates and at equal tokens.

    python benchmarks/recipes.py --seeds=5 --out=runs/recipes [--write]

Trains one base model (seed 0), then from it configs/quickstart.py, which is DAPO, and each of
`presets.RECIPES` laid over it, once per seed, `--jobs` at a time; the same command resumes. All
keep the quickstart's sizes and learning rate, which were chosen for DAPO: a recipe's own would be
others. An accuracy (held-out, T=1, 128 problems x 4 samples) is the mean at 4/6, 5/6 and 6/6 of a
budget, the fewest updates, or tokens, of any run; between evaluations the curve is a straight line.
With 95% t-intervals over seeds.
"""

import argparse
import pathlib
import runpy
from collections.abc import Mapping, Sequence

import jax
import one_base
import results

from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.lab.experiments import ladder, stats

ROOT = pathlib.Path(__file__).parent.parent
ARMS = {"dapo": "", **{name: name for name in presets.RECIPES}}
TAG = "eval/heldout/avg@k"
HEADING = "## The field's recipes on the quickstart"
BUDGETS = {"updates": "optim/updates", "tokens": "spent/tokens"}


def fields(arm: str, **changes) -> dict:
    """Leaves of the quickstart under the recipe `arm`, with `changes`."""
    get_config = runpy.run_path(str(ROOT / "configs" / "quickstart.py"))["get_config"]
    return config.leaves(get_config(ARMS[arm])) | changes


def summary(records: Mapping[str, Sequence[Sequence[dict]]]) -> str:
    """Markdown of the runs (arm -> seed -> records)."""
    every = [run for of in records.values() for run in of]
    end = {x: min(run[-1][tag] for run in every) for x, tag in BUDGETS.items()}
    head = (f"at {end['updates']:.0f} updates", f"at {end['tokens'] / 1e6:.2f} M tokens")
    rows = [("recipe", *head, "updates", "M tokens")]
    for arm, of in records.items():
        scores = (
            stats.interval([ladder.accuracy(run, TAG, tag, end[x]) for run in of])
            for x, tag in BUDGETS.items()
        )
        spent = [stats.interval([run[-1][tag] for run in of]).mean for tag in BUDGETS.values()]
        rows.append((arm, *scores, f"{spent[0]:.0f}", f"{spent[1] / 1e6:.2f}"))
    return results.table(*rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", choices=ARMS, default=list(ARMS), help="recipes to run"
    )
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "recipes")
    parser.add_argument("--jobs", type=int, default=0, help="0: one per core")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()

    records = one_base.train(fields, args.only, "dapo", args.seeds, args.out, args.jobs)
    made = f"{results.made_by('jax', 'flax')}; {jax.default_backend()} backend"
    section = f"{HEADING}\n\n{made}.\n\n{summary(records)}"
    print("\n" + section)
    if args.write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
