"""What tests/vectors.py says of a comparison."""

import collections

import numpy as np
import pytest
import vectors


@pytest.fixture
def seen(monkeypatch):
    found = collections.defaultdict(float)
    monkeypatch.setattr(vectors, "_largest", found)
    return lambda: found.popitem()[1]


def test_the_largest_share_of_a_bound_is_told(seen):
    vectors.told([1.0, 2.0, np.inf], [1.0, 2.5, np.inf], [0.0, 1.0, 1.0])
    vectors.told(np.float32(3), 3.5, 2.0)  # a smaller one of the same test
    assert seen() == 0.5
    vectors.told("a", "a", 1.0)
    vectors.told([], [], 1.0)
    assert seen() == 0.0


@pytest.mark.parametrize(
    "got, want, how, share",
    [
        (1.5, 1.0, {"abs": 2.0}, 0.25),
        (1.0 + 5e-7, 1.0, {}, 0.5),
        (np.array([2.0, 4.2]), [2.0, 4.0], {"rel": 0.1}, 0.5),
        (1e-13, 0.0, {"rel": 0.1}, 0.1),
        (3.0, 1.0, {"abs": 1.0}, 2.0),
    ],
)
def test_approx_says_how_much_of_its_bound_was_needed(seen, got, want, how, share):
    near = vectors.Near(want, **how)
    assert (got == near) == (share <= 1) == (got == pytest.approx(want, **how))
    assert seen() == pytest.approx(share, rel=1e-3) and repr(near) == repr(
        pytest.approx(want, **how)
    )


def test_what_has_no_numbers_is_compared_as_ever(seen):
    assert vectors.Near({"a": 1.0}) == {"a": 1.0} and vectors.Near({"a": 1.0}) != {"a": 2.0}
