"""A ladder's table from the records of its runs, which are kept beside it.

    python -m dapo_jax.lab ladder --method=vapo --seeds=5 --out=RUNS     trains them
    python -m benchmarks ladder --method=vapo --runs=RUNS --write        keeps records and table
    python -m benchmarks ladder --method=vapo                            makes the table again

benchmarks/results/METHOD_ladder.jsonl.gz has a line a record, with the tags that the table reads.
"""

import pathlib

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax.config import presets
from dapo_jax.lab.experiments import ladder
from dapo_jax.log import metrics

FLAGS = {
    "method": Flag("vapo", "vapo", "whose ladder", tuple(presets.LADDERS)),
    "runs": Flag("", "", "folder of the trained runs; '' = the kept records"),
}
SEEDS = range(5)


def kept(method: str) -> pathlib.Path:
    name = "ladder" if method == "dapo" else f"{method}_ladder"
    return harness.RESULTS / f"{name}.jsonl.gz"


def trained(method: str, runs: pathlib.Path) -> dict[str, list[dict]]:
    """Run -> records, of all runs of a ladder. ValueError: one is missing."""
    names = (ladder.folder(n, seed) for n in presets.LADDERS[method].rungs for seed in SEEDS)
    found = {name: metrics.read(runs / name / "metrics.jsonl") for name in names}
    for name in (name for name, records in found.items() if not records):
        raise ValueError(f"{runs / name}: no records")
    return found


def measure(args) -> list[harness.Table]:
    of, config = presets.LADDERS[args.method], presets.ladder_task()
    if args.method == "vapo":
        config = presets.vapo_ladder_task()
    if args.runs:
        tags = {"step", "spent/tokens", ladder.held_out(config), *ladder.BESIDE.values()}
        harness.keep(kept(args.method), trained(args.method, pathlib.Path(args.runs)), tags)
    records = harness.kept(kept(args.method))
    _, found = ladder.compare(config, records.__getitem__, of.rungs, SEEDS, of)
    columns, *rows = ladder.table(found, config.optim.minibatches, of)
    table = harness.Table(*columns, name=kept(args.method).name.split(".")[0])
    for row in rows:
        table.row(*row)
    for place, values in ladder.places(found, config.optim.minibatches).items():
        for sentence in ladder.verdicts(values, of):
            if "told apart" not in sentence:
                table.note(f"After {place}: {sentence}.")
    table.note("No other pair is told apart: paired t-tests over seeds at 5%, corrected by Holm.")
    return [table]
