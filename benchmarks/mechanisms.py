"""One controlled experiment per technique of DAPO and VAPO: the verdicts, and all measures.

    python -m benchmarks mechanisms --full [--write]     trains what `lab mechanisms` trains
    python -m benchmarks mechanisms --full --kept        the tables again, from the results kept

benchmarks/results/mechanisms.jsonl.gz has the result of each run, a line a run.
"""

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax.lab.experiments import bases, mechanisms, pool, studies, study

KEPT = harness.RESULTS / "mechanisms.jsonl.gz"
FLAGS = {
    "seeds": Flag(2, 6, "RL seeds per arm"),
    "kept": Flag(False, False, "the tables alone, from the results that are kept"),
    "out": Flag("", "", "folder of the runs; runs/mechanisms without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
}


def verdicts(found: Mapping[str, Sequence[study.Compared]]) -> harness.Table:
    table = harness.Table("effect", "verdict", "deciding contrasts, paired", name="mechanisms")
    for name, compared in found.items():
        of = studies.ALL[name]
        sides = lambda c, of=of: f"{c.measure}, {of.label(c.after)} - {of.label(c.before)}"
        decides = [x for x in compared if x.contrast.expected]
        told = "; ".join(f"{sides(x.contrast)}: {x.difference:+.3f}" for x in decides)
        table.row(of.name, "**shown**" if study.shown(compared) else "not shown", told)
    return table


def measures(found: Mapping[str, Sequence[study.Compared]]) -> harness.Table:
    table = harness.Table("technique", *mechanisms.COLUMNS, name="mechanism_measures")
    for name, compared in found.items():
        of = studies.ALL[name]
        for x in compared:
            table.row(of.name, *mechanisms.cells(of, x))
    return table


def accuracies(results: Mapping[str, Mapping]) -> harness.Table:
    """What each base model gets right, before training."""
    levels = [f"k{k}" for k in bases.TEST_LEVELS]
    table = harness.Table("base", *levels, name="mechanism_bases")
    for name in (name for name in results if name.startswith("base_")):
        found = results[name].get("evaluations", {}).get("0", {})  # none: the bandit's
        if found:
            table.row(name.removeprefix("base_"), *(f"{found[level]:.2f}" for level in levels))
    return table


def measure(args) -> list[harness.Table]:
    base_of = mechanisms.base_seeds(args.seeds)
    if args.kept:
        results = {name: result for name, (result,) in harness.kept(KEPT).items()}
    else:
        out = pathlib.Path(args.out or harness.ROOT / "runs" / "mechanisms")
        bases.write_problems(out / "data")
        tasks = studies.tasks(list(studies.ALL), base_of)
        results = pool.run_all(tasks, out, args.jobs, "mechanisms")
    runs = study.Runs(results, base_of)
    if args.write:
        fields = set().union(*results.values())
        harness.keep(KEPT, {name: [of] for name, of in results.items()}, fields)
        for name, of in studies.ALL.items():
            figure = harness.ROOT / "benchmarks" / "figures" / f"mechanism_{name}.png"
            of.figure(runs).savefig(figure, dpi=75)
    found = study.told({name: of.compare(runs) for name, of in studies.ALL.items()})
    return [verdicts(found), measures(found), accuracies(results)]
