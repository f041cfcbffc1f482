"""Flash attention by platform: splash interpreted; cuDNN without a GPU (with one: test_gpu.py)."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from levels import slow
from rounding import assert_near, reference
from test_attention import inputs as attention_inputs, oracle, same_segment, value_and_gradient
from test_parallel import described

from dapo_jax import config, parallel
from dapo_jax.model import attention_kernels as splash

RULES = config.base().sharding.train.to_dict()
B, H, K, T = 2, 4, 2, 300
# Three sequences and padding; one long sequence and one token.
SEGMENTS = np.array([[1] * 130 + [2] * 7 + [3] * 131 + [0] * 32, [1] * 299 + [2]], np.int32)

CUDNN = SimpleNamespace(cudnn_get_version=lambda: 91000)  # which is not here


def inputs(d):
    return attention_inputs((B, H, K, T, d))


def expected(args, segments=SEGMENTS):
    """`reference` of the oracle's gradients and attention."""
    return reference(value_and_gradient(lambda *a: oracle(*a, same_segment(segments))), args)


@functools.cache
def case(d):
    return inputs(d), expected(inputs(d))


def assert_attends(attend, d):
    args, want = case(d)
    assert_near(value_and_gradient(attend)(args), want)


@pytest.mark.parametrize("block", range(128, splash.BLOCK + 1, 128))
def test_splash_has_a_kernel_for_rows_of_every_length(block):
    """What it computes at a time has to divide the block."""
    splash._kernel(2, block, block)


def on_mesh(sizes, attend, **rules):
    """Heads over `tensor`, rows over `data`, but for these rules."""
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), parallel.AXES)

    @jax.jit
    def run(*args):
        with parallel.mesh_scope(mesh, RULES | rules):
            return attend(*args, SEGMENTS)

    return run


@pytest.mark.parametrize("sizes", [slow((1, 1, 2)), slow((2, 1, 2))], ids=str)
def test_splash_on_meshes(sizes):
    assert_attends(on_mesh(sizes, splash.splash), 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "d", "axis"), [("splash", 64, "head_dim"), ("triton", 16, "token")]
)
def test_a_kernel_reads_whole_heads_and_rows(kernel, d, axis):
    """Whatever the rules split."""
    attend = lambda *a: splash.kernel(kernel, jnp.float32, d)(*a, 64)
    rules = dict(heads="", kv_heads="") | {axis: "tensor"}
    assert_attends(on_mesh((1, 1, 2), attend, **rules), d)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "d"), [("splash", 128), ("triton", 16)])
def test_a_kernel_in_bfloat16(kernel, d):
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs(d))
    run = jax.jit(lambda *a: splash.kernel(kernel, jnp.bfloat16, d)(*a, SEGMENTS, 64))
    got = value_and_gradient(run)(low)
    assert got[1].dtype == jnp.bfloat16
    want, _ = expected(tuple(np.asarray(x, np.float32) for x in low))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, largest = np.asarray(a, np.float64), np.abs(b).max()
        assert largest > 0.1  # a few roundings to bfloat16 on the way to each
        assert np.abs(a - b).max() <= 10 * 2**-9 * largest


@pytest.mark.slow
def test_long_rows_in_several_blocks(monkeypatch):
    """Blocks of 128: rows of three, the last of them padding for the most part."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    assert_attends(lambda *a: splash.splash(*a, SEGMENTS), 64)


@pytest.mark.parametrize(
    "lengths", [[1024], [200, 56, 384, 250], [128] * 8, [1] * 640, [1000, 24], []]
)
def test_computed_blocks(lengths):
    """By the pairs of all cells, those of padding within a block; what is fetched meanwhile is what
    is computed next."""
    block, n = 128, 8
    segments = np.zeros(block * n, np.int32)
    segments[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    pairs = (segments[:, None] == segments) & np.tri(block * n, dtype=bool)
    apart = np.arange(block * n) // block
    pairs &= (segments > 0) | (apart[:, None] == apart)
    want_QxK = pairs.reshape(n, block, n, block).any((1, 3))
    kernel = splash._within_segments(splash._kernel(5, block * n, block), segments, block)
    forward, backward = kernel.fwd_mask_info, kernel.dkv_mask_info
    for info in (forward, backward):
        assert np.array_equal(info.block_mask[0] > 0, want_QxK)
    walks = (forward.data_next[0], want_QxK), (backward.data_next[0].T, want_QxK.T)
    for (next_, live), again in zip(walks, (False, True), strict=True):  # the next head's column
        for row in range(n):
            for at in range(n):
                later = [(row, x) for x in range(at, n)]
                later += [(row if again else (row + 1) % n, x) for x in range(n)]
                assert next_[row, at] == next(x for r, x in later if live[r, x])


@pytest.mark.parametrize("chunk", [*map(slow, (512, 100, 70))])
def test_cudnn_gives_each_chunk_its_mask(chunk):
    """The same call with XLA's implementation in cuDNN's place: layout, mask, chunks, keys."""
    assert_attends(lambda *a: splash.cudnn(*a, SEGMENTS, chunk, implementation="xla"), 16)


@pytest.mark.parametrize(
    ("chunk", "keys"), [(100, [100, 200, 300]), (128, [128, 256, 300]), (300, [300])]
)
def test_cudnn_lowers_for_cuda(monkeypatch, chunk, keys):
    """jax's own checks of shapes pass, and the program calls cuDNN forward and back; of a row's
    first chunk cuDNN knows that it is causal. No chunk has keys beyond its end."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", CUDNN)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(64))
    loss = lambda *a: splash.cudnn(*a, SEGMENTS, chunk).astype(jnp.float32).sum()
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for call in ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"):
        assert f"@__cudnn${call}(" in text
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaScaleBiasSoftmax(" in line]
    masks = [re.search(r"mask_type\\22: \\22([A-Z_]+)", line)[1] for line in calls]
    seen = [int(re.search(rf"tensor<{B}x(\d+)x{K}x64xbf16>", line)[1]) for line in calls]
    known = dict(zip(keys, ["CAUSAL"] + ["NO_MASK"] * (len(keys) - 1), strict=True))
    assert sorted(zip(seen, masks, strict=True)) == sorted(known.items())


def test_auto_goes_by_platform():
    low, full = jnp.bfloat16, jnp.float32
    for platform, of_kind in (
        ("tpu", {(low, 128): "splash", (full, 64): "splash", (low, 16): "chunked"}),
        ("gpu", {(low, 64): "triton", (low, 80): "cudnn", (full, 64): "chunked"}),
        ("gpu", {(low, 64, True): "cudnn"}),
        ("cpu", {(low, 64): "chunked"}),
    ):
        with parallel.mesh_scope(described(platform), RULES):
            got = {kind: splash.choose("auto", *kind) for kind in of_kind}
            assert got == of_kind, platform
            assert splash.choose("chunked", low, 64) == "chunked"
    assert splash.choose("auto", full, 64) == "chunked"  # of the CPU or GPU in use


def test_kernels_by_name():
    args, ends = attention_inputs((B, H, K, 40, 64)), SEGMENTS[:, -40:]
    want = expected(args, ends)
    for kind in ("auto", "chunked", "splash", "triton"):
        attend = lambda *a: splash.kernel(kind, jnp.float32, 64)(*a, ends, 64)  # noqa: B023
        assert_near(value_and_gradient(attend)(args), want)
        found = "pallas_call" in str(jax.make_jaxpr(attend)(*args))
        assert found == (kind in ("splash", "triton"))
