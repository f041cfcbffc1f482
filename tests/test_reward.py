"""Outcome reward and Soft Overlong Punishment (paper Eq. 7 and 13)."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dapo_jax.dapo import reward

PAPER = dict(max_tokens=20480, buffer_tokens=4096, factor=1.0)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (1, 0.0),
        (16383, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
    ],
)
def test_the_papers_lengths(length, penalty):
    """Exact: every value of the ramp is a multiple of 1/4096. A correct response that fills its
    20,480 tokens ends at 0, a wrong one at -2."""
    assert reward.overlong_penalty(np.array([length]), **PAPER)[0] == penalty
    shaped = reward.shaped(np.array([1.0, -1.0]), np.array([length, length]), **PAPER)
    np.testing.assert_array_equal(shaped, [1 + penalty, -1 + penalty])


def test_shape_and_dtype_follow_the_lengths():
    length_NxG = np.arange(12).reshape(3, 4)
    penalty = reward.overlong_penalty(length_NxG, 11, 4, 1.0)
    assert penalty.shape == (3, 4) and penalty.dtype == np.float64
    np.testing.assert_array_equal(penalty[2], [-0.25, -0.5, -0.75, -1.0])
    assert not penalty[:2].any()


def test_factor_scales_the_ramp_and_zero_is_off():
    length = np.array([16384, 18432, 20480])
    half = reward.overlong_penalty(length, 20480, 4096, 0.5)
    np.testing.assert_array_equal(half, [0, -0.25, -0.5])
    assert not reward.overlong_penalty(length, 20480, 4096, 0.0).any()


def test_without_a_buffer_nothing_within_the_limit_is_punished():
    np.testing.assert_array_equal(
        reward.overlong_penalty(np.array([7, 8, 9]), 8, 0, 1.0), [0, 0, -1]
    )


def test_other_outcomes():
    shaped = reward.shaped(
        np.array([[2.0, 0.0]]), np.array([[5, 20]]), max_tokens=20, buffer_tokens=10, factor=0.5
    )  # fmt: skip
    np.testing.assert_array_equal(shaped, [[2.0, -0.5]])


@given(st.integers(1, 100), st.data())
def test_every_length_against_eq_13(limit, data):
    """Python integers on the left of the division: no array arithmetic is shared."""
    buffer = data.draw(st.integers(1, limit))
    for length in range(1, limit + 1):
        safe = limit - buffer
        expected = 0.0 if length <= safe else (safe - length) / buffer
        assert reward.overlong_penalty(np.array(length), limit, buffer, 1.0) == expected
