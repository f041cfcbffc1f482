"""Programs for GPUs, without one: lowered for CUDA, over devices of which the platform is known."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.triton import pallas_call_registration as triton_call
from jax.sharding import Mesh
from levels import slow
from test_attention_kernels import CUDNN

from benchmarks import gpu_roofline
from dapo_jax import config, parallel, plan
from dapo_jax.dapo import update
from dapo_jax.model import learner, packed_triton, paged, paged_triton, qwen2
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.settings import Rollout

SHAPE = plan.published("Qwen/Qwen2.5-0.5B", scan_layers=True)._replace(num_layers=3)
RULES = config.base().sharding


class Device:
    """A GPU that is not there; jax asks a CPU's client about all else."""

    platform, device_kind, process_index = "gpu", "NVIDIA H100 80GB HBM3", 0

    def __init__(self, number: int):
        self.id = number

    def __getattr__(self, name):
        return getattr(jax.devices("cpu")[0], name)


def mesh_of_gpus(*sizes: int) -> Mesh:
    devices = [Device(i) for i in range(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), parallel.AXES)


def lowered(call: parallel.Call, mesh: Mesh | None = None) -> str:
    """StableHLO, the kernels of Pallas inside as calls with their grids."""
    mesh = mesh or mesh_of_gpus(1, 1, 1)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # jax 0.12 asks what GPU it is
        traced = call.program.trace(*call.arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@functools.cache
def engine(sizes, slots, **how) -> Engine:
    lengths = dict(prompt_tokens=256, response_tokens=20_000, stop_ids=(1, 2), dtype="bfloat16")
    rollout = Rollout(slots=slots, chunk=64, cache_fraction=0.1, **how)
    return Engine(SHAPE, mesh_of_gpus(*sizes), RULES.decode.to_dict(), rollout, **lengths)


def decode(sizes, slots, name="full", **how) -> str:
    made = engine(sizes, slots, **how)
    return lowered(made.calls(qwen2.abstract(SHAPE)).decode[name], made.mesh)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
def test_a_token_copies_no_weights_and_waits_for_no_host(sizes):
    """The only loops are of 8 tokens and of a chunk: each layer has a kernel call of its own, and
    nothing is cut out of a stack of weights, by a place that is known while it runs."""
    text = decode(sizes, 256)
    drawn = sizes[2] == 1  # by a kernel, where a GPU has the whole vocabulary
    assert text.count("xla.gpu.triton") == SHAPE.num_layers + 2 * drawn
    assert not drawn or (256 // sizes[0], 1, 1) in grids(text)  # a device its own rows
    assert "dynamic_slice" not in text and "dynamic_update_slice" not in text
    assert not re.findall("callback|infeed|outfeed|stablehlo.send|stablehlo.recv", text)
    assert text.count("stablehlo.while") == 2


def test_prompts_are_read_by_the_kernel_of_packed_rows():
    """Where they fit into one call: no scores of tokens x tokens are made."""
    made = engine((1, 1, 1), 256)
    text = lowered(made.calls(qwen2.abstract(SHAPE)).prefill, made.mesh)
    # Of the last layer nothing but keys and values is wanted.
    assert text.count("xla.gpu.triton") == SHAPE.num_layers - 1
    assert "x256x256xf32" not in text


def grids(text: str) -> set[tuple[int, ...]]:
    found = re.findall(r"grid_x = (\d+) : i32, grid_y = (\d+) : i32, grid_z = (\d+)", text)
    return {tuple(map(int, grid)) for grid in found}


def test_programs_of_few_rows_share_the_pages_of_a_row():
    """0.5B has two heads: 1 program a row and head of 256 or 128 rows, 2 of 64, 8 of 16."""
    assert engine((1, 1, 1), 256).rungs == (128, 64, 16)
    of = lambda name: grids(decode((1, 1, 1), 256, name))
    blocks = -(-SHAPE.vocab_size // 4096)
    draws = lambda rows: {(rows, blocks, 1), (rows, 1, 1)}
    assert of("full") == {(256, 2, 1)} | draws(256)
    assert of("full, 64 slots") == {(64, 2, 2)} | draws(64)
    assert of("full, 16 slots") == {(16, 2, 8)} | draws(16)


def test_guesses_are_looked_at_after_each_token():
    """A program in which a row's limit is the next token would draw seven more for nothing."""
    text = decode((1, 1, 1), 16, draft_tokens=4, draft_places=16)
    assert text.count("stablehlo.while") == 1
    # And the draw, of two; guesses are rows of its own.
    assert text.count("xla.gpu.triton") == SHAPE.num_layers + 2


def test_the_kernel_counts_a_large_pool_in_64_bits(monkeypatch):
    """More than 2^31 numbers need it. As jax lowers the kernel, bfloat16 has it from there on, and
    int8 beyond 2^32 alone: `rules.check_cache` refuses what is between."""
    lowering, texts = triton_call.lowering.lower_jaxpr_to_triton_module, []

    def spied(*args, **how):
        out = lowering(*args, **how)
        texts.append(str(out.module))
        return out

    monkeypatch.setattr(triton_call.lowering, "lower_jaxpr_to_triton_module", spied)
    monkeypatch.setattr(parallel, "platform", lambda: "gpu")
    array, page = jax.ShapeDtypeStruct, 64 * 128

    def wide(numbers, dtype):
        N = numbers // (2 * page)
        pages = [array((2, N, *size), dtype) for size in ((64, 128), (128, 64))]
        pages += [array((2, N, 2, 128), jnp.float32)] * (dtype == jnp.int8)
        q, table = array((16, 14, 64), jnp.bfloat16), array((16, 18), jnp.int32)
        rows = paged.CacheRows(table, array((16,), jnp.int32), array((16,), jnp.bool_))
        lowered(parallel.Call(jax.jit(paged_triton.attend), (q, pages, 0, rows)))
        return "tensor<64x128xi64>" in texts.pop()

    for dtype, most in ((jnp.bfloat16, 2**31), (jnp.int8, 2**32)):
        assert not wide(most, dtype)
        assert wide(most + 2 * page, dtype)


@pytest.mark.parametrize(("d", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (64, "float32")])
def test_the_kernels_of_packed_rows_lower(d, dtype, monkeypatch):
    """Forward for each block and query head, then gradients: of queries likewise, of keys for each
    of their own heads."""
    monkeypatch.setattr(parallel, "platform", lambda: "gpu")
    loss = lambda *a: packed_triton.attend(*a, "").astype(jnp.float32).sum()
    array = lambda *size, dtype=dtype: jax.ShapeDtypeStruct(size, dtype)
    given = *(array(1, n, 9000, d) for n in (14, 2, 2)), array(1, 9000, dtype="int32")
    text = lowered(parallel.Call(jax.jit(jax.grad(loss, (0, 1, 2))), given))
    assert text.count("xla.gpu.triton") == 3
    assert grids(text) == {(142, 14, 1), (142, 2, 1)}


def test_the_roofline_is_of_the_bytes_and_products_of_the_shape():
    """0.5B has 494 million weights, tied to the head; 24 layers with two heads of 64 keys, 14 of
    queries. Programs that run have the same shares of a row."""
    work = gpu_roofline.decode(plan.published("Qwen/Qwen2.5-0.5B"), 256, 512)
    weights, V, token = 494_032_768, 151_936, 24 * 2 * 2 * 64 * 2
    assert work.bytes == {
        "weights": 2 * weights, "keys": 256 * 512 * token, "logits": 2 * 256 * V * 4
    }  # fmt: skip
    assert work.flops == 256 * (2 * weights + 4 * 512 * 24 * 14 * 64)
    hbm, products = work.seconds()
    assert hbm == pytest.approx(0.869e-3, rel=0.01) and products < hbm
    few = gpu_roofline.decode(plan.published("Qwen/Qwen2.5-0.5B"), 16, 512, row_tokens=20_256)
    assert (16, 2, few.shares) in grids(decode((1, 1, 1), 256, "full, 16 slots"))
    for again, passes in ((False, 3), (True, 4)):
        update = gpu_roofline.update(plan.published("Qwen/Qwen2.5-0.5B"), 4096, again)
        attention = 2 * 24 * 14 * 64 * 2 * 2048**2
        assert update.flops == passes * (2 * weights * 4096 + attention)


def test_the_roofline_is_the_slower_of_memory_and_products():
    rows = {row[0]: row for row in gpu_roofline.table().rows}
    assert rows["0.5B: decode, 256 rows of 512 tokens"][3:6] == ["0.87", "0.27", "294,724"]
    hbm, products = map(float, rows["0.5B: update, a pass of 8,192 tokens"][3:5])
    assert hbm < products


@pytest.mark.parametrize("kind", ["auto", "cudnn"])
@pytest.mark.parametrize("sizes", [slow((1, 1, 1)), slow((1, 8, 1)), (2, 2, 2)], ids=str)
def test_an_update_attends_by_a_kernel_and_visits_no_host(sizes, kind, monkeypatch):
    """Rows of 9,000 tokens, which cuDNN takes in three chunks, forward and back; where nothing is
    said a kernel by Triton, forward, again, and for gradients of queries and of keys. Where a GPU
    holds all weights no layer is cut out of a stack in a loop; where it holds a part, one layer
    after the other. None of the logits' size but they is an array."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", CUDNN)
    each = lambda n: (n, n * SHAPE.num_layers)  # jax 0.10 has one function that all layers call
    mesh, shape = mesh_of_gpus(*sizes), SHAPE._replace(attention=kind, remat="full")
    tx = learner.optimizer(0.9, 0.95, 1e-8, 0.1, 1.0)
    made = update.Trainer(shape, learner.Setup(mesh, RULES.train.to_dict(), tx, "bfloat16"))
    text = lowered(parallel.Call(made.update, made.abstract(2, 8, 9000)), mesh)
    if kind == "auto":
        # For sums of logits two, of which XLA drops the second: its results are kept.
        assert text.count("xla.gpu.triton") - 2 * (sizes[2] == 1) in each(4)
    elif mesh.size > 1:  # cut up by the compiler: only then they are cuDNN's
        assert text.count("@CustomSPMDPartitioning(") >= 6
    else:
        assert text.count("@__cudnn$fmhaScaleBiasSoftmax(") >= 3
        assert text.count("@__cudnn$fmhaScaleBiasSoftmaxBackward(") in each(3)
    # Over micro-batches, and a head's chunks twice; over layers, forward and back.
    assert text.count("stablehlo.while") == 3 + 2 * (sizes[1] > 1)
    loops = [line for line in text.splitlines() if "stablehlo.while" in line]
    of_logits = rf"<\d+x\d+x{151_936 // sizes[2]}x\w+>"
    assert not re.findall(of_logits, "".join(loops))
    assert not re.findall("callback|infeed|outfeed|stablehlo.send|stablehlo.recv", text)
