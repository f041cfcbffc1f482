"""benchmarks/kv_traffic.py and attention_kernel.py: their counts by hand."""

import numpy as np
import pytest

from benchmarks import attention_kernel, kv_traffic

SIZES = kv_traffic.Sizes(
    slots=2, shards=1, chunk=4, prompt=3, room=3, group=1, cap=13, page_tokens=2, bucket=6
)


def test_counts_by_hand():
    """Two slots, responses of 3 and 5 tokens after 2 cached ones: reads 3 4 5 and 3 4 5 6 7."""
    got = kv_traffic.simulate(np.array([3, 5]), SIZES)  # pages of 2 tokens
    ideal = 3 + 4 + 5 + 3 + 4 + 5 + 6 + 7
    assert got["steps"] == 5 and got["occupancy"] == 8 / 10 and got["evicted"] == 0
    assert got["paged"] * ideal == pytest.approx((4 + 4 + 6) + (4 + 4 + 6 + 6 + 8))
    assert got["bucketed"] * ideal == pytest.approx(2 * (6 + 6 + 6 + 6 + 12))
    assert got["dense"] * ideal == pytest.approx(2 * 16 * 5)


def test_a_call_of_the_kernel_by_hand():
    """Blocks of 100 bytes at 100 bytes a second, of which the first is asked for at 0."""

    def play(blocks, cycles, ahead, latency):
        cycles *= attention_kernel.CLOCK
        return attention_kernel.call_seconds([(100, cycles)] * blocks, 0, ahead, latency, 100)

    # One ahead, work of 1 s: the third is asked for when the first is done, at 2.5, and there at 4.
    assert play(3, 1, 1, 0.5) == pytest.approx(4 + 1)
    # Work of .1 s: one after the other as the line brings them, the first after the latency.
    assert play(4, 0.1, 1, 0.5) == play(4, 0.1, 3, 0.5) == pytest.approx(0.5 + 4 + 0.1)
    # A latency of 3 s: the third is asked for at 4.1 and there at 8.1, the fourth right behind it.
    assert play(4, 0.1, 1, 3) == pytest.approx(9.1 + 0.1)
    assert play(4, 0.1, 3, 3) == pytest.approx(3 + 4 + 0.1)
