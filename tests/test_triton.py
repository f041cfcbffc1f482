"""The kernels for NVIDIA GPUs, interpreted: of pages beside XLA's reader, of packed rows beside the
oracle (on a GPU: test_gpu.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typed
from levels import slow
from test_attention import value_and_gradient
from test_attention_kernels import assert_attends, inputs, on_mesh
from test_paged import SHAPE, D, H, K, assert_live_near, expected, geometry

from dapo_jax.model import attention_kernels, packed_triton, paged, paged_triton, paged_xla, rope


def case_of_triton(page_tokens, head_dim, quantized, dtype="float32"):
    """(geometry, q, pages of two layers, rows): an idle row, whole pages and parts of them, pages
    of others in between."""
    shape = SHAPE._replace(head_dim=head_dim, scan_layers=True)
    sizes = dict(slots=9, row_tokens=5 * page_tokens, page_tokens=page_tokens)
    g = geometry("gpu", shape, **sizes, quantized=quantized)
    assert g.reader == "triton" and g.transposed and g.layers == 2
    P = page_tokens
    position = np.array([0, P - 1, P, 3 * P, 5 * P - 1, 7, 2, 1, P + 3], np.int32)
    pages, rows = random_pages(g, position, np.arange(9) != 3, dtype)
    q = np.random.default_rng(1).normal(size=(9, H, head_dim))
    return g, jnp.asarray(q, dtype), pages, rows


def random_pages(g, position_S, active_S, dtype="float32"):
    """(pages of two layers, rows) whose pages lie in any order."""
    rng = np.random.default_rng(0)
    pages = [
        rng.normal(size=(K, 2 * g.pages, *size))
        for size in ((g.head_dim, g.page_tokens), (g.page_tokens, g.head_dim))
    ]
    if g.quantized:
        scales = rng.uniform(0.01, 0.03, (K, 2 * g.pages, 2, g.page_tokens))
        pages = [*(np.rint(40 * x).astype(np.int8) for x in pages), scales.astype(np.float32)]
    else:
        pages = [jnp.asarray(x, dtype) for x in pages]
    table = rng.permutation(g.pages).reshape(len(position_S), -1).astype(np.int32)
    rows = paged.CacheRows(*map(jnp.asarray, (table, position_S.astype(np.int32), active_S)))
    return [jnp.asarray(x) for x in pages], rows


def by_triton(g, q, pages, rows, count):
    """Layer 1 of 2, by `count` programs a row and head, interpreted."""
    read = jax.jit(paged_triton.attend, static_argnums=5, compiler_options=typed.OPTIONS)
    return read(q, pages, g.pages, rows, None, count)


def whole_rows(g, pages, rows):
    """Keys and values of layer 1 in order, float64 [S, K, T, d]."""
    # [K, S, R, ...]
    keys, values, *scales = (np.float64(x[:, rows.table_SxR + g.pages]) for x in pages)
    keys = keys.swapaxes(-1, -2)
    if scales:
        keys, values = keys * scales[0][..., 0, :, None], values * scales[0][..., 1, :, None]
    S, d = len(rows.active_S), g.head_dim
    return [x.swapaxes(0, 1).reshape(S, K, -1, d) for x in (keys, values)]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("page_tokens", [16, slow(32)])
def test_the_gpu_kernel_reads_what_the_xla_reader_does(page_tokens, quantized):
    """However many programs share a row, more than it has pages among them; twice the same bits."""
    g, q, pages, rows = case_of_triton(page_tokens, D, quantized)
    want = expected(np.asarray(q), *whole_rows(g, pages, rows), rows.position_S + 1)
    read = paged_xla.read_pages(g, q, pages, 1, rows, paged_xla.plan_of(rows, page_tokens))
    assert_live_near(read, want, rows.active_S)
    for count in (1, 2, 3, 8):
        got = by_triton(g, q, pages, rows, count)
        assert_live_near(got, want, rows.active_S)
        assert not np.any(got[3])  # idle
        np.testing.assert_array_equal(got, by_triton(g, q, pages, rows, count))


@pytest.mark.parametrize("quantized", [False, True])
def test_the_gpu_kernel_in_bfloat16(quantized):
    """Weights are rounded once, to 8 bits: a sum of values errs by at most 2^-9 of the largest."""
    g, q, pages, rows = case_of_triton(16, D, quantized, "bfloat16")
    wide = q.astype(jnp.float32)
    keys, values = whole_rows(g, pages, rows)
    want, _ = expected(np.asarray(wide), keys, values, rows.position_S + 1)
    for count in (1, 2, 8):
        live = np.asarray(rows.active_S)
        got = np.asarray(by_triton(g, q, pages, rows, count))
        np.testing.assert_allclose(got[live], want[live], atol=2**-8 * np.abs(values).max())


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_the_gpu_kernel_reads_rows_of_20000_tokens(quantized):
    """Beside an idle one; by as many programs as share each of the last 16 rows of 0.5B."""
    shape = SHAPE._replace(scan_layers=True)
    sizes = dict(slots=2, row_tokens=20_000, page_tokens=128)
    g = geometry("gpu", shape, **sizes, quantized=quantized)
    assert (g.reader, g.row_pages) == ("triton", 157)
    pages, rows = random_pages(g, np.array([19_999, 5]), np.array([True, False]))
    q = jnp.asarray(np.random.default_rng(1).normal(size=(2, H, D)) * 2, "float32")
    want = expected(np.asarray(q), *whole_rows(g, pages, rows), rows.position_S + 1)
    for count in (1, 8):
        assert_live_near(by_triton(g, q, pages, rows, count), want, rows.active_S)


def test_few_rows_are_shared_out():
    """0.5B and 7B, whose keys have 2 and 4 heads, with rows of 20,000 tokens and of 2,304: the
    programs of all slots and of the last rows. Short rows are not."""
    of = lambda heads, pages: [paged_triton.shares(n, heads, pages) for n in (256, 128, 64, 16, 1)]
    assert of(2, 313) == [1, 1, 2, 8, 39]
    assert of(4, 313) == [1, 1, 1, 4, 39]
    assert of(2, 36) == [1, 1, 2, 4, 4]
    assert of(2, 15) == [1] * 5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_triton_on_meshes(sizes):
    """Interpreted; twice the same bits."""
    run = on_mesh(sizes, lambda *a: packed_triton.attend(*a, attention_kernels.SAVED))
    assert_attends(run, 64)
    twice = [value_and_gradient(run)(inputs(64)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *twice)


@pytest.mark.parametrize("lengths", [[512], [200, 56, 100], [64] * 4, [1] * 300, [500, 12], []])
def test_triton_computes_the_blocks_of_a_sequence_alone(lengths):
    """From the block where the first query's sequence begins, up to that where the last key's ends;
    those in which a query and a key of one sequence meet are among them, and hardly others. Those
    in which each query sees each key need no mask."""
    block, n = packed_triton._OWN, 512 // packed_triton._OWN
    segments = np.zeros(512, np.int32)
    segments[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    pairs = (segments[:, None] == segments) & np.tri(512, dtype=bool)
    for step in (block, 2 * block):
        spans = packed_triton._spans(jnp.asarray(segments)[None], step)
        for span, seen in zip(spans, (pairs, pairs.T), strict=True):
            first, clear, beyond, end = np.asarray(span[0])[..., None]
            blocks, at = seen.reshape(n, block, -1, step), np.arange(512 // step)
            np.testing.assert_array_equal((at >= first) & (at < end), blocks.any((1, 3)))
            np.testing.assert_array_equal((at >= clear) & (at < beyond), blocks.all((1, 3)))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_gpu_kernel_rotates_and_stores_what_xla_does(quantized, count, monkeypatch):
    """Attention and pages of a new token: heads apart and side by side, rows of any length (one has
    no older token, one is idle), beside XLA's reader over the same pages."""
    g, _, pages, rows = case_of_triton(16, D, quantized)
    monkeypatch.setattr(paged_triton, "shares", lambda *sizes: count)
    pool = (tuple(x.reshape(K, 2, g.pages, *x.shape[2:]) for x in pages),)
    angles = rope.angles(rows.position_S[:, None], D, 1e4)
    new_SxNx1xd = np.random.default_rng(2).normal(size=(9, H + 2 * K, 1, D)).astype("float32")
    heads = jnp.split(jnp.asarray(new_SxNx1xd), [H, H + K], axis=1)

    def act(g, *heads):
        run = jax.jit(lambda pool: paged.decode_attend(g, rows)(angles)(1, pool, *heads))
        return run(pool)

    want_pool, want = act(g._replace(reader="pages"), *heads)
    turned = np.asarray(rope.rotate(heads[0], angles))[:, :, 0]
    flat = [x.reshape(K, 2 * g.pages, *x.shape[3:]) for x in want_pool[0]]
    _, bound = expected(turned, *whole_rows(g, flat, rows), rows.position_S + 1)
    for given in (heads, [jnp.concatenate(heads, axis=1)]):
        got_pool, got = act(g, *given)
        live = np.asarray(rows.active_S)
        # Each side errs by the bound, and as much by its rotation.
        np.testing.assert_allclose(got[live], want[live], rtol=0, atol=4 * bound)
        assert not np.any(got[3])
        for a, b in zip(*map(jax.tree.leaves, (got_pool, want_pool)), strict=True):
            assert a.dtype == b.dtype and np.any(b[:, 1] != b[:, 0])
            np.testing.assert_allclose(np.float32(a), np.float32(b), atol=2**-20)
