"""A row's new token and guesses behind it, in places side by side, by all readers of pages; above
all by the TPU kernel that reads the pages once for all of them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typed
from jax.experimental.pallas import tpu as pltpu
from levels import needs_libtpu, slow
from rounding import EPS
from test_paged import LAYOUTS, SHAPE, assert_live_near, expected, geometry, int8

from dapo_jax.config import presets
from dapo_jax.model import paged, paged_queries, rope
from dapo_jax.plan import kernels
from dapo_jax.plan.constants import VALUES
from dapo_jax.pods import slices

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


def case(layout, rows, page_tokens, dtype="float32", quantized=False, queries=4, platform="tpu"):
    """(geometry, queries, new keys and values, pool, table, `places`, what the rows hold)."""
    heads, kv_heads, d = layout
    shape = SHAPE._replace(num_heads=heads, num_kv_heads=kv_heads, head_dim=d)
    row_S, position_S = places(rows)
    sizes = dict(slots=len(row_S), row_tokens=ROW_TOKENS, page_tokens=page_tokens, cores=2)
    g = geometry(platform, shape, **sizes, quantized=quantized, queries=queries)
    rng = np.random.default_rng(0)
    T = g.row_pages * g.page_tokens
    kv = rng.normal(size=(2, len(rows), kv_heads, T, d)).astype(np.float32)
    pages = rng.permutation(g.pages)[: len(rows) * g.row_pages].reshape(len(rows), -1)
    pool = [np.array(x) for x in paged.new_pool(g, "float32")[0]]
    pool[0] = pool[0].swapaxes(-1, -2) if g.transposed else pool[0]
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
    pool[0] = pool[0].swapaxes(-1, -2) if g.transposed else pool[0]
    q = rng.normal(size=(len(row_S), heads, 1, d))
    new = list(kv[:, row_S, :, position_S].swapaxes(0, 1)[:, :, :, None])
    cos, sin = rope.angles(jnp.asarray(position_S)[:, None], d, 1e4)
    new[0] = rope.rotate(jnp.asarray(new[0]), (cos, -sin))  # as the model hands it over
    kind = lambda x: jnp.asarray(x, dtype)
    pool = [*map(jnp.asarray, pool)] if quantized else [*map(kind, pool)]
    table = pages[row_S].astype(np.int32)
    return g, kind(q), [kind(x) for x in new], pool, table, (row_S, position_S), kv


@functools.cache
def reader(g, block, d):
    """(pool, q, new, table, position_S, live_S) -> (pool, attention [S, H, d]) of the places that
    are live, interpreted, in blocks of so many tokens."""

    @functools.partial(jax.jit, compiler_options=typed.OPTIONS)
    def run(pool, q, new, table, position_S, live_S):
        angles = rope.angles(position_S[:, None], d, 1e4)
        attend = paged.decode_attend(g, paged.CacheRows(table, position_S, live_S))(angles)
        pool, y = attend(0, (pool,), q, *new)
        return pool[0], y[:, :, 0]

    def reads(*given):
        tpu = pltpu.force_tpu_interpret_mode if g.reader == "kernel" else contextlib.nullcontext
        with pytest.MonkeyPatch.context() as patch, tpu():
            patch.setattr(paged.paged_kernel, "_BLOCK_TOKENS", block)
            return jax.device_get(run(*given))

    return reads


def held(g, pool, table, which, d):
    """Keys or values as numbers, in order: [S, K, T, d]."""
    x = pool[which][:, table].astype(np.float64)
    x = x.swapaxes(-1, -2) if g.transposed and which == 0 else x
    if g.quantized:
        x *= pool[2][:, table][:, :, :, which, :, None]
    return x.swapaxes(0, 1).reshape(len(table), g.kv_heads, -1, g.head_dim)[..., :d]


@pytest.mark.parametrize(
    ("layout", "page_tokens", "quantized", "queries", "block", "platform"),
    [
        (LAYOUTS[0], 16, False, 4, 32, "tpu"),
        slow(LAYOUTS[3], 16, False, 4, 32, "tpu"),
        slow(LAYOUTS[6], 8, False, 4, 16, "tpu"),  # a tile is a page
        slow(LAYOUTS[4], 48, False, 5, 1024, "tpu"),
        slow(LAYOUTS[0], 32, True, 4, 32, "tpu"),
        slow(LAYOUTS[6], 96, True, 7, 1024, "tpu"),
        (LAYOUTS[6], 16, False, 4, 0, "gpu"),
        slow(LAYOUTS[6], 32, True, 4, 0, "gpu"),
        slow(LAYOUTS[6], 32, True, 4, 0, "cpu"),
    ],
    ids=str,
)
def test_places_see_the_keys_before_them(layout, page_tokens, quantized, queries, block, platform):
    """Attention is float64's over what each place sees; the pool holds the new tokens, and else
    what it held."""
    how = dict(quantized=quantized, queries=queries, platform=platform)
    g, q, new, pool, table, (row_S, position_S), kv = case(layout, ROWS, page_tokens, **how)
    assert g.reader == dict(tpu="kernel", gpu="triton", cpu="pages")[platform]
    live, d = row_S >= 0, q.shape[-1]
    after, got = reader(g, block, d)(pool, q, new, table, position_S, live)
    kept = [held(g, after, table, i, d) for i in range(2)]
    q = rope.rotate(q, rope.angles(jnp.asarray(position_S)[:, None], d, 1e4))
    want = expected(np.asarray(q[:, :, 0]), *map(np.float32, kept), position_S + 1)
    assert_live_near(got, want, live)
    assert platform == "cpu" or (got[~live] == 0).all()
    for i in np.flatnonzero(live):  # a key of a few units, rotated there and back
        seen, n = kv[:, row_S[i]], position_S[i] + 1
        for x, whole in zip(kept, seen[:, :, :n], strict=True):
            most = np.abs(whole).max(-1, keepdims=True) * (8 * EPS + 0.5 / 127 * quantized)
            assert (np.abs(x[i, :, :n] - whole) <= most).all()
    old = np.ones((g.pages, page_tokens), bool)
    old[table[live, position_S[live] // page_tokens], position_S[live] % page_tokens] = False
    for i in range(2):
        a, b = (
            np.asarray(x).swapaxes(-1, -2) if g.transposed and i == 0 else np.asarray(x)
            for x in (after[i], pool[i])
        )
        np.testing.assert_array_equal(a[:, old], b[:, old])


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_a_place_has_the_bits_that_it_has_alone(quantized):
    """By the same program, one token after the other, as a row decodes without guesses: of a row
    whose places are all in one block. Across its edge a block is masked, and alone it is not, and
    what a compiler makes of the two may round otherwise."""
    page_tokens = 32 if quantized else 16
    given = case(LAYOUTS[0], ROWS, page_tokens, quantized=quantized)
    g, q, new, pool, table, (row_S, position_S), _ = given
    reads, live = reader(g, 1024, q.shape[-1]), row_S >= 0
    together, want = reads(pool, q, new, table, position_S, live)
    first = np.array([list(row_S).index(s) for s in row_S])
    for n in range(4):
        now = live & (np.arange(len(row_S)) == first + n)
        pool, got = reads(pool, q, new, table, position_S, now)
        np.testing.assert_array_equal(got[now], want[now])
    for a, b in zip(pool, together, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_in_bfloat16():
    """Weights are rounded once, to 8 bits, and so is the result."""
    given = case(LAYOUTS[0], ROWS, 16, "bfloat16")
    g, q, new, pool, table, (row_S, position_S), _ = given
    after, got = reader(g, 32, q.shape[-1])(pool, q, new, table, position_S, row_S >= 0)
    kept = [held(g, after, table, i, q.shape[-1]) for i in range(2)]
    q = rope.rotate(q, rope.angles(jnp.asarray(position_S)[:, None], q.shape[-1], 1e4))
    want, _ = expected(*(np.float32(x) for x in (q[:, :, 0], *kept)), position_S + 1)
    live = row_S >= 0
    most = 2**-8 * 2 * np.abs(want[live]).max()
    np.testing.assert_allclose(np.float64(got)[live], want[live], atol=most)


def test_whose_a_place_is():
    """The place behind that goes on: the next position of the same pages, and no other."""
    table = jnp.asarray([[1, 2], [1, 2], [1, 2], [1, 3], [1, 3], [4, 5], [4, 5], [4, 5]], jnp.int32)
    length = jnp.asarray([7, 8, 9, 10, 12, 0, 3, 4], jnp.int32)
    turn = jnp.zeros((8, 3))
    got = paged_queries.passes(length, table, turn, 1, queries=4)
    assert got.count_S.tolist() == [3, 0, 0, 1, 1, 0, 2, 0]
    assert got.work.length_S.tolist() == [9, 0, 0, 10, 12, 0, 4, 0]
    assert got.live_S.tolist() == [n > 0 for n in length.tolist()]
    assert got.work.count_C.tolist() == [4]
    assert paged_queries.most(128, False) == 16 and paged_queries.most(128, True) == 32
    assert paged_queries.most(8, False) == 8


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("pod", [pytest.param("v5p-256", marks=pytest.mark.nightly), "v6e-128"])
def test_a_pass_of_four_queries_is_hardly_longer_than_one_of_one(pod):
    """A block of keys takes a fifth more bundles at most, and fewer than HBM takes to bring it."""
    c, pod = presets.dapo_math("32B"), slices.parse(pod)
    c.rollout.draft_tokens = 3
    found = kernels.Parts(**kernels.counted(c, pod)["bundles"])
    assert found.block <= 1.2 * VALUES[f"ours.block.{pod.family}"]
    brought = 1024 * 2 * 128 * 2 / pod.chip.bandwidth * VALUES[f"cores.{pod.family}"]  # bfloat16
    assert found.block / VALUES[f"clock.{pod.family}"] < brought
