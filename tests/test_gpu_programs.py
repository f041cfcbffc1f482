"""Programs for GPUs, without one: lowered for CUDA, over devices of which the platform is known."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dapo_jax import config, parallel, plan
from dapo_jax.model import qwen2
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.settings import Rollout

SHAPE = plan.qwen2_5("0.5B", scan_layers=True)._replace(num_layers=3)
RULES = config.base().sharding


class Device:
    """A GPU that is not there; jax asks a CPU's client about all else."""

    platform, device_kind, process_index = "gpu", "described", 0

    def __init__(self, number: int):
        self.id = number

    def __getattr__(self, name):
        return getattr(jax.devices("cpu")[0], name)


def mesh_of_gpus(*sizes: int) -> Mesh:
    devices = [Device(i) for i in range(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), parallel.AXES)


def lowered(call: parallel.Call) -> str:
    """StableHLO, the kernels of Pallas inside as calls with their grids."""
    return call.program.trace(*call.arguments).lower(lowering_platforms=("cuda",)).as_text()


@functools.cache
def engine(sizes, slots, **how) -> Engine:
    lengths = dict(prompt_tokens=256, response_tokens=20_000, stop_ids=(1, 2), dtype="bfloat16")
    rollout = Rollout(slots=slots, chunk=64, cache_fraction=0.1, **how)
    return Engine(SHAPE, mesh_of_gpus(*sizes), RULES.decode.to_dict(), rollout, **lengths)


def decode(sizes, slots, name="full", **how) -> str:
    return lowered(engine(sizes, slots, **how).calls(qwen2.abstract(SHAPE)).decode[name])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
def test_a_token_copies_no_weights_and_waits_for_no_host(sizes):
    """The only loops are of 8 tokens and of a chunk: each layer has a kernel call of its own, and
    nothing is cut out of a stack of weights, by a place that is known while it runs."""
    text = decode(sizes, 256)
    assert text.count("xla.gpu.triton") == SHAPE.num_layers
    assert "dynamic_slice" not in text and "dynamic_update_slice" not in text
    assert not re.findall("callback|infeed|outfeed|stablehlo.send|stablehlo.recv", text)
    assert text.count("stablehlo.while") == 2


def grids(text: str) -> set[tuple[int, ...]]:
    found = re.findall(r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+)", text)
    return {tuple(map(int, grid)) for grid in found}


def test_programs_of_few_rows_share_the_pages_of_a_row():
    """Of 0.5B's two heads: a program a row and head of 256 or 128 rows, 2 of 64, 8 of 16."""
    assert engine((1, 1, 1), 256).rungs == (128, 64, 16)
    of = lambda name: grids(decode((1, 1, 1), 256, name))
    assert of("full") == {(256, 2, 1)}
    assert of("full, 64 slots") == {(64, 2, 2)}
    assert of("full, 16 slots") == {(16, 2, 8)}


def test_guesses_are_looked_at_after_each_token():
    """A program in which a row's limit is the next token would draw seven more for nothing."""
    text = decode((1, 1, 1), 16, draft_tokens=4, draft_places=16)
    assert text.count("stablehlo.while") == 1
