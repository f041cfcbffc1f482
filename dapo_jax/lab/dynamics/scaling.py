"""ScaleRL's sigmoid of score over compute (arXiv 2510.13786), and how well a run determines it.

    R(C) = start + (ceiling - start) / (1 + (midpoint / C) ** exponent)

Least squares, all points of one weight. A 95% interval is the t-interval that the curvature of the
squares at the best curve gives (`scipy.optimize.curve_fit`), exponent and midpoint on a log scale.
The noise is supposed to be independent from point to point and equal, as of sampled evaluations; of
another seed it says nothing.
"""

from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

FEWEST = 6  # points: four numbers are fitted, and what is left over bounds them
MOST = 1.0  # the highest score there can be
EXPONENTS = (0.2, 20.0)  # searched; ScaleRL's are 1.6 to 2
BEYOND = 10.0  # the midpoint is searched that many times beyond the run's compute, at both ends


class Estimate(NamedTuple):
    """A value and its 95% interval: numbers, or arrays of one shape."""

    value: float | np.ndarray
    low: float | np.ndarray
    high: float | np.ndarray

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Fit(NamedTuple):
    start: Estimate  # score without training
    ceiling: Estimate  # score without end of training
    exponent: Estimate
    midpoint: Estimate  # compute at which half of the way is gone
    best: np.ndarray  # start, ceiling, log exponent, log midpoint
    cov: np.ndarray  # [4, 4]: theirs
    quantile: float  # standard deviations in half an interval

    def curve(self, compute) -> Estimate:
        """The curve at `compute` [...] >= 0. The interval is the curve's: what is measured there
        has its own noise on top."""
        compute = np.asarray(compute, float)
        value, step = sigmoid(compute, *self.best), 1e-6
        moved = [
            sigmoid(compute, *(self.best + e)) - sigmoid(compute, *(self.best - e))
            for e in step * np.eye(4)
        ]
        slope = np.stack(moved, -1) / (2 * step)
        half = self.quantile * np.sqrt(np.einsum("...i,ij,...j->...", slope, self.cov, slope))
        return Estimate(value, value - half, np.minimum(value + half, MOST))


def sigmoid(compute, start, ceiling, log_exponent, log_midpoint):
    with np.errstate(divide="ignore", over="ignore"):
        to_go = (np.exp(log_midpoint) / np.asarray(compute, float)) ** np.exp(log_exponent)
        return start + (ceiling - start) / (1 + to_go)


def fit(compute, score, *, skip: float = 0.0) -> Fit:
    """The curve through `score` [n] at `compute` [n], of any unit: tokens, updates, chip-seconds.

    skip: points of less compute are left out, as the paper does with the first 1,500 GPU-hours, but
    for those at 0, which say `start`. Points that are not finite are left out. ValueError: fewer
    than `FEWEST`, or no significant rise.
    """
    compute, score = np.asarray(compute, float), np.asarray(score, float)
    used = np.isfinite(compute) & np.isfinite(score) & ((compute == 0) | (compute >= skip))
    compute, score = compute[used], score[used]
    if len(compute) < FEWEST:
        raise ValueError(f"{len(compute)} points of score over compute: a curve needs {FEWEST}")
    trained = compute[compute > 0]
    if not len(trained):
        raise ValueError("no score beyond compute 0: no curve to fit")
    lowest = -np.inf, -np.inf, np.log(EXPONENTS[0]), np.log(trained.min() / BEYOND)
    highest = np.inf, MOST, np.log(EXPONENTS[1]), np.log(trained.max() * BEYOND)
    first = score.min(), min(score.max(), MOST - 1e-6), np.log(2), np.log(np.median(trained))
    best, cov = optimize.curve_fit(
        sigmoid, compute, score, first, bounds=(lowest, highest), max_nfev=5000,
        x_scale="jac", ftol=1e-12, xtol=1e-12, gtol=1e-12,
    )  # fmt: skip
    freedom = len(score) - len(best)
    squares = np.square(score - sigmoid(compute, *best)).sum()
    flat = np.square(score - score.mean()).sum()
    if best[1] <= best[0] or flat <= squares * (1 + 3 * stats.f.ppf(0.95, 3, freedom) / freedom):
        raise ValueError("no significant rise of the score over compute: no curve to fit")
    quantile = stats.t.ppf(0.975, freedom)
    half = quantile * np.sqrt(np.diag(cov))
    ends = np.stack([best, best - half, best + half])
    ends[2, 1] = min(ends[2, 1], MOST)
    ends[:, 2:] = np.exp(ends[:, 2:])
    return Fit(*[Estimate(*map(float, column)) for column in ends.T], best, cov, float(quantile))
