"""The TPU kernel that reads a row's pages once for its new token and for guesses behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from rounding import EPS
from test_paged import LAYOUTS, SHAPE, assert_live_near, expected, geometry, int8, interpreted

from dapo_jax.model import paged, paged_kernel, paged_queries, qwen2

# (tokens before the new one, places) of rows; None: an idle place. Tiles are of 16 tokens, pages
# and blocks of 16, 32 or more: rows within one, across their edges, and as many as there may be.
ROWS = [(0, 1), None, (30, 4), (64, 3), None, (13, 4), (31, 1), (1, 2), (47, 2)]
ROW_TOKENS = 96


def places(rows):
    """(row, position) of each place; row -1 = idle."""
    out = []
    for s, row in enumerate(rows):
        out += [(s, row[0] + i) for i in range(row[1])] if row else [(-1, 0)]
    return np.array(out, np.int32).T


def case(layout, rows, page_tokens, dtype="float32", quantized=False, queries=4, cores=2):
    """(geometry, queries, new keys and values, pool, table, `places`, what the rows hold)."""
    heads, kv_heads, d = layout
    shape = SHAPE._replace(num_heads=heads, num_kv_heads=kv_heads, head_dim=d)
    row_S, position_S = places(rows)
    sizes = dict(slots=len(row_S), row_tokens=ROW_TOKENS, page_tokens=page_tokens, cores=cores)
    g = geometry("tpu", shape, **sizes, quantized=quantized, queries=queries)
    rng = np.random.default_rng(0)
    T = g.row_pages * g.page_tokens
    kv = rng.normal(size=(2, len(rows), kv_heads, T, d)).astype(np.float32)
    pages = rng.permutation(g.pages)[: len(rows) * g.row_pages].reshape(len(rows), -1)
    pool = [np.array(x) for x in paged.new_pool(g, "float32")[0]]
    held = np.stack([int8(x)[0] for x in kv]) if quantized else kv
    for s, j in np.ndindex(pages.shape):
        part = slice(j * g.page_tokens, (j + 1) * g.page_tokens)
        new = rows[s][0] if rows[s] else 0
        before = (np.arange(T) < new)[part, None]  # of the others the pool holds junk
        for i in range(2):
            pool[i][:, pages[s, j], :, :d] = np.where(before, held[i, s, :, part], 7)
            if quantized:
                scale = np.where(before, int8(kv[i])[1][s, :, part], 7)
                pool[2][:, pages[s, j], i] = scale[..., 0]
    q = rng.normal(size=(len(row_S), heads, 1, d))
    new = kv[:, row_S, :, position_S].swapaxes(0, 1)[:, :, :, None]
    kind = lambda x: jnp.asarray(x, dtype)
    pool = [*map(jnp.asarray, pool)] if quantized else [*map(kind, pool)]
    table = pages[row_S].astype(np.int32)
    return g, kind(q), [kind(x) for x in new], pool, table, (row_S, position_S), kv


def reads(g, q, new, pool, table, position_S, live_S, block=32, **interpret):
    """(pool, attention [S, H, d]) of the places that are live, interpreted; no rotation."""
    S, d = len(q), q.shape[-1]
    still = jnp.ones((S, 1, 1, d // 2)), jnp.zeros((S, 1, 1, d // 2))
    rows = jax.tree.map(jnp.asarray, paged.CacheRows(table, position_S, live_S))
    with (
        pytest.MonkeyPatch.context() as patch,
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**interpret)),
    ):
        patch.setattr(paged_queries, "_BLOCK_TOKENS", block)
        decode = interpreted(paged.decode_attend, g)
        pool, y = decode(rows, still, 0, (tuple(map(jnp.asarray, pool)),), q, *new)
    return [np.asarray(x) for x in pool[0]], np.asarray(y[:, :, 0])


def held(g, pool, table, which, d):
    """Keys or values as numbers, in order: [S, K, T, d]."""
    x = pool[which][:, table].astype(np.float64)
    if g.quantized:
        x *= pool[2][:, table][:, :, :, which, :, None]
    return x.swapaxes(0, 1).reshape(len(table), g.kv_heads, -1, g.head_dim)[..., :d]


@pytest.mark.parametrize(
    ("layout", "page_tokens", "quantized", "queries", "block"),
    [
        *((layout, 16, False, 4, 32) for layout in LAYOUTS),
        (LAYOUTS[0], 8, False, 4, 16),  # a tile is a page
        (LAYOUTS[0], 48, False, 5, 1024),
        (LAYOUTS[0], 32, True, 4, 32),
        (LAYOUTS[6], 96, True, 7, 1024),
    ],
    ids=str,
)
def test_places_see_the_keys_before_them(layout, page_tokens, quantized, queries, block):
    """Attention is float64's over what each place sees; the pool holds the new tokens, and else
    what it held."""
    given = case(layout, ROWS, page_tokens, quantized=quantized, queries=queries)
    g, q, new, pool, table, (row_S, position_S), kv = given
    live = row_S >= 0
    after, got = reads(g, q, new, pool, table, position_S, live, block)
    kept = [held(g, after, table, i, q.shape[-1]) for i in range(2)]
    want = expected(np.asarray(q[:, :, 0]), *map(np.float32, kept), position_S + 1)
    assert_live_near(got, want, live)
    assert (got[~live] == 0).all()
    for i, s in enumerate(row_S):
        if live[i]:
            n = position_S[i] + 1
            for x, whole in zip(kept, kv[:, s], strict=True):
                most = np.abs(whole[:, :n]).max(-1, keepdims=True) * (0.5 / 127 if quantized else 0)
                assert (np.abs(x[i, :, :n] - whole[:, :n]) <= most * (1 + 600 * EPS)).all()
    untouched = np.ones(after[0].shape[1:3], bool)
    untouched[table[live, position_S[live] // page_tokens], position_S[live] % page_tokens] = False
    for a, b in zip(after[:2], pool, strict=False):
        np.testing.assert_array_equal(a[:, untouched], np.asarray(b)[:, untouched])


@pytest.mark.parametrize("quantized", [False, True])
def test_a_place_has_the_bits_that_it_has_alone(quantized):
    """By the same program, one token after the other: as a row decodes without guesses."""
    page_tokens = 32 if quantized else 16
    given = case(LAYOUTS[0], ROWS, page_tokens, quantized=quantized, cores=1)
    g, q, new, pool, table, (row_S, position_S), _ = given
    live = row_S >= 0
    together, want = reads(g, q, new, pool, table, position_S, live)
    first = np.array([list(row_S).index(s) for s in row_S])
    for n in range(4):
        now = live & (np.arange(len(row_S)) == first + n)
        pool, got = reads(g, q, new, pool, table, position_S, now)
        np.testing.assert_array_equal(got[now], want[now])
    for a, b in zip(pool, together, strict=True):
        np.testing.assert_array_equal(a, b)
