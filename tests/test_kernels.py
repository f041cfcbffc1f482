"""Counting the bundles of the decode kernel in what libtpu writes down of it."""

import pathlib
import sys

import pytest
from levels import needs_libtpu

from dapo_jax.config import presets
from dapo_jax.plan import kernels
from dapo_jax.plan.constants import VALUES
from dapo_jax.plan.kernels import Loop
from dapo_jax.pods import slices

# As libtpu prints: a bundle a line, the depth of loops as >, waits for branches without one.
DUMP = (pathlib.Path(__file__).parent / "data" / "bundles.txt").read_text()


def test_bundles_of_loops_and_their_parts():
    assert kernels.loops(DUMP) == Loop(2, [Loop(5, [Loop(3, []), Loop(1, [])])])
    leaf = lambda n: Loop(n, [])
    row = Loop(400, [Loop(300, [leaf(20)]), leaf(21), leaf(5)])
    found = kernels.parts(Loop(100, [Loop(50, [leaf(21)]), row, leaf(4)]))
    assert found == (150, 300, 400, 26) and found.beside == 400 + 4.5 * 26 - 300
    # Of several queries: its last blocks are a loop of the row.
    tail = Loop(500, [leaf(21), leaf(5)])
    several = Loop(100, [Loop(50, [leaf(21)]), Loop(200, [Loop(350, [leaf(20)]), tail]), leaf(4)])
    assert kernels.parts(several) == (150, 350, 700, 26)
    with pytest.raises(ValueError):  # not this kernel
        kernels.parts(kernels.loops(DUMP))


def test_a_process_that_fails_is_told_by_its_last_lines():
    with pytest.raises(ValueError, match="no such chip"):
        kernels.dumped([sys.executable, "-c", "raise SystemExit('no such chip')"])


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("pod", "cache"), [("v5p-256", "ours"), ("v6e-128", "ours"), ("v5p-256", "ours.int8")]
)
def test_the_constants_are_what_this_compiler_makes(pod, cache):
    """The shipped 32B sampler's kernel: within a fifth, as other versions schedule otherwise."""
    c = presets.dapo_math("32B")
    if cache == "ours.int8":
        c.rollout.cache_dtype, c.loss.importance_cap = "int8", 2.0
    got = kernels.counted(c, slices.parse(pod))
    found = kernels.Parts(**got["bundles"])
    for part in ("start", "block", "beside"):
        counted = VALUES[f"{cache}.{part}.{pod.split('-')[0]}"]
        assert getattr(found, part) == pytest.approx(counted, rel=0.2), part
    assert "of the chip's HBM" in "\n".join(got["text"])
