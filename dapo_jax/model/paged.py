"""The decoder's cache: keys and values of all rows in one pool of pages, and attention over it.

A page holds the keys (or values) of `page_tokens` consecutive tokens of one row; a row is a list of
page numbers, its table. Rows therefore take memory as they grow and not at their longest possible
length, and rows with the same prompt may name the same pages. The pool is written in place: it is
carried through the layers and the decode loop, whole, and only ever scattered into.

Over a mesh, the pool is split by key/value head and by group of rows (a "shard": the devices along
the `batch` axes); page numbers are local to a shard.

How keys are read depends on the platform and on the geometry, with the same tables and writes:
  'kernel'  JAX's paged_attention for TPU
  'pages'   blocks of live pages, gathered, with an online softmax
  'rows'    a page is a whole row, page i belongs to row i, and nothing is gathered: the quickest on
            CPU while rows are short

Dims: S rows, R pages of a row's table, K key/value heads, G query heads a key/value head, H = K G,
L layers of one array, N pages of a shard, P tokens of a page, d head_dim, B prompts, T tokens.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.sharding import Mesh, NamedSharding

from dapo_jax import parallel
from dapo_jax.model import attention, qwen2

_MASKED = -1e30  # finite: a row without keys must not turn into NaN
_KERNEL_PAGES = 4  # pages a block of the TPU kernel: 512 tokens, which read 9% more than rows hold
_LANES = 128  # the TPU kernel takes head dims that are multiples of this
_BLOCK = 32  # pages a step of the 'pages' reader

# (keys, values) of L layers: [K, L, N, P, d], without the axis of layers where L is 1
Pool = tuple[tuple[jax.Array, jax.Array], ...]


class Geometry(NamedTuple):
    """Sizes of a pool; static under jit."""

    reader: str  # 'kernel' | 'pages' | 'rows'
    page_tokens: int  # P
    row_pages: int  # R
    pages: int  # N, of one shard
    shards: int
    arrays: int  # 1 = all layers in one array (scanned), else one array a layer
    layers: int  # L, of one array
    kv_heads: int
    head_dim: int  # as stored: padded for the kernel

    @property
    def pool_axes(self) -> tuple[str | None, ...]:
        layers = () if self.layers == 1 else (None,)
        return ("kv_heads", *layers, "batch", None, None)

    @property
    def tokens(self) -> int:
        """Tokens that all shards together can hold."""
        return self.shards * self.pages * self.page_tokens


class Rows(NamedTuple):
    """Which keys the rows see. A row that is not active writes nothing, and reads junk."""

    table_SxR: jax.Array  # int32, page numbers; entries past a row's end must be valid numbers too
    position_S: jax.Array  # int32, of the one new token: it sees 0..position
    active_S: jax.Array  # bool


class Prompts(NamedTuple):
    """A chunk of each prompt: tokens `start` to start + T, of which those below `length` count."""

    tokens_BxT: jax.Array  # int32
    table_BxR: jax.Array  # int32
    length_B: jax.Array  # int32, tokens of the prompt to cache
    start: jax.Array  # int32


def prompt_axes() -> Prompts:
    return Prompts(("batch", None), ("batch", None), ("batch",), ())


def geometry(
    shape: qwen2.Shape,
    platform: str,
    *,
    slots: int,
    shards: int,
    row_tokens: int,
    page_tokens: int,
    fraction: float,
) -> Geometry:
    """Sizes for `slots` rows of at most `row_tokens` tokens, over `shards` groups of rows.

    page_tokens 0 chooses: 128 on TPU and GPU; on CPU a whole row while rows are short
    (`benchmarks/sampler.py --readers` measures where that ends), else 64. fraction: pages there are,
    of those that all rows at full length would take.
    """
    if page_tokens == 0:
        on_cpu = platform == "cpu"
        page_tokens = row_tokens if on_cpu and row_tokens <= 384 else 64 if on_cpu else 128
    page_tokens = -(-min(page_tokens, row_tokens) // 8) * 8
    row_pages = -(-row_tokens // page_tokens)
    reader = "kernel" if platform == "tpu" else "rows" if row_pages == 1 else "pages"
    head_dim = shape.head_dim
    if reader == "kernel":
        row_pages = -(-row_pages // _KERNEL_PAGES) * _KERNEL_PAGES
        head_dim = -(-head_dim // _LANES) * _LANES
    rows = slots // shards
    pages = rows if reader == "rows" else max(row_pages, math.ceil(fraction * rows * row_pages))
    arrays = 1 if shape.scan_layers else shape.num_layers
    layers = shape.num_layers // arrays
    return Geometry(
        reader, page_tokens, row_pages, pages, shards, arrays, layers, shape.num_kv_heads, head_dim
    )


def pool_bytes(g: Geometry, dtype) -> int:
    """Of the whole pool, all devices together."""
    per_token = 2 * g.kv_heads * g.head_dim * g.layers * g.arrays * jnp.dtype(dtype).itemsize
    return g.tokens * per_token


def pool_sharding(g: Geometry, mesh: Mesh, rules: parallel.Rules):
    kv = NamedSharding(mesh, parallel.spec(g.pool_axes, rules))
    return ((kv, kv),) * g.arrays


def new_pool(g: Geometry, dtype) -> Pool:
    layers = () if g.layers == 1 else (g.layers,)
    size = (g.kv_heads, *layers, g.shards * g.pages, g.page_tokens, g.head_dim)
    return tuple((jnp.zeros(size, dtype), jnp.zeros(size, dtype)) for _ in range(g.arrays))


def copy_pages(g: Geometry, mesh: Mesh, rules, pool: Pool, source_S, target_S) -> Pool:
    """Copy page source[i] to target[i] of the same shard, in every layer; target N = no copy."""

    def local(pool, source_S, target_S):
        def move(x):
            return x.at[..., target_S, :, :].set(x[..., source_S, :, :], mode="drop")

        return jax.tree.map(move, pool)

    pools, row = ((g.pool_axes,) * 2,) * g.arrays, ("batch",)
    return parallel.shard_map(local, mesh, rules, (pools, row, row), pools)(
        pool, source_S, target_S
    )


# ------------------------------------------------------------------------------------------------
# One layer's attention, as `Qwen2.cached` calls it
# ------------------------------------------------------------------------------------------------


def decode_attend(g: Geometry, mesh: Mesh, rules: parallel.Rules, rows: Rows):
    """attend(layer, pool, q, k, v) for one new token a row: writes its key and value, then reads."""
    axes = Rows(("batch", None), ("batch",), ("batch",))
    plan = plan_axes = []
    if g.reader == "pages":  # the same in every layer
        plan_axes = _Plan(*[("batch",)] * 4)
        make = functools.partial(_plan, page_tokens=g.page_tokens)
        plan = parallel.shard_map(make, mesh, rules, (axes,), plan_axes)(rows)

    def local(layer, keys, values, q, k, v, rows, plan):
        keys, values = _flat(keys, g), _flat(values, g)
        page_S = jnp.take_along_axis(
            rows.table_SxR, (rows.position_S // g.page_tokens)[:, None], axis=1
        )[:, 0]
        spot_S = (layer * g.pages + page_S) * g.page_tokens + rows.position_S % g.page_tokens
        keys, values = (
            _write(pages, _padded(new, g).swapaxes(0, 1), spot_S, rows.active_S)
            for pages, new in ((keys, k), (values, v))
        )
        read = {"kernel": _read_kernel, "pages": _read_pages, "rows": _read_rows}[g.reader]
        y_SxHxd = read(g, q[:, :, 0], keys, values, layer, rows, plan)
        y = y_SxHxd[..., : q.shape[-1]].astype(q.dtype)[:, :, None]
        return _stacked(keys, g), _stacked(values, g), y

    heads, kv = ("batch", "heads", None, None), ("batch", "kv_heads", None, None)
    mapped = parallel.shard_map(
        local,
        mesh,
        rules,
        ((), g.pool_axes, g.pool_axes, heads, kv, kv, axes, plan_axes),
        (g.pool_axes, g.pool_axes, heads),
    )

    def attend(layer, pool, q, k, v):
        return _with_layer(
            g, pool, layer, lambda *place: mapped(place[0], *place[1], q, k, v, rows, plan)
        )

    return attend


def prefill_attend(
    g: Geometry, mesh: Mesh, rules: parallel.Rules, prompts: Prompts, chunk: int, window: int
):
    """attend(layer, pool, q, k, v) for a chunk of prompt tokens: writes whole parts of pages, then
    attends causally. `window` (static): tokens of the longest prompt; a prompt that fits into one
    chunk needs no look at the pool. `chunk`: queries a step of attention."""
    T = prompts.tokens_BxT.shape[1]
    part = math.gcd(T, g.page_tokens)  # tokens written together
    once = window <= T
    window_pages = -(-window // g.page_tokens)

    def local(layer, keys, values, k, v, prompts):
        token_J = prompts.start + part * jnp.arange(T // part)
        column_J = jnp.minimum(token_J // g.page_tokens, g.row_pages - 1)
        page_BxJ = layer * g.pages + prompts.table_BxR[:, column_J]
        spot_BxJ = (page_BxJ * g.page_tokens + token_J % g.page_tokens) // part
        inside_BxJ = token_J < prompts.length_B[:, None]

        def write(pages, new_BxKxTxd):
            new = _padded(new_BxKxTxd, g)
            B, K, _, d = new.shape
            new = new.reshape(B, K, T // part, part, d).transpose(1, 0, 2, 3, 4)
            new = new.reshape(K, B * (T // part), part, d)
            return _write(pages, new, spot_BxJ.reshape(-1), inside_BxJ.reshape(-1))

        keys, values = write(_flat(keys, g), k), write(_flat(values, g), v)
        seen = (k, v)
        if not once:
            table = layer * g.pages + prompts.table_BxR[:, :window_pages]
            seen = tuple(_gather(x, table)[..., : k.shape[-1]] for x in (keys, values))
        return _stacked(keys, g), _stacked(values, g), seen

    kv = ("batch", "kv_heads", None, None)
    axes = prompt_axes()
    mapped = parallel.shard_map(
        local,
        mesh,
        rules,
        ((), g.pool_axes, g.pool_axes, kv, kv, axes),
        (g.pool_axes, g.pool_axes, (kv, kv)),
    )

    def attend(layer, pool, q, k, v):
        pool, seen = _with_layer(
            g, pool, layer, lambda *place: mapped(place[0], *place[1], k, v, prompts)
        )
        return pool, attention.causal(q, *seen, 0 if once else prompts.start, chunk)

    return attend


def _with_layer(g: Geometry, pool: Pool, layer, act):
    """Run act(layer in its array, (keys, values)) -> (keys, values, out); returns (pool, out)."""
    if g.arrays == 1:
        keys, values, out = act(jnp.int32(layer), pool[0])
        return ((keys, values),), out
    keys, values, out = act(jnp.int32(0), pool[layer])
    return (*pool[:layer], (keys, values), *pool[layer + 1 :]), out


def _flat(pages, g: Geometry):
    """All layers' pages in one row of pages: [K, L N, P, d]."""
    return pages.reshape(pages.shape[0], g.layers * g.pages, *pages.shape[-2:])


def _stacked(pages_KxMxPxd, g: Geometry):
    K, _, P, d = pages_KxMxPxd.shape
    layers = () if g.layers == 1 else (g.layers,)
    return pages_KxMxPxd.reshape(K, *layers, g.pages, P, d)


def _padded(x, g: Geometry):
    missing = g.head_dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _write(pages_KxMxPxd, new_KxWxuxd, spot_W, keep_W):
    """W pieces of u tokens into the pages; `spot` counts pieces from the first page on.

    One index counts heads too. With the heads as a dimension that every update spans, XLA on CPU
    transposes the whole pool for each write.
    """
    K, W, u, d = new_KxWxuxd.shape
    spots = pages_KxMxPxd.size // (K * u * d)
    spot_KxW = jnp.arange(K)[:, None] * spots + spot_W
    spot_KxW = jnp.where(keep_W, spot_KxW, K * spots).reshape(-1)
    piece = (d,) if u == 1 else (u, d)
    out = pages_KxMxPxd.reshape(K * spots, *piece)
    out = out.at[spot_KxW].set(new_KxWxuxd.reshape(K * W, *piece), mode="drop")
    return out.reshape(pages_KxMxPxd.shape)


def _gather(pages_KxMxPxd, table_BxQ):
    """Keys of the listed pages in a row: [B, K, Q P, d]."""
    K, _, P, d = pages_KxMxPxd.shape
    B, Q = table_BxQ.shape
    return pages_KxMxPxd[:, table_BxQ].transpose(1, 0, 2, 3, 4).reshape(B, K, Q * P, d)


# ------------------------------------------------------------------------------------------------
# Readers: q_SxHxd over the pages of each row -> [S, H, d]
# ------------------------------------------------------------------------------------------------


def _read_kernel(g, q_SxHxd, keys, values, layer, rows, plan):
    length_S = jnp.where(rows.active_S, rows.position_S + 1, 1)
    scale = q_SxHxd.shape[-1] ** -0.5
    table = layer * g.pages + rows.table_SxR
    q = _padded(q_SxHxd * scale, g)
    return paged_attention(
        q, keys, values, length_S, table, pages_per_compute_block=_KERNEL_PAGES
    )


def _read_rows(g, q_SxHxd, keys, values, layer, rows, plan):
    S, H, d = q_SxHxd.shape
    K, _, C, _ = keys.shape
    if g.layers > 1:
        keys, values = (
            jax.lax.dynamic_slice_in_dim(x, layer * g.pages, g.pages, axis=1)
            for x in (keys, values)
        )
    q = q_SxHxd.reshape(S, K, H // K, d).swapaxes(0, 1) * d**-0.5
    scores = jnp.einsum("KSGd,KSCd->KSGC", q, keys, preferred_element_type=jnp.float32)
    seen_SxC = jnp.arange(C) <= rows.position_S[:, None]
    weights = jax.nn.softmax(jnp.where(seen_SxC[None, :, None], scores, _MASKED), axis=-1)
    y_KxSxGxd = jnp.einsum("KSGC,KSCd->KSGd", weights.astype(values.dtype), values)
    return y_KxSxGxd.swapaxes(0, 1).reshape(S, H, d)


class _Plan(NamedTuple):
    """All live pages of a shard's rows, one behind the other, padded to whole blocks."""

    row_M: jax.Array  # int32, whose
    page_M: jax.Array  # int32, number in layer 0
    first_M: jax.Array  # int32, position of the page's first token
    live_M: jax.Array  # bool


def _plan(rows: Rows, page_tokens: int) -> _Plan:
    S, R = rows.table_SxR.shape
    M = -(-S * R // _BLOCK) * _BLOCK
    count_S = jnp.where(rows.active_S, rows.position_S // page_tokens + 1, 0)
    end_S = jnp.cumsum(count_S)
    index_M = jnp.arange(M)
    row_M = jnp.searchsorted(end_S, index_M, side="right", method="compare_all")
    row_M = jnp.minimum(row_M, S - 1)
    column_M = jnp.clip(index_M - (end_S - count_S)[row_M], 0, R - 1)
    page_M = rows.table_SxR[row_M, column_M]
    return _Plan(row_M, page_M, column_M * page_tokens, index_M < end_S[-1])


def _read_pages(g, q_SxHxd, keys, values, layer, rows, plan):
    S, H, d = q_SxHxd.shape
    K = keys.shape[0]
    G, P = H // K, g.page_tokens
    q_KxSxGxd = q_SxHxd.reshape(S, K, G, d).swapaxes(0, 1) * d**-0.5
    f32 = dict(preferred_element_type=jnp.float32)

    def step(i, carry):
        top_KxSxG, sum_KxSxG, y_KxSxGxd = carry
        row_M, page_M, first_M, live_M = (
            jax.lax.dynamic_slice_in_dim(x, i * _BLOCK, _BLOCK) for x in plan
        )
        scores = jnp.einsum(
            "KMGd,KMPd->KMGP", q_KxSxGxd[:, row_M], keys[:, layer * g.pages + page_M], **f32
        )
        token_MxP = first_M[:, None] + jnp.arange(P)
        seen_MxP = live_M[:, None] & (token_MxP <= rows.position_S[row_M][:, None])
        scores = jnp.where(seen_MxP[None, :, None], scores, _MASKED)
        # Each page by itself, then pages into rows: the largest score first, sums by a product
        # with the matrix of ownership (a scatter would run one element at a time on CPU).
        page_top_KxMxG = scores.max(-1)
        own_SxM = (row_M == jnp.arange(S)[:, None]) & live_M
        tops = jnp.where(own_SxM[None, :, :, None], page_top_KxMxG[:, None], _MASKED).max(2)
        new_top_KxSxG = jnp.maximum(top_KxSxG, tops)
        weights = jnp.exp(scores - new_top_KxSxG[:, row_M][..., None])
        y_KxMxGxd = jnp.einsum(
            "KMGP,KMPd->KMGd",
            weights.astype(values.dtype),
            values[:, layer * g.pages + page_M],
            **f32,
        )
        own, fade = own_SxM.astype(jnp.float32), jnp.exp(top_KxSxG - new_top_KxSxG)
        sum_KxSxG = sum_KxSxG * fade + jnp.einsum("SM,KMG->KSG", own, weights.sum(-1))
        y_KxSxGxd = y_KxSxGxd * fade[..., None] + jnp.einsum("SM,KMGd->KSGd", own, y_KxMxGxd)
        return new_top_KxSxG, sum_KxSxG, y_KxSxGxd

    blocks = -(-plan.live_M.sum() // _BLOCK)
    zeros = jnp.zeros((K, S, G), jnp.float32)
    start = (zeros + _MASKED, zeros, jnp.zeros((K, S, G, keys.shape[-1]), jnp.float32))
    _, sum_KxSxG, y_KxSxGxd = jax.lax.fori_loop(0, blocks, step, start)
    y = y_KxSxGxd / jnp.maximum(sum_KxSxG, 1e-30)[..., None]
    return y.swapaxes(0, 1).reshape(S, H, -1)
