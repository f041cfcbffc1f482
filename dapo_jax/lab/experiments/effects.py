"""What a mechanism experiment is made of: arms, and contrasts of arms seed by seed.

`Technique` is the type of the modules in techniques/, which say what decides. The numbers come from
the results of the tasks (plain JSON), one per seed and arm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dapo_jax.lab.experiments import arms, ink, stats
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.lab.experiments.stats import Interval

WINDOW = 5  # rollout steps that a curve is averaged over


class Contrast(NamedTuple):
    """`after` minus `before`, seed by seed."""

    measure: str
    after_name: str
    before_name: str
    after: list[float]
    before: list[float]
    expected: int  # +1 or -1: the sign that the claim needs; 0: reported as found

    @property
    def difference(self) -> Interval:
        return stats.paired(self.after, self.before)

    @property
    def disjoint(self) -> bool:
        return stats.apart(stats.interval(self.after), stats.interval(self.before))

    @property
    def shown(self) -> bool:
        """The paired 95% interval excludes zero, on the expected side."""
        d = self.difference
        return stats.excludes_zero(d) and d.mean * self.expected > 0


class Effect(NamedTuple):
    """What the runs of one technique say."""

    name: str
    claim: str
    contrasts: list[Contrast]

    @property
    def shown(self) -> bool:
        """Whether every deciding contrast is shown."""
        return all(x.shown for x in self.contrasts if x.expected)


class Runs(NamedTuple):
    """Results by folder, and the seeds and bases that they belong to."""

    results: Mapping[str, Mapping]
    base_of: Mapping[int, int]  # seed -> seed of its base

    def each(self, arm: str, number: Callable[[Mapping], float]) -> list[float]:
        return [number(self.results[arms.folder(arm, s)]) for s in self.base_of]

    def compare(
        self,
        measure: str,
        after: str,
        before: str,
        number: Callable[[Mapping], float],
        expected: int = 0,
    ) -> Contrast:
        return Contrast(
            measure, after, before, self.each(after, number), self.each(before, number), expected
        )


class Technique(NamedTuple):
    """One experiment. Arms that are compared differ in one switch."""

    name: str
    claim: str
    arms: Mapping[str, arms.Arm]
    contrasts: Callable[[Runs], list[Contrast]]
    figure: Callable[[Runs], Figure]
    tasks: Callable[[Mapping[int, int]], list[Task]] = lambda base_of: []  # beside the arms' runs

    def effect(self, runs: Runs) -> Effect:
        return Effect(self.name, self.claim, self.contrasts(runs))


# ------------------------------------------------------------------------------------------------
# One number per run
# ------------------------------------------------------------------------------------------------

# Series of `arms.SERIES`.
LENGTH, CUT = "response/length_mean", "response/truncated_frac"
ACCURACY, ENTROPY = "reward/accuracy", "policy/entropy"


def steps_mean(values: Sequence[float | None]) -> float:
    """The mean of the steps that have a value."""
    return float(np.mean([v for v in values if v is not None]))


def peak(values: Sequence[float], window: int = WINDOW) -> float:
    """The largest mean of `window` consecutive steps."""
    return float(np.convolve(values, np.full(window, 1 / window), "valid").max())


def last(values: Sequence[float], window: int = WINDOW) -> float:
    return steps_mean(values[-window:])


def at_end(run: Mapping, measure: str, levels: Sequence[int]) -> float:
    """`measure` in the last evaluation, mean over held-out levels."""
    final = run["evaluations"][max(run["evaluations"], key=int)]
    return float(np.mean([final[f"k{k}"][measure] for k in levels]))


def curve(tag: str, reduce: Callable) -> Callable[[Mapping], float]:
    return lambda run: reduce(run["series"][tag])


def level(measure: str, *levels: int) -> Callable[[Mapping], float]:
    return lambda run: at_end(run, measure, levels)


def over_steps(ax, runs: Runs, chosen: Mapping[str, arms.Arm], tag: str, unit: str) -> None:
    """A panel: the series `tag` of these arms, mean and 95% interval over seeds."""
    for name, arm in chosen.items():
        curves = runs.each(name, lambda run: run["series"][tag])
        ink.band(ax, range(1, len(curves[0]) + 1), curves, arm.label)
    ax.set(xlabel="rollout step", ylabel=unit)
    ax.legend()
