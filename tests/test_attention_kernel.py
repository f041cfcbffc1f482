"""benchmarks/attention_kernel.py: bundles by loop, and a call played through them by hand."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "benchmarks" / "attention_kernel.py"
spec = importlib.util.spec_from_file_location("attention_kernel", FILE)
attention_kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(attention_kernel)
Loop = attention_kernel.Loop

# As libtpu prints: a bundle a line, the depth of loops as >, waits for branches without one.
DUMP = """\
LB: loop body
   0x0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sld [smem:[#a]] }
   0x2   : > { %3 = sbr.rel target = $region9 }
   0x3   :  {}
   0x4 LB: >> { %s4 = smov 0 }
   0x5   :  {}
   0x6   : > { %s5 = smov 0 /* of the inner loop, printed as if outside */ }
   0x7   : >> { %s6 = smov 0 }
   0x8 LB: >> { %s7 = smov 0 }
   0x9   : > { %s8 = smov 0 }
   0xa PF:  { %s9 = smov 0 }
"""


def test_bundles_of_loops():
    assert attention_kernel.loops(DUMP) == Loop(2, [Loop(5, [Loop(3, []), Loop(1, [])])])


def test_a_call_by_hand():
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
