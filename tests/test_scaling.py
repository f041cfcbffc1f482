"""The sigmoid of score over compute: ScaleRL's published curves come back, and intervals hold what
they promise."""

import numpy as np
import pytest

from dapo_jax.lab.dynamics import plots, scaling
from dapo_jax.lab.dynamics.logs import Run

# ScaleRL's three runs (arXiv 2510.13786): ceiling, exponent, midpoint, in GPU-hours.
HOURS = [500.0, 1500.0, 2542.0, 8000.0, 50000.0, 100000.0]
PUBLISHED = {"8B, 14k": (0.61, 1.92, 2542.0), "8B, 32k": (0.645, 1.89, 11272.0)}
PUBLISHED |= {"17Bx16": (0.71, 1.65, 4242.0)}
TRUE = 0.25, 0.61, 1.92, 2e4  # start, ceiling, exponent, midpoint of what follows


def oracle(compute, start, ceiling, exponent, midpoint):
    share = [1 / (1 + (midpoint / x) ** exponent) if x else 0.0 for x in np.asarray(compute)]
    return np.array([start + (ceiling - start) * s for s in share])


def noisy(seed, end=1e5, n=21, sd=0.01):
    compute = np.linspace(0, end, n)
    return compute, oracle(compute, *TRUE) + np.random.default_rng(seed).normal(0, sd, n)


@pytest.mark.parametrize("run", PUBLISHED)
def test_the_published_curves_come_back(run):
    score = oracle(HOURS, 0.25, *PUBLISHED[run])
    got = scaling.fit(HOURS, score)
    for estimate, want in zip(got[:4], (0.25, *PUBLISHED[run]), strict=True):
        assert estimate == pytest.approx((want,) * 3, rel=1e-5)
    np.testing.assert_allclose(got.curve(HOURS).value, score, atol=1e-8)
    np.testing.assert_allclose(got.curve([0.0, 1e9]).value, [0.25, PUBLISHED[run][0]], atol=1e-6)


def test_the_unit_of_compute_changes_the_midpoint_alone():
    compute, score = noisy(0)
    got, scaled = (np.array(scaling.fit(compute * unit, score)[:4]) for unit in (1, 1e-6))
    scaled[3] *= 1e6
    np.testing.assert_allclose(scaled, got, rtol=1e-5)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """At least 90 of 100 do: of the four numbers, of the curve within and beyond what was measured,
    and of its end as the first third foretells it."""
    beyond = [7e4, 3e5]
    want = [*TRUE, *oracle([*beyond, 1e5], *TRUE)]
    held, width = np.zeros(7), []
    for seed in range(100):
        got = scaling.fit(*noisy(seed))
        compute, score = (values[:11] for values in noisy(seed, n=31))
        end, curve = scaling.fit(compute, score).curve(1e5), got.curve(beyond)
        low = [*(x.low for x in got[:4]), *curve.low, end.low]
        high = [*(x.high for x in got[:4]), *curve.high, end.high]
        held += (np.array(low) <= want) & (want <= np.array(high))
        width.append(end.high - end.low)
        assert got.ceiling.low < got.ceiling.value < got.ceiling.high < 0.7
    assert held.min() >= 90, held
    assert np.median(width) < 0.4  # and says something: without it anything from .43 to 1


def test_a_ceiling_lies_at_most_at_the_best_score():
    """A run that still climbs at its end does not say where to."""
    compute, score = noisy(0, end=1.5e4)
    got = scaling.fit(compute, score)
    assert got.ceiling.high == pytest.approx(1.0) and got.ceiling.value <= 1.0
    assert got.curve([1e6, 1e9]).high.max() <= 1.0


def test_what_is_left_out():
    compute, score = noisy(0)
    early = (compute > 0) & (compute < 2e4)
    wrong = np.where(early, 0.9, score)
    kept = scaling.fit(compute[~early], score[~early])
    assert scaling.fit(compute, wrong, skip=2e4)[:4] == kept[:4]
    holes = np.append(compute, 3e4), np.append(score, np.nan)
    assert scaling.fit(*holes)[:4] == scaling.fit(compute, score)[:4]


@pytest.mark.parametrize(
    "compute, score, words",
    [
        (np.arange(5), np.arange(5) / 5, "^5 points of score over compute: a curve needs 6$"),
        ([], [], "^0 points"),
        (np.arange(20), np.linspace(0.9, 0.1, 20), "^no significant rise"),
        (np.arange(20), np.random.default_rng(0).random(20), "^no significant rise"),
        (np.zeros(20), np.random.default_rng(0).random(20), "^no score beyond compute 0"),
    ],
)
def test_no_curve_where_there_is_none(compute, score, words):
    with pytest.raises(ValueError, match=words):
        scaling.fit(compute, score)


def drawn(n):
    (compute, score), steps = noisy(0, n=n), np.arange(n)
    logged = {"spent/tokens": (steps[1:], compute[1:]), "eval/heldout/avg@k": (steps, score)}
    (ax,) = plots.scaling([Run("a", logged)]).axes
    return ax


def test_the_figure_draws_both_curves_or_says_why_there_is_none():
    ax, (compute, score) = drawn(31), noisy(0, n=31)
    dots, whole, early = ax.lines
    np.testing.assert_allclose(dots.get_data(), [compute, score])
    for line, n in ((whole, 31), (early, 11)):
        got = scaling.fit(compute[:n], score[:n])
        np.testing.assert_allclose(line.get_ydata(), got.curve(line.get_xdata()).value)
    assert len(ax.collections) == 2 and early.get_linestyle() == "--"
    words = [t.get_text() for t in drawn(8).get_legend().get_texts()]
    why = "a, first 33%: 3 points of score over compute: a curve needs 6"
    assert "ceiling" in words[0] and words[1] == why
