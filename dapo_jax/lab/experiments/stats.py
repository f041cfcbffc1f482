"""Means and 95% t-intervals over seeds. A sample here is one number per seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Interval(NamedTuple):
    """A mean and half the width of its 95% t-interval (NaN for fewer than two values)."""

    mean: float
    half: float

    def __format__(self, form: str) -> str:
        """form: of the mean and, without a sign, of the half; .3f where none is given."""
        form = form or ".3f"
        half = "" if np.isnan(self.half) else f" +- {self.half:{form.removeprefix('+')}}"
        return f"{self.mean:{form}}{half}"

    def __str__(self) -> str:
        return format(self)

    low = property(lambda self: self.mean - self.half)
    high = property(lambda self: self.mean + self.half)


def interval(values: Sequence[float]) -> Interval:
    """The mean of `values` [seeds], one or more."""
    half = np.nan
    if len(values) > 1:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(np.asarray(values, float))
    return Interval(float(np.mean(values)), float(half))


def paired(after: Sequence[float], before: Sequence[float]) -> Interval:
    """The mean difference seed by seed, the sharpest comparison of two arms that share their seeds.
    ValueError: the two have different lengths."""
    return interval([a - b for a, b in zip(after, before, strict=True)])


def differ(changes: Sequence[Sequence[float]], level: float = 0.05) -> list[bool]:
    """Whether each of many samples of paired differences [seeds] has a mean that is not 0: t-tests,
    corrected for their number after Holm (1979), so that the chance of any false yes is at most
    `level`. One seed tells nothing."""

    def chance(x: Sequence[float]) -> float:
        if len(x) < 2 or not np.ptp(x):  # without a spread there is no test
            return float(len(x) < 2 or x[0] == 0)
        return stats.ttest_1samp(x, 0.0).pvalue

    found = [chance(np.asarray(x, float)) for x in changes]
    order, out = np.argsort(found, kind="stable"), [False] * len(found)
    for tried, i in enumerate(order):
        if not found[i] <= level / (len(found) - tried):
            break
        out[i] = True
    return out


def apart(a: Interval, b: Interval) -> bool:
    """Whether the intervals are disjoint; never, where one has no width (a single seed)."""
    return a.low > b.high or b.low > a.high


def excludes_zero(difference: Interval) -> bool:
    return difference.low > 0 or difference.high < 0
