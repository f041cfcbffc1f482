"""Group-relative advantages (paper Eq. 9), by a group's std. Other divisors: test_objectives.py."""

import statistics

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dapo_jax.dapo.advantage import group_normalize
from dapo_jax.dapo.settings import Advantage


def normalize(rewards, counted=True, **fields):
    counted = np.broadcast_to(np.array(counted, bool), np.shape(rewards))
    return group_normalize(np.array(rewards), Advantage(**fields), counted)


def oracle(rewards, counted, ddof, epsilon):
    """One group, with Python's statistics, which share nothing with the code under test."""
    kept = [r for r, c in zip(rewards, counted, strict=True) if c]
    if len(kept) < 2 or len(set(kept)) == 1:
        return [0.0] * len(rewards)
    std = (statistics.stdev if ddof else statistics.pstdev)(kept)
    mean = statistics.fmean(kept)
    return [
        (r - mean) / (std + epsilon) if c else 0.0 for r, c in zip(rewards, counted, strict=True)
    ]


@given(st.data())
def test_against_python_statistics(data):
    """Group by group: they do not mix. With fewer than two counted responses all are 0."""
    N, G = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 9))
    number = st.integers(-2000, 1000).map(lambda i: i / 1000)
    table = lambda of: st.lists(st.lists(of, min_size=G, max_size=G), min_size=N, max_size=N)
    rewards = data.draw(table(number | st.sampled_from([1.0, -1.0])))
    counted = data.draw(table(st.booleans()))
    ddof, epsilon = data.draw(st.sampled_from([0, 1])), data.draw(st.sampled_from([1e-6, 1e-4]))
    got = normalize(rewards, counted, ddof=ddof, epsilon=epsilon)
    expected = [oracle(r, c, ddof, epsilon) for r, c in zip(rewards, counted, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("value", [1.0, -1.0, 0.1, -1.7312, 1 / 3, 1e6 / 7])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_equal_rewards_is_exactly_zero(value, ddof):
    """The mean of equal numbers can be off by an ulp; 1e-16 / 1e-6 would still be a gradient. With
    epsilon 0 it would be 0/0."""
    for epsilon in (0.0, 1e-6):
        assert not normalize(np.full((2, 13), value), ddof=ddof, epsilon=epsilon).any()
