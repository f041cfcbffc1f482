"""Outcome reward and Soft Overlong Punishment (paper Eq. 7 and 13)."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dapo_jax.dapo import reward
from dapo_jax.reward.settings import Reward


def test_the_papers_lengths():
    """Exact: every value of the ramp is a multiple of 1/4096. A correct response that fills its
    20,480 tokens ends at 0, a wrong one at -2."""
    settings = Reward(overlong_buffer_tokens=4096, overlong_penalty=1.0)
    length = np.array([1, 16383, 16384, 16385, 17408, 18432, 20479, 20480])
    penalty = np.array([0, 0, 0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1])
    for score in (1.0, -1.0):
        shaped = reward.shaped(np.full(8, score), length, 20480, settings)
        np.testing.assert_array_equal(shaped, score + penalty)


@pytest.mark.parametrize(
    ("length", "limit", "buffer", "factor", "penalty"),
    [
        ([[0, 7], [8, 9], [10, 11]], 11, 4, 1.0, [[0, 0], [-0.25, -0.5], [-0.75, -1]]),
        ([16384, 18432, 20480], 20480, 4096, 0.5, [0, -0.25, -0.5]),
        ([5, 20], 20, 10, 0.0, [0, 0]),  # off
        ([7, 8, 9], 8, 0, 1.0, [0, 0, -1]),  # no buffer: nothing within the limit is punished
    ],
)
def test_penalties_by_limit_buffer_and_factor(length, limit, buffer, factor, penalty):
    got = reward.overlong_penalty(np.array(length), limit, buffer, factor)
    assert got.dtype == np.float64 and got.tolist() == penalty


@given(st.integers(1, 100), st.data())
def test_every_length_against_eq_13(limit, data):
    """Python integers on the left of the division: no array arithmetic is shared."""
    buffer = data.draw(st.integers(1, limit))
    for length in range(1, limit + 1):
        safe = limit - buffer
        expected = 0.0 if length <= safe else (safe - length) / buffer
        assert reward.overlong_penalty(np.array(length), limit, buffer, 1.0) == expected
