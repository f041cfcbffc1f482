"""ScaleRL's sigmoid of score over compute (arXiv 2510.13786), and how well a run determines it.

    R(C) = start + (ceiling - start) / (1 + (midpoint / C) ** exponent)

It is linear in `start` and `ceiling`: least squares, all points of one weight, search the two
others alone. An interval is a likelihood profile: what some curve has whose residual is not
significantly larger than the best one's (F test, 95%). The noise is supposed to be independent
from point to point and equal, as of sampled evaluations; of another seed it says nothing.
"""

from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

FEWEST = 6  # points: four numbers are fitted, and what is left over bounds them
EXPONENTS = (0.2, 20.0)  # searched; ScaleRL's are 1.6 to 2
DECADES = 1.0  # how far beyond the run's compute, at both ends, the midpoint is searched
CELLS = 41  # of the grid that is searched, a side


class Estimate(NamedTuple):
    """A value and its 95% interval: numbers, or arrays of one shape."""

    value: float | np.ndarray
    low: float | np.ndarray
    high: float | np.ndarray

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Curves(NamedTuple):
    """For each of [g] pairs of exponent and midpoint the best curve."""

    exponent: np.ndarray
    midpoint: np.ndarray
    ends: np.ndarray  # [g, 2]: start and ceiling
    cov: np.ndarray  # [g, 2, 2]: theirs, where the noise has variance 1
    rss: np.ndarray  # sum of squared residuals; inf: it does not rise, or is not determined

    def gone(self, compute) -> np.ndarray:
        """Share of the way from start to ceiling at `compute` [...]: [..., g]; 0 at 0."""
        with np.errstate(divide="ignore", over="ignore"):
            return 1 / (1 + (self.midpoint / np.asarray(compute)[..., None]) ** self.exponent)


class Fit(NamedTuple):
    start: Estimate  # score without training
    ceiling: Estimate  # score without end of training
    exponent: Estimate
    midpoint: Estimate  # compute at which half of the way is gone
    sd: float  # of a point around the curve
    best: Curves  # g = 1
    near: Curves  # those that the interval is made of
    limit: float  # the largest rss of these
    most: float

    def curve(self, compute) -> Estimate:
        """The curve at `compute` [...] >= 0. The interval is the curve's: what is measured there
        has its own noise on top."""
        gone = self.best.gone(compute)[..., 0]
        start, ceiling = self.best.ends[0]
        low, high = _extremes(self.near, self.near.gone(compute), self.limit, self.most)
        return Estimate(start + (ceiling - start) * gone, low, high)


def fit(compute, score, *, start: float | None = None, skip=0.0, most=1.0) -> Fit:
    """The curve through `score` [n] at `compute` [n], of any unit: tokens, updates, chip-seconds.

    start: the score without training where it is known, as in the paper, and not to be fitted.
    skip: points of less compute are left out, as the paper does with the first 1,500 GPU-hours, but
    for those at 0, which say `start`. most: the highest score there can be. Points that
    are not finite are left out. ValueError: fewer than `FEWEST`, or no significant rise.
    """
    compute, score = np.asarray(compute, float), np.asarray(score, float)
    if compute.shape != score.shape:
        raise ValueError(f"compute and score have shapes {compute.shape} and {score.shape}")
    used = np.isfinite(compute) & np.isfinite(score)
    used &= (compute > 0) & (compute >= skip) | (compute == 0) & (start is None)
    compute, score = compute[used], score[used]
    if len(compute) < FEWEST:
        raise ValueError(f"{len(compute)} points of score over compute: a curve needs {FEWEST}")
    solve = lambda logs: _solve(compute, score, *np.exp(logs), start, most)
    trained = compute[compute > 0]
    if not len(trained):
        raise ValueError("no score beyond compute 0: no curve to fit")
    ends = trained.min() / 10**DECADES, trained.max() * 10**DECADES
    box = np.log([EXPONENTS, ends])  # [2, 2]: of each the lowest and the highest
    best = _best(solve, box)
    fitted = 3 + (start is None)
    freedom = len(score) - fitted
    flat = np.square(score - (score.mean() if start is None else start)).sum()
    worse = lambda n: 1 + n * stats.f.ppf(0.95, n, freedom) / freedom  # with n numbers fewer
    if best is None or flat <= best.rss[0] * worse(fitted - 1):
        raise ValueError("no significant rise of the score over compute: no curve to fit")
    limit = max(best.rss[0], 1e-20 * flat) * worse(1)  # of exact data rounding is left
    near = _near(solve, box, best, limit)
    at = lambda share: _extremes(near, np.full(len(near.rss), share), limit, most)
    between = lambda one, all_: Estimate(one[0], all_.min(), all_.max())
    return Fit(
        start=Estimate(best.ends[0, 0], *at(0.0)),
        ceiling=Estimate(best.ends[0, 1], *at(1.0)),
        exponent=between(best.exponent, near.exponent),
        midpoint=between(best.midpoint, near.midpoint),
        sd=float(np.sqrt(best.rss[0] / freedom)),
        best=best, near=near, limit=limit, most=most,
    )  # fmt: skip


def _solve(compute, score, exponent, midpoint, start, most) -> Curves:
    """Least squares in start (or with this one) and ceiling (at most `most`) for each pair."""
    g = len(exponent)
    curves = Curves(exponent, midpoint, np.zeros((g, 2)), np.zeros((g, 2, 2)), np.zeros(g))
    gone = curves.gone(compute).T  # [g, n]
    left = 1 - gone
    LL, LG, GG = (left**2).sum(1), (left * gone).sum(1), (gone**2).sum(1)
    Ly, Gy = left @ score, gone @ score
    with np.errstate(divide="ignore", invalid="ignore"):
        if start is None:
            det = LL * GG - LG**2
            ceiling = (LL * Gy - LG * Ly) / det
            cov = np.stack([GG, -LG, -LG, LL], -1).reshape(g, 2, 2) / det[:, None, None]
            determined = det > 1e-9 * LL * GG
        else:
            ceiling = (Gy - start * LG) / GG
            cov = np.zeros((g, 2, 2))
            cov[:, 1, 1] = 1 / GG
            determined = GG > 1e-9
        ceiling = np.minimum(ceiling, most)
        first = np.full(g, start) if start is not None else (Ly - ceiling * LG) / LL
        rss = np.square(score - left * first[:, None] - gone * ceiling[:, None]).sum(1)
    rss = np.where(determined & (ceiling > first), rss, np.inf)
    return curves._replace(ends=np.stack([first, ceiling], -1), cov=cov, rss=rss)


def _grid(box) -> np.ndarray:
    """Points [2, g] of a box [2, 2]."""
    axes = np.meshgrid(*(np.linspace(*side, CELLS) for side in box), indexing="ij")
    return np.reshape(axes, (2, -1))


def _best(solve, box) -> Curves | None:
    """The best of a grid and, from there, of all; None: nothing rises."""
    points = _grid(box)
    rss = solve(points).rss
    first = points[:, rss.argmin()]
    if not np.isfinite(rss.min()):
        return None
    value = lambda logs: min(solve(logs[:, None]).rss[0], 1e300)
    found = optimize.minimize(
        value, first, method="Nelder-Mead", bounds=box,
        options={"xatol": 1e-10, "fatol": np.inf, "maxiter": 2000},
    )  # fmt: skip
    return solve(found.x[:, None])


def _near(solve, widest, best: Curves, limit: float) -> Curves:
    """`best`, and of a grid no larger than need be the curves whose rss is at most `limit`."""
    box, centre = widest, np.log([best.exponent, best.midpoint])
    for _ in range(16):
        points = _grid(box)
        found = solve(points)
        inside = found.rss <= limit
        held = np.concatenate([points[:, inside], centre], 1)
        margin = 2 * np.diff(box)[:, 0] / (CELLS - 1)
        low, high = held.min(1) - margin, held.max(1) + margin
        old, box = box, np.clip(np.stack([low, high], 1), widest[:, :1], widest[:, 1:])
        if np.allclose(box, old, rtol=0, atol=0.5 * margin.min()):
            break
    return Curves(*(np.concatenate([a, b[inside]]) for a, b in zip(best, found, strict=True)))


def _extremes(near: Curves, gone, limit: float, most: float) -> tuple:
    """Least and largest score [...] of curves of which `gone` [..., g] of the way is gone. Each
    pair of exponent and midpoint allows an ellipse of starts and ceilings."""
    to = np.stack([1 - gone, gone], -1)
    middle = np.einsum("...gi,gi->...g", to, near.ends)
    variance = np.einsum("...gi,gij,...gj->...g", to, near.cov, to)
    half = np.sqrt(np.maximum((limit - near.rss) * variance, 0))
    return (middle - half).min(-1), np.minimum(middle + half, most).max(-1)
