"""One controlled experiment per technique of DAPO and VAPO: each turns one switch of a run.

    python -m benchmarks mechanisms --full [--write] [--only clip_higher ...]   trains and tabulates
    python -m benchmarks mechanisms --full --kept        the tables again, from the results kept

Two base models per habit, from warm-ups with seeds of their own (bases.py); RL seed s starts from
base s mod 2, so an interval over seeds has the differences between bases in it. Arms share seeds,
bases and problems and are compared seed by seed. The same command goes on where it was cut off.
About half an hour of one CPU core.

An effect counts as shown if each of its deciding contrasts (studies.py) differs from zero on the
side that the claim names, by paired t-tests over seeds at 5%, corrected by Holm for all contrasts
that decide. Everything else is reported as found: a 95% t-interval, with no correction.

benchmarks/results/mechanisms.jsonl.gz has the result of each run, a line a run.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax.lab.experiments import bases, pool, stats, studies, study

KEPT = harness.RESULTS / "mechanisms.jsonl.gz"
EVERY = tuple(studies.ALL)
COLUMNS = ("measure", "A", "B", "mean of A", "mean of B", "A - B, paired", "verdict")
BASES = 2
FLAGS = {
    "only": Flag(EVERY, EVERY, "techniques", EVERY),
    "seeds": Flag(2, 6, "RL seeds per arm"),
    "kept": Flag(False, False, "the tables alone, from the results that are kept"),
    "out": Flag("", "", "folder of the runs; runs/mechanisms without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
}


def base_seeds(seeds: int) -> dict[int, int]:
    """RL seed -> seed of the base it starts from."""
    return {seed: seed % BASES for seed in range(seeds)}


def cells(of: study.Study, x: study.Compared) -> tuple[str, ...]:
    """A contrast's row of a table of `COLUMNS`."""
    remark = "excludes 0" if stats.excludes_zero(x.difference) else ""
    if x.contrast.expected:
        disjoint = "disjoint" if x.disjoint else "intervals overlap"
        remark = f"decides: {'shown' if x.shown else 'not shown'}, {disjoint}"
    arms = of.label(x.contrast.after), of.label(x.contrast.before)
    means = str(stats.interval(x.after)), str(stats.interval(x.before))
    return (x.contrast.measure, *arms, *means, f"{x.difference:+.3f}", remark)


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
    table = harness.Table("technique", *COLUMNS, name="mechanism_measures")
    for name, compared in found.items():
        of = studies.ALL[name]
        for x in compared:
            table.row(of.name, *cells(of, x))
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
    if args.write and {*args.only} < {*EVERY}:
        sys.exit("--write: keeps the runs of all techniques; leave out --only")
    base_of = base_seeds(args.seeds)
    if args.kept:
        results = {name: result for name, (result,) in harness.kept(KEPT).items()}
    else:
        out = pathlib.Path(args.out or harness.ROOT / "runs" / "mechanisms")
        bases.write_problems(out / "data")
        tasks = studies.tasks(args.only, base_of)
        results = pool.run_all(tasks, out, args.jobs, "mechanisms")
    runs = study.Runs(results, base_of)
    if args.write:
        fields = set().union(*results.values())
        harness.keep(KEPT, {name: [of] for name, of in results.items()}, fields)
        for name, of in studies.ALL.items():
            figure = harness.ROOT / "benchmarks" / "figures" / f"mechanism_{name}.png"
            of.figure(runs).savefig(figure, dpi=75)
    found = study.told({name: studies.ALL[name].compare(runs) for name in args.only})
    return [verdicts(found), measures(found), accuracies(results)]
