"""What a mechanism experiment is made of, and the training runs of its arms.

A `Study` names arms, the contrasts between them, which of these decide, and what its figure shows.
studies.py has them all. Each run is naive GRPO, DAPO or VAPO with one switch turned; `train.train`
itself makes it, and it is read back from the files that it leaves.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from matplotlib.figure import Figure

from dapo_jax.config import schema
from dapo_jax.lab.experiments import bases, ink, stats, training
from dapo_jax.lab.experiments.pool import Task

SERIES = (  # a number per rollout step
    "response/length_mean", "response/truncated_frac", "reward/accuracy", "policy/entropy",
    "spent/tokens", "critic/explained_variance",
)  # fmt: skip
LEVELS = {"careful": (2, 3, 4, 5), "rambling": (2, 3, 4)}  # that runs from a base train on
WINDOW = 5  # rollout steps that a curve is averaged over

Number = Callable[[Mapping[str, Any]], float]  # of the result of one run


class Arm(NamedTuple):
    label: str  # in tables and figures
    base: str  # of bases.HABITS
    changes: Mapping[str, Any]  # config fields that differ from `schema.base()`


class Contrast(NamedTuple):
    """A number of the runs of arm `after` minus that of arm `before`, seed by seed."""

    measure: str
    after: str
    before: str
    number: Number
    expected: int = 0  # +1 or -1: the sign that the claim needs; 0: reported as found


class Compared(NamedTuple):
    """A contrast and its numbers, one per seed. told: whether the means differ (`told`)."""

    contrast: Contrast
    after: list[float]
    before: list[float]
    told: bool = False

    @property
    def difference(self) -> stats.Interval:
        return stats.paired(self.after, self.before)

    @property
    def disjoint(self) -> bool:
        return stats.apart(stats.interval(self.after), stats.interval(self.before))

    @property
    def shown(self) -> bool:
        """Told apart, on the expected side."""
        return self.told and self.difference.mean * self.contrast.expected > 0


class Panel(NamedTuple):
    """Mean and 95% interval over seeds, a curve for each arm."""

    x: str
    y: str  # with its unit
    values: Callable[[Mapping[str, Any]], Mapping[float, float]]  # result of a run -> {x: y}
    arms: Sequence[str] = ()  # those shown; none = all of the study


class Runs(NamedTuple):
    results: Mapping[str, Mapping]  # by folder
    base_of: Mapping[int, int]  # seed -> seed of the base it starts from

    def of(self, arm: str) -> list[Mapping]:
        """The results of an arm, one per seed."""
        return [self.results[folder(arm, seed)] for seed in self.base_of]


class Study(NamedTuple):
    """One experiment. Arms that are compared differ in one switch."""

    name: str
    claim: str
    contrasts: Sequence[Contrast]
    panels: Sequence[Panel]
    arms: Mapping[str, Arm] = {}
    tasks: Callable[[Mapping[int, int]], list[Task]] = lambda base_of: []  # beside the arms' runs
    read: Callable[[Runs, str], list[Mapping]] = Runs.of  # the results of an arm, one per seed

    def label(self, arm: str) -> str:
        return self.arms[arm].label if arm in self.arms else arm

    def compare(self, runs: Runs) -> list[Compared]:
        each = lambda x, arm: [x.number(run) for run in self.read(runs, arm)]
        return [Compared(x, each(x, x.after), each(x, x.before)) for x in self.contrasts]

    def figure(self, runs: Runs) -> Figure:
        figure, axes = ink.panels(1, len(self.panels))
        every = dict.fromkeys(arm for x in self.contrasts for arm in (x.before, x.after))
        for ax, panel in zip(axes, self.panels, strict=True):
            for arm in panel.arms or every:
                found = [panel.values(run) for run in self.read(runs, arm)]
                curves = np.array([list(run.values()) for run in found], float)
                ink.band(ax, list(found[0]), curves, self.label(arm))
            ax.set(xlabel=panel.x, ylabel=panel.y)
            ax.legend(fontsize=8)
        return figure


def told(found: Mapping[str, Sequence[Compared]]) -> dict[str, list[Compared]]:
    """`found` with `told` set: paired t-tests of the contrasts that decide, corrected by Holm for
    their number over all studies."""
    deciding = [x for of in found.values() for x in of if x.contrast.expected]
    sure = iter(stats.differ([np.subtract(x.after, x.before) for x in deciding]))
    mark = lambda x: x._replace(told=next(sure)) if x.contrast.expected else x
    return {name: [mark(x) for x in of] for name, of in found.items()}


def shown(found: Sequence[Compared]) -> bool:
    """Whether every deciding contrast is shown."""
    return all(x.shown for x in found if x.contrast.expected)


def peak(values: Sequence[float]) -> float:
    """The largest mean of `WINDOW` consecutive steps."""
    return float(np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid").max())


def series(tag: str, reduce: slice | Callable[[Sequence], float]) -> Number:
    """A number of a run's steps; a slice: the mean of those that have a value."""
    if not isinstance(reduce, slice):
        return lambda run: reduce(run["series"][tag])
    return lambda run: float(np.mean([x for x in run["series"][tag][reduce] if x is not None]))


def level(*levels: int) -> Number:
    """Accuracy in the last evaluation, mean over held-out levels."""

    def number(run) -> float:
        final = run["evaluations"][max(run["evaluations"], key=int)]
        return float(np.mean([final[f"k{k}"] for k in levels]))

    return number


def folder(arm: str, seed: int) -> str:
    return f"{arm}_{seed}"


def tasks(arms: Mapping[str, Arm], base_of: Mapping[int, int]) -> list[Task]:
    """The bases, and every arm from them, the longest first: so no core idles at the end."""
    out = bases.tasks((arm.base for arm in arms.values()), sorted(set(base_of.values())))
    for name, arm in sorted(arms.items(), key=lambda item: -item[1].changes["steps"]):
        for seed, b in base_of.items():
            after = (bases.folder(arm.base, b),)
            out.append(Task(folder(name, seed), run, (arm.base, arm.changes, seed, b), after))
    return out


def settings(home: pathlib.Path, base: str, changes: Mapping[str, Any], seed: int, base_seed: int):
    """The config of a run; `home` holds the bases and the problems."""
    config = schema.base()
    config.update(changes)
    config.seed = seed
    config.init_from = str((home / bases.folder(base, base_seed) / "checkpoints").absolute())
    config.log.tensorboard, config.log.samples = False, 0
    config.checkpoint.every, config.checkpoint.keep = 0, 1
    if base == "hasty":
        bases.on_files(config, home / "data", bases.HARD_LEVELS, ())
        config.eval.files = f"heldout={home.absolute()}/data/heldout_hard.jsonl"
        config.eval.every, config.eval.k, config.eval.max_response_tokens = 5, 4, 0
    else:
        bases.on_files(config, home / "data", LEVELS[base], LEVELS[base])
    return config


def run(
    where: pathlib.Path, base: str, changes: Mapping[str, Any], seed: int, base_seed: int
) -> dict:
    """A task of the pool: {series: tag -> one value per step (None where a step has none),
    evaluations: step -> set -> accuracy with all the room there was, cpu_s}."""
    logging.set_verbosity(logging.WARNING)
    records, cpu_s = training.trained(settings(where.parent, base, changes, seed, base_seed), where)
    evaluations = {}
    for r in records:
        if found := {t.split("/")[1]: x for t, x in r.items() if t.endswith("/avg@k")}:
            evaluations[str(r["step"])] = found
    values = {tag: [r.get(tag) for r in records if r["step"]] for tag in SERIES}
    return {"series": values, "evaluations": evaluations, "cpu_s": cpu_s}
