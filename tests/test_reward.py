"""Outcome reward and Soft Overlong Punishment (paper Eq. 7 and 13)."""

import numpy as np
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


@given(st.integers(1, 100), st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_every_length_against_eq_13(limit, factor, data):
    """Python integers on the left of the division: no array arithmetic is shared. Without a buffer
    only what is longer than the limit is punished."""
    lengths = range(limit + 2)
    for buffer in (0, 1, data.draw(st.integers(1, limit)), limit):
        safe = limit - buffer
        expected = [0 if n <= safe else (safe - n) / (buffer or 1) * factor for n in lengths]
        got = reward.overlong_penalty(np.array(lengths), limit, buffer, factor)
        assert got.dtype == np.float64 and got.tolist() == expected
