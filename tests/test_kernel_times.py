"""benchmarks/attention_kernel.py: its times by hand."""

import pytest

from benchmarks import attention_kernel


def test_a_call_of_the_kernel_by_hand():
    """Blocks of 100 bytes at 100 bytes a second, of which the first is asked for at 0."""

    def play(blocks, cycles, ahead, latency):
        work = [(100, cycles * 1e9)] * blocks
        return attention_kernel.call_seconds(work, 0, ahead, latency, 100, 1e9)

    # One ahead, work of 1 s: the third is asked for when the first is done, at 2.5, and there at 4.
    assert play(3, 1, 1, 0.5) == pytest.approx(4 + 1)
    # Work of .1 s: one after the other as the line brings them, the first after the latency.
    assert play(4, 0.1, 1, 0.5) == play(4, 0.1, 3, 0.5) == pytest.approx(0.5 + 4 + 0.1)
    # A latency of 3 s: the third is asked for at 4.1 and there at 8.1, the fourth right behind it.
    assert play(4, 0.1, 1, 3) == pytest.approx(9.1 + 0.1)
    assert play(4, 0.1, 3, 3) == pytest.approx(3 + 4 + 0.1)
