"""The field's recipes beside full DAPO, on the task of the rungs, each at a rate of its own.

    python -m benchmarks rungs_recipes                   the comparison, from the kept records
    python -m benchmarks rungs_recipes --full --tune     learning rates, on seeds of the exploration
    python -m benchmarks rungs_recipes --full            the runs that count, and the comparison
    python -m benchmarks rungs_recipes --parts [--full]  CISPO taken apart: what of it is ahead
    python -m benchmarks rungs_recipes --without [--full]  full DAPO without each of its techniques

Every method of METHODS is configs/rungs.py with what its source has, from a base model of the
seed's own. Each is tuned by the same budget: one run of TUNED rollout steps at each rate of GRID.
What is then compared, seed by seed, is how far it is from full DAPO in held-out accuracy, with room
and within the limit (docs/rungs.md), the mean at 4/6, 5/6 and 6/6 of three budgets: STEPS x 32
updates, for which methods that do not draw groups again go on for LONGER times the steps; the
fewest tokens, and the fewest CPU-seconds, that any run came to. Intervals are 95% t-intervals over
seeds; "ahead" and "behind" mean a paired t-test at 5%, corrected by Holm for all at that budget.

A run's CPU-seconds are those of its process in rollouts and updates, behind the first rollout step,
which compiles; evaluation and saving are not counted.
"""

import itertools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import harness, paired, rungs
from benchmarks.harness import Flag
from benchmarks.rungs import TOKENS, UPDATES, WHOLE
from dapo_jax import config, train
from dapo_jax.lab.experiments import figures, pool, stats

CPU_S = "spent/cpu_s"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> rung of configs/rungs.py, changes
    "full DAPO": (WHOLE, {}),
    "grpo": ("grpo", {}),
    "sapo": ("grpo", {"loss.objective": "sapo"}),
    "gspo": ("gspo", {}),
    "scale_rl": ("scale_rl", {}),
    "cispo": ("cispo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "just_rl": ("just_rl", {}),
    "rloo": ("rloo", {}),
}
AGAIN = ("full DAPO", "cispo")  # those that draw other groups for those without a signal
GRID = (2.25e-4, 4.5e-4, 9e-4, 1.8e-3)  # rates, of which each method gets one
RATES = {  # what tuning chose
    "full DAPO": 9e-4, "grpo": 4.5e-4, "sapo": 9e-4, "gspo": 2.25e-4, "scale_rl": 2.25e-4,
    "cispo": 4.5e-4, "dr_grpo": 2.25e-4, "just_rl": 4.5e-4, "rloo": 9e-4,
}  # fmt: skip
# CISPO taken apart: name -> what of it full DAPO has, and its rate. "full DAPO" and "cispo" have
# their own, and their runs are those of the comparison above.
OBJECTIVE = {"loss.objective": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0}
MEAN = {"loss.normalizer": "group_tokens"}
PARTS: dict[str, tuple[dict[str, Any], float]] = {
    "dapo_half_rate": ({}, 4.5e-4),
    "dapo_mean": (MEAN, 4.5e-4),
    "dapo_objective": (OBJECTIVE, 4.5e-4),
    "cispo_double_rate": (OBJECTIVE | MEAN, 9e-4),
    "dapo_mean_wide": (MEAN | {"loss.clip_low": 1.0, "loss.clip_high": 4.0}, 4.5e-4),
    "dapo_mean_kept": (MEAN | {"loss.objective": "cispo"}, 4.5e-4),
}
CHANGES = [  # what is changed, and the arms with and without it, alike but for it
    ("the rate halved, in DAPO", "dapo_half_rate", "full DAPO"),
    ("the objective, under DAPO's mean", "dapo_objective", "dapo_half_rate"),
    ("the objective, under CISPO's mean", "cispo", "dapo_mean"),
    ("the mean, under DAPO's objective", "dapo_mean", "dapo_half_rate"),
    ("the mean, under CISPO's objective", "cispo", "dapo_objective"),
    ("the rate doubled, in CISPO", "cispo_double_rate", "cispo"),
    ("CISPO's bounds, in PPO's clip", "dapo_mean_wide", "dapo_mean"),
    ("the clipped tokens' gradient kept, in PPO's bounds", "dapo_mean_kept", "dapo_mean"),
]
# Full DAPO and the same without each technique; the last of these is a rung of its own.
ARMS = (WHOLE, *rungs.DAPO.leave_one_out[:-1], rungs.DAPO.cumulative[-2])
WITHOUT = [
    (f"without {technique}", arm, WHOLE)
    for technique, arm in zip(rungs.DAPO.without, ARMS[1:], strict=True)
]
TUNED, STEPS, LONGER = 8, 10, 2  # rollout steps of tuning, and of the comparison
EXPLORED = 200  # seed of tuning, and of its base model
BUDGETS = {"{:,.0f} updates": (UPDATES, 1), "{:.2f} M tokens": (TOKENS, 1e6),
           "{:.0f} CPU-seconds": (CPU_S, 1)}  # fmt: skip
BESIDE = {  # name of a column -> tag, how it is written, its unit: at the compared updates
    **rungs.BESIDE,
    "clipped above": ("policy/clip_high_frac", "{:.2%}", 1),
    "clipped below": ("policy/clip_low_frac", "{:.2%}", 1),
    "mixed groups": ("sampling/accept_frac", "{:.2f}", 1),
    "entropy": ("policy/entropy", "{:.2f}", 1),
    "CPU-seconds": (CPU_S, "{:.0f}", 1),
}
KEPT = harness.RESULTS / "rungs_recipes.jsonl.gz"
KEPT_PARTS = harness.RESULTS / "rungs_parts.jsonl.gz"
KEPT_WITHOUT = harness.RESULTS / "rungs_without.jsonl.gz"
TAGS = {"step", UPDATES, *rungs.PLACES.values(), *(tag for tag, *_ in BESIDE.values())}


def clocked(workdir: pathlib.Path, fields: Mapping[str, Any]) -> list[float]:
    """A task of the pool: trains, and returns for each rollout step the CPU-seconds that rollouts
    and updates had cost by its end, behind those of the first."""
    c, spent, since, told = config.base(), 0.0, None, []
    c.update(fields)

    def phase(name: str) -> None:
        nonlocal spent, since
        if name == "chunk":  # tokens were decoded, in a phase that goes on
            return
        now = time.process_time()
        spent += 0.0 if since is None else now - since
        since = now if name in ("rollout", "update") else None

    def step(state, record) -> None:
        phase("its end")
        told.append(spent)

    if not train.train(c, workdir, hooks=train.Hooks(phase, step)):
        raise RuntimeError("cut off by SIGTERM; the same command goes on")
    return [round(x - told[0], 3) for x in told]


def of_base(seed: int) -> pool.Task:
    return rungs.of_base(seed)._replace(arguments=(seed, 8))  # it is not told of


def task(name: str, rate: float, seed: int, base: int, out: pathlib.Path, where: str, steps: int):
    rung, changes = METHODS[name]
    changes = {"optim.lr": rate, "steps": steps, "eval.every": 2 if steps > TUNED else 4} | changes
    return rungs.task(rung, seed, base, out, where, **changes)._replace(work=clocked)


def records(out: pathlib.Path, tasks: Sequence[pool.Task], jobs: int) -> dict[str, list[dict]]:
    """Those of each run, by its folder, with its CPU-seconds; what is not there is made."""
    bases = {of.after[0]: int(of.after[0].split("_")[1]) for of in tasks}
    spent = pool.run_all([*map(of_base, bases.values()), *tasks], out, jobs)
    found = {of.folder: rungs.records(out / of.folder) for of in tasks}
    for folder, run in found.items():
        for r in (r for r in run if r["step"]):
            r[CPU_S] = spent[folder][r["step"] - 1]
    return found


def tuned(out: pathlib.Path, jobs: int) -> harness.Table:
    """A row a method: for each rate the mean of both accuracies at the end of short runs."""
    table = harness.Table("method", *map("{:.3g}".format, GRID), "chosen", name="rungs_rates")
    for name in METHODS:
        scores = []
        for rate in GRID:
            where = f"rates/{name}_{rate:.3g}_seed_{EXPLORED}".replace(" ", "_")
            of = task(name, rate, EXPLORED, EXPLORED, out, where, TUNED)
            last = records(out, [of], jobs)[where][-1]
            scores.append(np.mean([last[tag] for tag in rungs.PLACES.values()]))
        table.row(name, *map("{:.3f}".format, scores), f"{GRID[int(np.argmax(scores))]:.3g}")
    return table


def compared(runs: Mapping[str, Sequence[Sequence[dict]]], updates: float) -> list[harness.Table]:
    """A row for each budget and method, and what its runs were like after the updates. runs:
    method -> seed -> `records`, full DAPO first."""
    plain = next(iter(runs))
    heads = [head for what in rungs.PLACES for head in (f"right {what}", "change", "verdict")]
    table = harness.Table("after", "method", "rate", *heads, name="rungs_recipes")
    for head, (x, unit) in BUDGETS.items():
        some = {name: of for name, of in runs.items() if all(x in run[-1] for run in of)}
        end = min(run[-1][x] for of in some.values() for run in of) if x != UPDATES else updates
        places = {w: rungs.accuracies(some, tag, x, end) for w, tag in rungs.PLACES.items()}
        told = paired.told(places, [(name, plain) for name in some if name != plain])
        for name in some:
            cells = [head.format(end / unit), name, f"{RATES[name]:.3g}"]
            for what, of in places.items():
                change = ["-", "-"] if name == plain else told[what, name, plain].cells()
                cells += [stats.interval(of[name]), *change]
            table.row(*cells)
    return [table, beside(runs, updates, "method", "rungs_recipes_beside")]


def beside(runs, updates: float, head: str, name: str, columns=BESIDE) -> harness.Table:
    """What the runs were like after the updates: means over the seeds."""
    table = harness.Table(head, *columns, name=name)
    for method, of in runs.items():
        cells = [method]
        for tag, form, unit in columns.values():
            curves = [figures.curve(run, tag, UPDATES) for run in of]
            there = all(len(at) for at, _ in curves)
            mean = np.mean([np.interp(updates, *c) for c in curves]) if there else np.nan
            cells.append(form.format(mean / unit) if there else "-")
        table.row(*cells)
    return table


def part(name: str, seed: int, out: pathlib.Path) -> pool.Task:
    """The run of full DAPO with what PARTS says of CISPO, from the base of its seed."""
    changes, rate = PARTS[name]
    made = task("full DAPO", rate, seed, seed, out, f"parts/{name}/seed_{seed}", STEPS)
    return made._replace(arguments=({**made.arguments[0], **changes},))


def without(arm: str, seed: int, out: pathlib.Path) -> pool.Task:
    """The run of an arm of ARMS, with the ladder's steps and rate."""
    return rungs.task(arm, seed, seed, out, f"without/{arm}/seed_{seed}")


def changed(
    runs: Mapping[str, Sequence[Sequence[dict]]], changes, updates: float, name: str,
    columns=BESIDE,
) -> list[harness.Table]:  # fmt: skip
    """Tables of `changes`, of the arms' accuracy and of their runs. runs: arm -> seed -> `records`;
    told are as many seeds, from 0 on, as every arm has. changes: as CHANGES."""
    changes = [change for change in changes if {*change[1:]} <= runs.keys()]
    runs = {arm: of for arm, of in runs.items() if any(arm in change for change in changes)}
    fewest = min(map(len, runs.values()))
    runs = {arm: of[:fewest] for arm, of in runs.items()}
    places = {w: rungs.accuracies(runs, t, UPDATES, updates) for w, t in rungs.PLACES.items()}
    told = paired.told(places, [pair for _, *pair in changes])
    heads = [head for what in places for head in (f"right {what}", "verdict")]
    table = harness.Table("what is changed", "arm", "less", *heads, name=name)
    for head, *pair in changes:
        found = [told[what, *pair].cells() for what in places]
        table.row(head, *pair, *itertools.chain(*found))
    arms = harness.Table("arm", *(f"right {what}" for what in places), name=f"{name}_arms")
    for arm in runs:
        arms.row(arm, *(stats.interval(of[arm]) for of in places.values()))
    return [table, arms, beside(runs, updates, "arm", f"{name}_beside", columns)]


FLAGS = {
    "tune": Flag(False, False, "rates, by short runs from the base model of the exploration"),
    "parts": Flag(False, False, "CISPO taken apart, beside the kept runs of it and of full DAPO"),
    "without": Flag(False, False, "full DAPO and the same without each technique"),
    "seeds": Flag(0, 4, "runs of each method, each from a base of its seed; 0: those kept"),
    "out": Flag("", "", "folder of the runs; runs/rungs without it"),
    "jobs": Flag(0, 0, "runs at a time; 0: one per core"),
}


def measure(args) -> list[harness.Table]:
    out = pathlib.Path(args.out or harness.ROOT / rungs.TASK["HOME"])
    if args.tune:
        return [tuned(out, args.jobs)]
    updates = STEPS * rungs.TASK["get_config"]().optim.minibatches
    seeds = range(args.seeds)
    found = {}
    if args.parts:
        for name in PARTS:
            found |= records(out, [part(name, s, out) for s in seeds], args.jobs)
        if found and args.write:
            harness.keep(KEPT_PARTS, found, TAGS)
        parts = found or harness.kept(KEPT_PARTS)
        both = paired.by_arm(harness.kept(KEPT) | parts, ("full DAPO", *PARTS, "cispo"))
        return changed(both, CHANGES, updates, "rungs_parts")
    if args.without:
        tasks = [without(arm, s, out) for arm in ARMS for s in seeds]
        pool.run_all([*map(of_base, seeds), *tasks], out, args.jobs)
        found = {of.folder: rungs.records(out / of.folder) for of in tasks}
        if found and args.write:
            harness.keep(KEPT_WITHOUT, found, TAGS)
        runs = paired.by_arm(found or harness.kept(KEPT_WITHOUT), ARMS)
        updates = rungs.TASK["get_config"]().steps * updates / STEPS
        return changed(runs, WITHOUT, updates, "rungs_without", rungs.BESIDE)
    if not args.seeds:
        return compared(paired.by_arm(harness.kept(KEPT), METHODS), updates)
    for name in RATES:  # one after the other: a cut loses the last
        steps = STEPS if name in AGAIN else round(STEPS * LONGER)
        where = f"recipes/{name.replace(' ', '_')}/seed_{{}}".format
        tasks = [task(name, RATES[name], s, s, out, where(s), steps) for s in seeds]
        found |= records(out, tasks, args.jobs)
    if args.write:
        harness.keep(KEPT, found, TAGS)
    return compared(paired.by_arm(found, METHODS), updates)
