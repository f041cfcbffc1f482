"""The paged cache: readers against a float64 oracle, writes where they belong and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typed
from jax.experimental.pallas import tpu as pltpu
from levels import slow
from rounding import EPS, assert_near, reference
from test_attention import oracle

from dapo_jax.model import paged, paged_xla, qwen2, rope

H, K, D = 6, 2, 16
SHAPE = qwen2.Shape(32, 32, 32, 2, H, K, D, 1e4, 1e-6, True, scan_layers=False)


def geometry(platform="cpu", shape=SHAPE, **sizes):
    usual = dict(slots=4, shards=1, row_tokens=32, page_tokens=8, fraction=1.0)
    return paged.geometry(shape, platform, **usual | sizes)


def expected(q_SxHxd, keys_SxKxTxd, values_SxKxTxd, lengths):
    """(float64 attention [S, H, d] of rows of these lengths, the bound of float32)."""
    seen_Sx1xT = np.arange(keys_SxKxTxd.shape[2]) < np.asarray(lengths)[:, None, None]
    attend = lambda q, k, v: oracle(q[:, :, None], k, v, seen_Sx1xT)[:, :, 0]
    return reference(attend, q_SxHxd, keys_SxKxTxd, values_SxKxTxd)


def assert_live_near(got, want, live):
    assert_near(np.asarray(got)[live], (want[0][live], want[1]))


def filled(g, lengths, heads):
    """A kernel's pool of junk in which each row's tokens lie in random pages. Returns (pool pair,
    table, keys, values) with keys and values [S, K, T, d] in order."""
    rng = np.random.default_rng(0)
    S, T, d = len(lengths), g.row_pages * g.page_tokens, heads.head_dim
    keys, values = rng.normal(size=(2, S, heads.num_kv_heads, T, d)).astype(np.float32)
    table = rng.permutation(g.pages)[: S * g.row_pages].reshape(S, g.row_pages).astype(np.int32)
    pool = [np.full(x.shape, 50.0, np.float32) for x in paged.new_pool(g, "float32")[0]]
    for x, tokens in zip(pool, (keys, values), strict=True):
        for s, j in np.ndindex(table.shape):
            x[:, table[s, j], :, :d] = tokens[s, :, j * g.page_tokens : (j + 1) * g.page_tokens]
        x[..., d:] = 0  # padding, as the writer leaves it
    return pool, table, keys, values


def interpreted(attend, g):
    """`attend(g, what)(angles)(layer, ...)` as one program, soon compiled: an interpreted kernel's
    is kept by no cache, and nobody ships it."""
    one = lambda what, angles, layer, *arrays: attend(g, what)(angles)(layer, *arrays)
    return jax.jit(one, static_argnums=2, compiler_options=typed.OPTIONS)


# Heads of 32B, 7B, 1.5B and 0.5B by device, and an odd one: (query, key/value, width)
LAYOUTS = [(5, 1, 128), (10, 2, 128), (7, 1, 128), (12, 2, 128), (7, 1, 64), (2, 2, 64), (6, 2, 16)]
LENGTHS = [0, 64, 17, 0, 16, 49, 1]  # idle rows, whole blocks, one row more than an even deal


def kernel_attends(
    heads, kv_heads, head_dim, lengths, cores, dtype="float32", block=32, **interpret
):
    """(what the interpreted kernel makes of rows in pages of 16 tokens, `expected`, which rows are
    live). A row's last token is in the kernel's arguments alone, and must be the only change."""
    shape = SHAPE._replace(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    g = geometry("tpu", shape, slots=len(lengths), row_tokens=64, page_tokens=16)
    g = g._replace(cores=cores)
    assert (g.reader, g.row_pages, g.head_dim) == ("kernel", 4, 128)
    angles = rope.angles(jnp.asarray(lengths)[:, None] * 7, head_dim, 1e4)
    inverse = angles[0], -angles[1]
    lengths = np.array(lengths, np.int32)
    pool, table, *kv = filled(g, lengths, shape)
    live = lengths > 0
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(len(lengths), heads, 1, head_dim)), dtype)
    pool, kv = (jax.tree.map(lambda x: jnp.asarray(x, dtype), x) for x in (pool, kv))
    last = np.maximum(lengths - 1, 0)
    new = [x[np.arange(len(lengths)), :, last][:, :, None] for x in kv]
    new[0] = rope.rotate(new[0].astype("float32"), inverse)  # as the model hands it over
    before = [np.array(x) for x in pool]
    for s in np.flatnonzero(live):  # what the kernel must put there itself
        for x in before:
            x[:, table[s, last[s] // 16], last[s] % 16] = 77
    rows = jax.tree.map(jnp.asarray, paged.CacheRows(table, last, live))
    with (
        pytest.MonkeyPatch.context() as patch,
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**interpret)),
    ):
        patch.setattr(paged.paged_kernel, "_BLOCK_TOKENS", block)
        before = tuple(map(jnp.asarray, before))
        after, got = interpreted(paged.decode_attend, g)(rows, angles, 0, (before,), q, *new)
    for x, y in zip(after[0], pool, strict=True):  # a key of a few units, rotated there and back
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=4 * EPS * np.abs(y[..., :head_dim]).max())
    q = rope.rotate(q, angles)
    want = expected(*(np.asarray(x, np.float32) for x in (q[:, :, 0], *kv)), lengths)
    return np.asarray(got[:, :, 0], np.float64), want, live


@pytest.mark.parametrize(
    ("layout", "cores", "lengths", "block"),
    [
        *((layout, 2, LENGTHS, 32) for layout in LAYOUTS[::3]),
        *(slow(LAYOUTS[i], 2, LENGTHS, 32) for i in (1, 2, 4, 5)),
        (LAYOUTS[0], 1, LENGTHS, 16),
        (LAYOUTS[0], 1, [64, 1, 48], 1024),
        (LAYOUTS[0], 2, [0, 0, 20], 32),
    ],
)
def test_the_tpu_kernel_agrees_with_the_oracle(layout, cores, lengths, block):
    """Blocks and cores do not show. What was not written is NaN in the interpreter."""
    got, want, live = kernel_attends(*layout, lengths, cores, block=block)
    assert_live_near(got, want, live)
    assert (got[~live] == 0).all()


def test_the_tpu_kernel_in_bfloat16():
    """Weights are rounded once, to 8 bits, and so is the result."""
    got, (want, _), _ = kernel_attends(5, 1, 128, [1, 33, 60], 2, "bfloat16")
    np.testing.assert_allclose(got, want, atol=2**-8 * 2 * np.abs(want).max())


@pytest.mark.slow
def test_no_copy_of_the_tpu_kernel_races_another(capfd):
    """Cores at the same time, copies as late as they may be or at once, and a clock for each."""
    for when in ("on_wait", "eager"):
        more = dict(detect_races=True, num_cores_or_threads=2, dma_execution_mode=when)
        assert_live_near(*kernel_attends(6, 2, 16, LENGTHS, 2, block=16, **more))
        assert "RACE" not in "".join(capfd.readouterr())


def test_rows_are_dealt_out_to_cores():
    lengths = np.array([5, 0, 900, 7, 0, 800, 40, 30, 0], np.int32)
    work = paged.paged_kernel.work(jnp.asarray(lengths), jnp.zeros((9, 2), jnp.int32), None, 2)
    dealt = [np.asarray(r[:n]) for r, n in zip(work.rows_CxW, work.count_C, strict=True)]
    assert [lengths[r].tolist() for r in dealt] == [[900, 30, 7], [800, 40, 5]]


def int8(x):
    """NumPy's own: whole numbers and scales."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return np.rint(x / scale), scale


def test_quantized_within_half_a_scale():
    x = np.random.default_rng(0).normal(size=(50, 7, 16)).astype(np.float32)
    x *= np.float32(10.0) ** np.arange(-12, 38).reshape(50, 1, 1)
    x[3] = 0
    whole, scale = jax.jit(paged.quantize)(x)
    assert whole.dtype == jnp.int8 and scale.dtype == jnp.float32 and scale.shape == (50, 7, 1)
    back = np.asarray(whole, np.float64) * np.asarray(scale, np.float64)
    most = np.asarray(scale) / 2 * (1 + 2 * 127 * 2 * EPS)  # a division rounds 127 scales
    assert (np.abs(x - back) <= most).all() and (back[3] == 0).all()
    assert (np.abs(np.asarray(whole)).max(-1) == 127)[np.arange(50) != 3].all()
    assert (np.asarray(whole) == int8(x)[0]).mean() > 0.999  # a division's last bit


def of_layer(g, pool, layer):
    pages = pool[layer if g.arrays > 1 else 0]
    return [np.asarray(x[:, layer] if g.layers > 1 else x) for x in pages]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("platform", "page_tokens"), [("cpu", 64), ("cpu", 8), ("tpu", 32)])
def test_pages_hold_tokens_and_are_read(platform, page_tokens, scan, quantized, monkeypatch):
    """Prompts and two more tokens through each reader and the interpreted kernel, layer 1 of 2: the
    pool holds keys and values, or what NumPy makes int8 of them, and nothing else; attention is the
    oracle's over that."""
    shape, lengths, T = SHAPE._replace(scan_layers=scan), np.array([12, 0, 32, 31], np.int32), 32
    monkeypatch.setattr(paged_xla, "_BLOCK", 4), monkeypatch.setattr(paged_xla, "_TOGETHER", 2)
    g = geometry(platform, shape, row_tokens=64, page_tokens=page_tokens, quantized=quantized)
    assert g.reader == {64: "rows", 8: "pages", 32: "kernel"}[g.page_tokens]
    rng = np.random.default_rng(0)
    table = np.arange(4 * g.row_pages) if g.reader == "rows" else rng.permutation(4 * g.row_pages)
    table = table.reshape(4, -1).astype(np.int32)
    kv = rng.normal(size=(2, 4, K, T + 2, D)).astype(np.float32)
    still = jnp.ones((4, 1, 1, D // 2)), jnp.zeros((4, 1, 1, D // 2))  # no rotation
    prompts = paged.Prompts(np.zeros((4, T), np.int32), table, lengths, np.int32(0))
    pool = paged.new_pool(g, "float32")
    q = jnp.asarray(rng.normal(size=(4, H, T, D)), "float32")
    prefill = interpreted(lambda g, prompts: paged.prefill_attend(g, prompts, 8, T), g)
    pool, first = prefill(prompts, still, 1, pool, q, *kv[:, :, :, :T])
    whole, scale = int8(kv) if quantized else (kv, np.ones((*kv.shape[:-1], 1), np.float32))
    seen = whole * scale
    assert_near(first[:, :, 5], expected(q[:, :, 5], *seen, np.full(4, 6)))

    active, every = np.array([True, False, True, True]), np.arange(4)
    decode = interpreted(paged.decode_attend, g)
    for t in range(2):
        rows = jax.tree.map(jnp.asarray, paged.CacheRows(table, lengths + t, active))
        new = kv[:, every, :, lengths + t].swapaxes(0, 1)[:, :, :, None]
        with pltpu.force_tpu_interpret_mode():
            pool, got = decode(rows, still, 1, pool, q[:, :, :1], *new)
        assert_live_near(got[:, :, 0], expected(q[:, :, 0], *seen, lengths + t + 1), active)
    keys, values, *scales = of_layer(g, pool, 1)
    assert keys.dtype == values.dtype == (jnp.int8 if quantized else jnp.float32)
    pages = (keys.swapaxes(-1, -2) if g.transposed else keys), values  # [K, N, P, d]
    for s in range(4):
        n = (lengths[s] + 2) * active[s]
        held = np.stack([x[:, table[s]].reshape(K, -1, g.head_dim) for x in pages])
        np.testing.assert_array_equal(held[:, :, :n, :D], whole[:, s, :, :n])
        assert not held[..., D:].any()  # the kernel's padding
        part = min(T, g.page_tokens)  # prompts are written in whole ones
        assert not held[:, :, -(-n // part) * part :].any()
        for x in scales:
            held = np.moveaxis(x[:, table[s]], 2, 0).reshape(2, K, -1)[..., :n]
            np.testing.assert_allclose(held, scale[:, s, :, :n, 0], rtol=4 * EPS)  # two divisions
    assert not any(x.any() for x in of_layer(g, pool, 0))


def test_sizes():
    """Triton's blocks are powers of two, 16 and more."""
    reader = lambda **how: geometry("gpu", row_tokens=600, **how).reader
    assert reader(page_tokens=64) == reader(page_tokens=0) == "triton"
    assert reader(page_tokens=8) == reader(page_tokens=24) == "pages"
    assert reader(page_tokens=64, shape=SHAPE._replace(head_dim=80)) == "pages"
    heads = lambda n: SHAPE._replace(num_heads=n, num_kv_heads=1)  # of one block
    assert reader(page_tokens=64, shape=heads(16)) == "triton"
    assert reader(page_tokens=64, shape=heads(17)) == "pages"
    assert reader(page_tokens=600) == "rows"
    assert geometry(page_tokens=0, row_tokens=100) == geometry(page_tokens=104, row_tokens=100)
    g = geometry(page_tokens=0, row_tokens=4000)
    assert (g.reader, g.page_tokens, g.row_pages, g.pages) == ("pages", 64, 63, 4 * 63)
    g = geometry("gpu", page_tokens=0, row_tokens=4000, fraction=0.5)
    assert (g.reader, g.page_tokens, g.pages) == ("triton", 64, 126)
    g = geometry("tpu", page_tokens=0, row_tokens=22528, fraction=0.01)
    assert (g.row_pages, g.pages) == (176, 176)  # never less than one full row
    # 32B in bfloat16: 256 KiB a token
    big = SHAPE._replace(num_layers=64, num_kv_heads=8, head_dim=128, scan_layers=True)
    g = geometry("tpu", big, slots=2, row_tokens=1024, page_tokens=128)
    assert paged.pool_bytes(g, "bfloat16") == 2 * 1024 * 256 * 1024
    int8 = g._replace(quantized=True)  # half, and a scale of 4 bytes a vector of 128
    assert paged.pool_bytes(int8, "bfloat16") == 2 * 1024 * 132 * 1024
    for g in (g, int8):  # noqa: B020
        sizes = jax.eval_shape(lambda g=g: paged.new_pool(g, "bfloat16"))
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sizes))
        assert held == paged.pool_bytes(g, "bfloat16")
