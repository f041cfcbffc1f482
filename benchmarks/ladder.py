"""A ladder's table from the records of its runs, which are kept beside it.

    python -m dapo_jax.lab ladder --method=vapo --seeds=5 --out=RUNS     trains them
    python -m benchmarks ladder --method=vapo --runs=RUNS --write        keeps records and table
    python -m benchmarks ladder --method=vapo                            makes the table again

benchmarks/results/METHOD_ladder.jsonl.gz has a line a record, with the tags that the table reads.
"""

import gzip
import json
import pathlib
from collections import defaultdict

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


def keep(method: str, config, runs: pathlib.Path) -> None:
    """The tags that the table reads, of every run of the ladder. ValueError: a run is missing."""
    tags = {"step", "spent/tokens", ladder.held_out(config), *ladder.BESIDE.values()}
    lines = []
    for name in presets.LADDERS[method].rungs:
        for run in (ladder.folder(name, seed) for seed in SEEDS):
            records = metrics.read(runs / run / "metrics.jsonl")
            if not records:
                raise ValueError(f"{runs / run}: no records")
            kinds = ({t: x for t, x in record.items() if t in tags} for record in records)
            lines += [json.dumps({"run": run} | record) for record in kinds]
    text = "".join(f"{line}\n" for line in lines)
    kept(method).write_bytes(gzip.compress(text.encode(), mtime=0))


def measure(args) -> list[harness.Table]:
    of, config = presets.LADDERS[args.method], presets.ladder_task()
    if args.method == "vapo":
        config = presets.vapo_ladder_task()
    if args.runs:
        keep(args.method, config, pathlib.Path(args.runs))
    records = defaultdict(list)
    for line in gzip.decompress(kept(args.method).read_bytes()).decode().splitlines():
        record = json.loads(line)
        records[record.pop("run")].append(record)
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
