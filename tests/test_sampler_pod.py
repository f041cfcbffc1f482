"""The sampler of the 32B model, compiled for TPU pods: what it holds and what it moves."""

import importlib.util
import re

import pytest

from dapo_jax import config, topology
from dapo_jax.model import paged, qwen2
from dapo_jax.rollout.engine import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'"
    ),
]

QWEN_32B = qwen2.Shape(
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=27648,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_eps=1e-6,
    tie_embeddings=False,
    scan_layers=True,
)
SIZE = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "call"}


def loop_bodies(hlo: str) -> dict[str, list[str]]:
    """Computations that run inside a loop: name -> its instructions, fused ones left out."""
    computations, name = {}, None
    for line in hlo.splitlines():
        if found := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = found[1]
            computations[name] = []
        elif name and " = " in line:
            computations[name].append(line.strip())
    inside, todo = set(), re.findall(r"body=%?([\w.\-]+)", hlo)
    while todo:
        body = todo.pop()
        if body not in inside:
            inside.add(body)
            for line in computations[body]:
                if " fusion(" not in line:
                    todo += re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line)
    return {name: computations[name] for name in inside}


def instructions(lines):
    """(bytes of the largest array, operation, line)."""
    for line in lines:
        kind = re.match(r"(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line)
        arrays = re.findall(r"(bf16|f32|s32|u32|pred)\[([\d,]*)\]", kind[1]) if kind else []
        for dtype, dims in arrays:
            size = SIZE[dtype]
            for n in filter(None, dims.split(",")):
                size *= int(n)
            yield size, kind[2], line


@pytest.mark.parametrize(("pod", "mesh"), [("v5p:4x4x8", (16, 8)), ("v6e:16x16", (32, 8))])
def test_the_32b_sampler_works_in_place(pod, mesh):
    """1,024 slots of 2,048 + 20,480 tokens. XLA's temporary size alone would not show a layer that
    is cut out of the pool and put back, so the loops' instructions are read too."""
    mesh = topology.make_mesh(pod, dict(data=1, fsdp=mesh[0], tensor=mesh[1]))
    engine = Engine(
        QWEN_32B,
        mesh,
        config.base().sharding.decode,
        slots=1024,
        prompt_tokens=2048,
        response_tokens=20480,
        chunk=128,
        prefill_prompts=64,
        stop_ids=(151643, 151645),
        dtype="bfloat16",
    )
    pool = paged.pool_bytes(engine.geometry, "bfloat16") // mesh.size
    layer = pool // 2 // QWEN_32B.num_layers  # keys or values of one
    calls = engine.calls(qwen2.abstract(QWEN_32B))
    for name in ("decode_full", "prefill"):
        program, arguments = calls[name]
        compiled, log = topology.compile_watched(program.trace(*arguments).lower())
        assert "Involuntary full rematerialization" not in log
        memory = topology.memory(compiled)
        assert memory.aliased == pool
        assert memory.temporaries <= 0.02 * pool
        assert memory.peak <= topology.limit(mesh)

        bodies = loop_bodies(compiled.as_text())
        assert bodies
        seen_writes = 0
        for size, operation, line in instructions(x for b in bodies.values() for x in b):
            if operation.startswith("all-gather"):
                assert size < 1e6, line  # (largest, index) pairs and such, never weights
            if operation not in FREE and size >= layer:
                assert operation == "fusion" and "scatter" in line, line
                seen_writes += 1
        assert seen_writes == 2  # keys and values, scattered into the whole pool in its place
