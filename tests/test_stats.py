"""Intervals over seeds, against scipy's own."""

import numpy as np
import pytest
import scipy.stats

from dapo_jax.lab.experiments import stats


def test_interval_is_scipys():
    values = [0.61, 0.72, 0.55, 0.7, 0.64]
    got = stats.interval(values)
    want = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose((got.low, got.high), want, rtol=1e-12)
    # By hand: the t table has 2.776 at 4 degrees of freedom.
    assert got.half == pytest.approx(2.776 * np.std(values, ddof=1) / 5**0.5, rel=1e-3)


def test_one_value_has_a_mean_and_no_width():
    one = stats.interval([0.5])
    assert one.mean == 0.5 and np.isnan(one.half) and str(one) == "0.500"
    assert not stats.excludes_zero(one)
    assert not stats.apart(one, stats.interval([9.0, 9.0]))


def test_paired_removes_what_the_seeds_share():
    seed = np.array([0.1, 0.5, 0.9, 0.3])
    effect = np.array([0.02, 0.03, 0.02, 0.03])
    gain = stats.paired(seed + effect, seed)
    assert gain.mean == pytest.approx(0.025) and stats.excludes_zero(gain)
    assert gain.half == pytest.approx(scipy.stats.sem(effect) * scipy.stats.t.ppf(0.975, 3))
    assert not stats.apart(stats.interval(seed + effect), stats.interval(seed))
    assert stats.paired(seed, seed + effect).mean == pytest.approx(-0.025)


def test_many_comparisons_are_corrected():
    """Holm by hand: the smallest p against 5% / 4, the next against 5% / 3, until one fails."""
    rng = np.random.default_rng(4)
    changes = [rng.normal(mean, 1.0, 6) for mean in (3.0, 0.0, 1.6, 1.4)]
    found = [scipy.stats.ttest_1samp(x, 0).pvalue for x in changes]
    first, second, third, _ = np.argsort(found)
    assert found[first] < 0.05 / 4 and found[second] < 0.05 / 3 and 0.05 / 2 < found[third] < 0.05
    assert stats.differ(changes) == [i in (first, second) for i in range(4)]
    assert stats.differ([changes[third]]) == [True]  # alone it would do
    assert stats.differ([[0.5], [0.0, 0.0], [0.1, 0.1]]) == [False, False, True]
