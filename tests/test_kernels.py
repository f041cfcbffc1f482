"""Counting the bundles of a kernel in what libtpu writes down of it."""

import importlib.util

import pytest

from dapo_jax import plan, presets
from dapo_jax.pods import constants, kernels, slices

WRITTEN = """\
= control target key start
LB: loop body
= control target key end
   0x0   :  { %a = smov 0 }
   0x1 LB: > { %b = sld [smem:0] }
   0x2   : > { %c = sbr.rel }
   0x3   :  {}
   0x4 LB: >> { %d = sld [smem:1] }
   0x5   : >> { %e = sbr.rel }
   0x6   :  {}
   0x7 LB: >>> { %f = vadd }
   0x8 PF: >> { %g = smov 1 }
   0x9 PF: > { %h = smov 2 }
   0xa LB: >> { %i = smov 3 }
   0xb   : > { %j = smov 4 }
   0xc PF:  { %k = smov 5 }
   0xd LB: > { %l = smov 6 }
   0xe   :  { %m = smov 7 }
"""


def test_loops_by_hand():
    """Empty bundles stand in the shadow of a branch and belong to the loop around it."""
    found = kernels.loops(WRITTEN)
    assert found == [(1, 0xB), (2, 5), (3, 1), (2, 1), (1, 1)]
    assert kernels.turns({"attention": found, "flat": found[:1]}) == {"attention": 5, "flat": 11}


def test_report():
    pod, k = slices.parse("v5p-256"), constants.values()
    lines = kernels.report(pod, {"paged_attention.1": 548, "scatter": 2216}, 262144, k)
    assert "0.313 us" in lines[1] and "837 GB/s a core, 30% of the chip's HBM" in lines[1]
    assert "HBM" not in lines[2]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_constants_are_what_this_compiler_makes():
    """Of the shipped 32B sampler's kernel: within a fifth, as other versions schedule otherwise."""
    got = plan.counted(presets.dapo_math("32B"), slices.parse("v5p-256"))
    name = next(x for x in got["turns"] if "attention" in x)
    pages = plan.cost.DESIGN.block_pages
    known = constants.values()[f"bundles.v5p.{pages}"]
    assert got["turns"][name] == pytest.approx(known, rel=0.2)
    assert got["loops"][name] and "of the chip's HBM" in "\n".join(got["text"])
