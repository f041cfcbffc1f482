"""What tests/vectors.py says of a comparison."""

import collections

import numpy as np
import pytest
import vectors


@pytest.fixture
def seen(monkeypatch):
    found = collections.defaultdict(float)
    monkeypatch.setattr(vectors, "_largest", found)
    return found.values


def test_the_largest_share_of_a_bound_is_told(seen):
    vectors.told([1.0, 2.0, np.inf], [1.0, 2.0005, np.inf], [0.0, 1e-3, 1e-3])
    vectors.told(np.float32(3), 3.0005, 2e-3)  # a smaller one of the same test
    assert [*seen()] == [pytest.approx(0.5)]


@pytest.mark.parametrize("got, want, allowed", [("a", "a", 1.0), ([], [], 0.0), (1.5, 1.0, 2e-3)])
def test_what_is_no_rounding_is_not_told(seen, got, want, allowed):
    vectors.told(got, want, allowed)
    assert not seen()


@pytest.mark.parametrize(
    "got, want, how, share",
    [
        (1.00025, 1.0, {"abs": 1e-3}, 0.25),
        (1.0 + 5e-7, 1.0, {}, 0.5),
        (np.array([2.0, 4.002]), [2.0, 4.0], {"rel": 1e-3}, 0.5),
        (1.002, 1.0, {"rel": 1e-6, "abs": 1e-3}, 2.0),
    ],
)
def test_approx_says_how_much_of_its_bound_was_needed(seen, got, want, how, share):
    near = vectors.Near(want, **how)
    assert (got == near) == (share <= 1) == (got == pytest.approx(want, **how))
    assert [*seen()] == [pytest.approx(share, rel=1e-3)]
    assert repr(near) == repr(pytest.approx(want, **how))


def test_what_has_no_numbers_is_compared_as_ever(seen):
    near = vectors.Near({"a": 1.0})
    assert near == {"a": 1.0} and near != {"a": 2.0} and not seen()
