"""What all figures share: panels, colors, lines over runs and bands over seeds.

Figures are matplotlib's `Figure`, without pyplot: no display, no global state.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.ndimage import uniform_filter1d

from dapo_jax.lab.experiments import stats

# Okabe and Ito's, which color-blind readers can tell apart too; black is kept for text.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B0A000")
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


def panels(
    rows: int, columns: int, width: float = 4.6, height: float = 3.5, ratios=None
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels in reading order. width, height: inches per panel; ratios: relative
    widths of the columns."""
    figure = Figure((width * columns, height * rows), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=ratios).ravel()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.set_axisbelow(True)
        ax.set_prop_cycle(color=COLORS)
    return figure, list(axes)


def over_seeds(
    ax: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], label: str, color: str,
    even: bool = False, **style,
) -> None:  # fmt: skip
    """The mean over seeds and its 95% interval, where all seeds have values. curves: (x [n], values
    [n]) of each seed, brought to one grid by straight lines: the first one's x or, for seeds that
    have no two points at the same place, an `even` one. More than 30 points are smoothed over 5.
    style: of the line."""
    curves = [c for c in curves if len(c[0])]
    if not curves:
        return
    first = curves[0][0]
    grid = np.linspace(0, first[-1], 60) if even and len(curves) > 1 else first
    grid = grid[grid >= max(at[0] for at, _ in curves)]
    grid = grid[grid <= min(at[-1] for at, _ in curves)]
    values = [np.interp(grid, at, smooth(v, 5 if len(v) > 30 else 1)) for at, v in curves]
    band(ax, grid, values, label, color, **style)


def band(
    ax: Axes, x: Sequence[float], curves, label: str, color: str | None = None, fewest=2, **style
) -> None:
    """The mean over seeds of `curves` [seeds, n] at `x` [n], and its 95% t-interval where there are
    `fewest` seeds or more."""
    found = [stats.interval(column) for column in np.transpose(curves)]
    (line,) = ax.plot(x, [p.mean for p in found], color=color, label=label, linewidth=1.6, **style)
    if len(curves) >= fewest:
        low, high = [p.low for p in found], [p.high for p in found]
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """The mean of the `window` (odd) values around each, of fewer at the ends. NaN is left out of
    the means and stays NaN."""
    values = np.asarray(values, float)
    there, size = np.isfinite(values), 2 * (window // 2) + 1
    mean = lambda x: uniform_filter1d(x, size, mode="constant")
    weight = np.maximum(mean(there.astype(float)), 1 / size)
    return np.where(there, mean(np.where(there, values, 0.0)) / weight, np.nan)
