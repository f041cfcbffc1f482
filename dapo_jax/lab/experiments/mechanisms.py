"""One controlled experiment per technique: each turns one switch of a run, and nothing else.

    python -m dapo_jax.lab mechanisms --seeds=6 --out=runs/mechanisms

Two base models per habit, from warm-ups with seeds of their own (bases.py); RL seed s starts from
base s mod 2, so an interval over seeds has the differences between bases in it. Arms share seeds,
bases and problems and are compared seed by seed. The same command goes on where it was cut off.
About half an hour of one CPU core.

An effect counts as shown if each of its deciding contrasts (studies.py) differs from zero on the
side that the claim names, by paired t-tests over seeds at 5%, corrected by Holm for all contrasts
that decide. Everything else is reported as found: a 95% t-interval, with no correction.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from dapo_jax.data import files
from dapo_jax.lab.experiments import bases, pool, stats, studies
from dapo_jax.lab.experiments.study import Compared, Runs, Study, shown, told

BASES = 2


def base_seeds(seeds: int) -> dict[int, int]:
    """RL seed -> seed of the base it starts from."""
    return {seed: seed % BASES for seed in range(seeds)}


COLUMNS = ("measure", "A", "B", "mean of A", "mean of B", "A - B, paired", "verdict")


def cells(study: Study, x: Compared) -> tuple[str, ...]:
    """A contrast's row of a table of `COLUMNS`."""
    remark = "excludes 0" if stats.excludes_zero(x.difference) else ""
    if x.contrast.expected:
        disjoint = "disjoint" if x.disjoint else "intervals overlap"
        remark = f"decides: {'shown' if x.shown else 'not shown'}, {disjoint}"
    arms = study.label(x.contrast.after), study.label(x.contrast.before)
    means = str(stats.interval(x.after)), str(stats.interval(x.before))
    return (x.contrast.measure, *arms, *means, f"{x.difference:+.3f}", remark)


def section(name: str, verdict: str, found: Sequence[Compared]) -> str:
    """A technique's claim, verdict and table."""
    study = studies.ALL[name]
    lines = [f"\n## {study.name}: {verdict}\n\n{study.claim}\n"]
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(cells(study, x) for x in found)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, f"\n![{study.name}]({name}.png)"])


def report(out: pathlib.Path, names: Sequence[str], runs: Runs) -> str:
    """Write mechanisms.md, mechanisms.json and the figures; returns the verdicts."""
    effects, lines = {}, []
    cpu_s = {folder: result["cpu_s"] for folder, result in runs.results.items()}
    sections = [
        "# Mechanism experiments\n",
        f"{len(runs.base_of)} RL seeds per arm over {len(set(runs.base_of.values()))} base seeds;"
        " arms paired by seed. Mean and 95% t-interval over seeds, with the differences between"
        f" bases in it. Runs: {sum(cpu_s.values()) / 60:.1f} CPU-minutes in all.",
    ]
    compared = told({name: studies.ALL[name].compare(runs) for name in names})
    for name, found in compared.items():
        study = studies.ALL[name]
        verdict = "shown" if shown(found) else "not shown"
        study.figure(runs).savefig(out / f"{name}.png", dpi=130)
        sections.append(section(name, verdict, found))
        lines.append(f"{study.name:26s} {verdict}")
        contrasts = [
            {"measure": x.contrast.measure, "decides": bool(x.contrast.expected)}
            | {x.contrast.after: x.after, x.contrast.before: x.before, "paired": x.difference}
            for x in found
        ]
        effects[name] = {"claim": study.claim, "shown": shown(found), "contrasts": contrasts}
    files.write_json(out / "mechanisms.json", {"effects": effects, "cpu_s": cpu_s})
    (out / "mechanisms.md").write_text("\n".join(sections) + "\n")
    return "\n".join([*lines, f"tables and figures: {out}/mechanisms.md"])


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(studies.ALL)
    parser.add_argument("--seeds", type=int, default=6, help="RL seeds per arm, 2 or more")
    parser.add_argument("--only", default=",".join(known), help="techniques, comma-separated")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 = one per core")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory; made if absent")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only: no technique {unknown[0]!r}; there are {', '.join(known)}")
    if args.seeds < 2:
        parser.error("--seeds: intervals need at least 2")
    base_of = base_seeds(args.seeds)
    bases.write_problems(args.out / "data")
    results = pool.run_all(studies.tasks(names, base_of), args.out, args.jobs, "mechanisms")
    print(report(args.out, names, Runs(results, base_of)))


if __name__ == "__main__":
    sys.exit(main())
