"""The sampler of the 32B model, compiled for TPU pods: what it holds and what it moves."""

import re

import pytest
from levels import needs_libtpu

from dapo_jax import config, plan
from dapo_jax.model import paged, qwen2
from dapo_jax.plan import hlo
from dapo_jax.pods import topology
from dapo_jax.pods.slices import CHIPS
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.settings import Rollout

pytestmark = [pytest.mark.slow, needs_libtpu]
QWEN_32B = plan.published("Qwen/Qwen2.5-32B", scan_layers=True)
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "call"}


@pytest.mark.parametrize(
    ("pod", "mesh", "cache"),
    [
        pytest.param("v5p:4x4x8", (16, 8), "model", marks=pytest.mark.nightly),  # CI: newest jax
        pytest.param("v6e:16x16", (32, 8), "model", marks=pytest.mark.nightly),
        ("v5p:4x4x8", (16, 8), "int8"),
    ],
)
def test_the_32b_sampler_works_in_place(pod, mesh, cache):
    """1,024 slots of 2,048 + 20,480 tokens. XLA's temporary size alone would not show a layer that
    is cut out of the pool and put back, so the loops' instructions are read too."""
    mesh = topology.laid(topology.devices(pod), dict(data=1, fsdp=mesh[0], tensor=mesh[1]))
    rollout = Rollout(slots=1024, chunk=128, prefill_prompts=64, cache_dtype=cache)
    how = dict(prompt_tokens=2048, response_tokens=20480, stop_ids=(151643, 151645))
    rules = config.base().sharding.decode.to_dict()
    engine = Engine(QWEN_32B, mesh, rules, rollout, dtype="bfloat16", **how)
    assert engine.geometry.cores == (2 if pod.startswith("v5p") else 1)
    pool = paged.pool_bytes(engine.geometry, "bfloat16") // mesh.size
    arrays = len(engine.geometry.pages_axes)
    layer = pool // 2 // QWEN_32B.num_layers  # keys or values of one
    calls = engine.calls(qwen2.abstract(QWEN_32B))
    for name, call in (("decode", calls.decode["full"]), ("prefill", calls.prefill)):
        compiled, log = topology.compile_watched(call.program.trace(*call.arguments).lower())
        assert "Involuntary full rematerialization" not in log
        memory = topology.memory(compiled)
        assert memory.aliased == pool
        # Weights in the layouts that their products want, q's and the head's; no part of the pool.
        assert memory.temporaries <= 0.9e9
        assert memory.peak <= CHIPS[pod.split(":")[0]].hbm

        bodies = hlo.in_loops(compiled.as_text())
        assert bodies
        writes = []
        for size, operation, line in hlo.instructions(x for _, b in bodies for x in b):
            if operation.startswith("all-gather"):
                assert size < 1e6, line  # (largest, index) pairs and such, never weights
            if operation not in FREE and size >= layer:
                writes.append("scatter" if operation == "fusion" and "scatter" in line else line)
        assert len(writes) == arrays
        if name == "decode":  # 8 tokens, then the one number that tells whether all rows have ended
            reduced = [(turns, x) for turns, body in bodies for x in body if " all-reduce(" in x]
            asked = [turns for turns, x in reduced if re.search(r" = \w+\[\]\S* all-reduce\(", x)]
            assert asked == [1] and sorted({turns for turns, _ in reduced}) == [1, 8, 512]
        if name == "prefill":  # keys and values, scattered into the whole pool in its place
            assert writes == ["scatter"] * arrays
        else:
            assert len(set(writes)) == 1 and " custom-call(" in writes[0], writes
            assert "decode_attention" in writes[0] and "output_to_operand_aliasing" in writes[0]
