"""The decoder's cache: keys and values of all rows in one pool of pages, and attention over it.

A page holds the keys (or values) of `page_tokens` consecutive tokens of one row; a row is a list of
page numbers, its table. Rows take memory as they grow, and may share the pages of a prompt. The
pool is carried whole through the layers and the decode loop, and written in place. Except for the
TPU kernel, keys lie transposed, [d, P]: a product with one query takes half the time on CPU.

A quantized pool holds int8, with a float32 scale for each token and head. No key is dequantized
while decoding: the keys' scales multiply scores, those of values the weights of the softmax.

Over a mesh, the pool is split by key/value head and by group of rows (a "shard": the devices along
the `batch` axes); page numbers are local to a shard. Keys are read in one of four ways:
  'kernel'  a TPU kernel (paged_kernel.py)
  'triton'  a GPU kernel (paged_triton.py)
  'pages'   blocks of live pages, gathered (paged_xla.py)
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
from jax.sharding import Mesh

from dapo_jax import parallel
from dapo_jax.model import (
    attention,
    joined,
    paged_kernel,
    paged_queries,
    paged_triton,
    paged_xla,
    qwen2,
    rope,
)
from dapo_jax.model.packed_triton import attend as attend_packed
from dapo_jax.model.paged_kernel import quantize

_WHOLE_ROWS = 192  # longest rows that are read whole on CPU: fixed lengths gain, long tails lose
_LANES = 128  # the TPU kernel takes head dims that are multiples of this

# (keys, values) of L layers: [K, L, N, P, d] (transposed keys: d before P), without the axis of
# layers where L is 1; and where they are quantized their scales, float32 [K, L, N, 2, P]
Pages = tuple[jax.Array, ...]
Pool = tuple[Pages, ...]


class Geometry(NamedTuple):
    """Sizes of a pool; static under jit."""

    reader: str  # 'kernel' | 'triton' | 'pages' | 'rows'
    page_tokens: int  # P
    row_pages: int  # R
    pages: int  # N, of one shard
    shards: int
    arrays: int  # 1 = all layers in one array (scanned), else one array a layer
    layers: int  # L, of one array
    kv_heads: int
    head_dim: int  # as stored: padded for the kernel
    cores: int = 1  # of a device, that the kernel shares its rows out to
    quantized: bool = False  # int8 and scales in place of numbers of the compute dtype
    queries: int = 1  # places that one row may have, at positions one behind the other

    @property
    def transposed(self) -> bool:
        """Whether the keys of a page are [d, P]."""
        return self.reader != "kernel"

    @property
    def gathers(self) -> bool:
        """Whether several places may read one row's page, where a page is a whole row."""
        return self.queries > 1

    @property
    def by_kernel(self) -> bool:
        """Whether an accelerator's own kernel reads, and not XLA."""
        return self.reader in ("kernel", "triton")

    @property
    def stack(self) -> tuple[int, ...]:
        """The axis of layers, where an array has one."""
        return () if self.layers == 1 else (self.layers,)

    @property
    def pages_axes(self):
        """Logical axes of each array of `Pages`."""
        axes = ("kv_heads", *[None for _ in self.stack], "batch", None, None)
        return (axes,) * (3 if self.quantized else 2)

    @property
    def tokens(self) -> int:
        """Tokens that all shards together can hold."""
        return self.shards * self.pages * self.page_tokens


class CacheRows(NamedTuple):
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


PROMPT_AXES = Prompts(("batch", None), ("batch", None), ("batch",), ())


def geometry(
    shape: qwen2.Shape,
    platform: str,
    *,
    slots: int,
    shards: int,
    row_tokens: int,
    page_tokens: int,
    fraction: float,
    cores: int = 1,
    quantized: bool = False,
    queries: int = 1,
) -> Geometry:
    """Sizes for `slots` rows of at most `row_tokens` tokens, over `shards` groups of rows.
    page_tokens 0: what is fast. fraction: of the pages that all rows at full length take."""
    if page_tokens == 0:
        page_tokens = 128 if platform == "tpu" else 64
        page_tokens = row_tokens if platform == "cpu" and row_tokens <= _WHOLE_ROWS else page_tokens
    together = 32 if platform == "tpu" and quantized else 8  # tokens that share a register
    page_tokens = -(-min(page_tokens, row_tokens) // together) * together
    row_pages = -(-row_tokens // page_tokens)
    reader = "kernel" if platform == "tpu" else "rows" if row_pages == 1 else "pages"
    group = shape.num_heads // shape.num_kv_heads
    triton = platform == "gpu" and paged_triton.fits(page_tokens, shape.head_dim, group)
    reader = "triton" if triton and reader == "pages" else reader
    lanes = _LANES if reader == "kernel" else 1
    rows = slots // shards
    arrays = 1 if shape.scan_layers else shape.num_layers
    pages = rows if reader == "rows" else max(row_pages, math.ceil(fraction * rows * row_pages))
    return Geometry(
        reader, page_tokens, row_pages, pages, shards, arrays, layers=shape.num_layers // arrays,
        kv_heads=shape.num_kv_heads, head_dim=-(-shape.head_dim // lanes) * lanes, cores=cores,
        quantized=quantized, queries=queries,
    )  # fmt: skip


def vector_bytes(g: Geometry, dtype) -> int:
    """Bytes of one key or value in the pool, with its scale."""
    return g.head_dim + 4 if g.quantized else g.head_dim * jnp.dtype(dtype).itemsize


def pool_bytes(g: Geometry, dtype) -> int:
    """Bytes of the whole pool, all devices together."""
    return g.tokens * 2 * g.kv_heads * g.layers * g.arrays * vector_bytes(g, dtype)


def pool_sharding(g: Geometry, mesh: Mesh, rules: parallel.Rules):
    return parallel.shardings((g.pages_axes,) * g.arrays, mesh, rules)


def new_pool(g: Geometry, dtype) -> Pool:
    """Zeros; dtype: of a pool that is not quantized. XLA's readers, which are a CPU's, hold
    bfloat16 as uint16: XLA on CPUs has neither scatter nor gather of bfloat16, and would turn the
    whole pool into float32 and back for each token."""
    if g.reader in ("rows", "pages") and jnp.dtype(dtype) == jnp.bfloat16:
        dtype = jnp.uint16
    size, page = (g.kv_heads, *g.stack, g.shards * g.pages), (g.page_tokens, g.head_dim)
    dtype = jnp.int8 if g.quantized else dtype

    def pages():
        keys = jnp.zeros((*size, *(page[::-1] if g.transposed else page)), dtype)
        scales = [jnp.zeros((*size, 2, g.page_tokens))] if g.quantized else []
        return keys, jnp.zeros((*size, *page), dtype), *scales

    return tuple(pages() for _ in range(g.arrays))


def copy_pages(g: Geometry, pool: Pool, source_S, target_S) -> Pool:
    """Copy page source[i] to target[i] of the same shard, in every layer; target N = no copy."""

    def local(pool, source_S, target_S):
        move = lambda x: x.at[..., target_S, :, :].set(x[..., source_S, :, :], mode="drop")
        return jax.tree.map(move, pool)

    pools, row = (g.pages_axes,) * g.arrays, ("batch",)
    return parallel.per_shard(local, (pools, row, row), pools)(pool, source_S, target_S)


# --- One layer's attention, as `Qwen2.cached` calls it --------------------------------------------


def decode_attend(g: Geometry, rows: CacheRows):
    """attend(angles)(layer, pool, q, k, v) for one new token a row: rotates q and k, writes the key
    and value, and reads."""
    axes, heads = CacheRows(("batch", None), ("batch",), ("batch",)), ("batch", "heads", None, None)
    kv, angle = ("batch", "kv_heads", None, None), ("batch", None, None, None)
    rotates = g.reader == "kernel" or (g.reader == "triton" and not g.gathers)  # and stores

    def attend(angles):
        plan = plan_axes = []  # the same in every layer
        if g.reader == "pages":
            plan_axes = paged_xla.Plan(*[("batch",)] * 6)
            make = functools.partial(paged_xla.plan_of, page_tokens=g.page_tokens)
            plan = parallel.per_shard(make, (axes,), plan_axes)(rows)
        elif g.reader == "kernel":
            plan_axes = paged_queries.PASS_AXES if g.gathers else paged_kernel.WORK_AXES
            make = functools.partial(_kernel_plan, g)
            plan = parallel.per_shard(make, (axes, (angle, angle)), plan_axes)(rows, angles)
        elif rotates:
            plan_axes, plan = ("batch", None), paged_triton.turn(*(x[:, 0, 0] for x in angles))
        act = functools.partial(_write_and_read if rotates else _write_then_read, g)

        def attend_layer(layer, pool, *given):
            if not rotates:
                q, k, v = joined.apart(given, g.kv_heads)
                given = rope.rotate(q, angles), rope.rotate(k, angles), v
            given_axes = (heads, kv, kv) if len(given) == 3 else (angle,)
            arguments = ((), g.pages_axes, given_axes, axes, plan_axes)
            mapped = parallel.per_shard(act, arguments, (g.pages_axes, heads))
            return _with_layer(g, pool, layer, lambda *place: mapped(*place, given, rows, plan))

        return attend_layer

    return attend


def _write_then_read(g: Geometry, layer, pages, heads, rows: CacheRows, plan):
    """Writes and attends on one device in one layer, by XLA: (pages, [S, H, 1, d])."""
    q, k, v = heads
    column_Sx1 = (rows.position_S // g.page_tokens)[:, None]
    page_S = jnp.take_along_axis(rows.table_SxR, column_Sx1, axis=1)[:, 0]
    place = layer * g.pages + page_S, rows.position_S % g.page_tokens, rows.active_S
    pages = _store(g, pages, k.swapaxes(0, 1), v.swapaxes(0, 1), *place)
    readers = dict(pages=paged_xla.read_pages, rows=paged_xla.read_rows, triton=_read_by_triton)
    y = readers[g.reader](g, q[:, :, 0], pages, layer, rows, plan).astype(q.dtype)[:, :, None]
    return _stacked(pages, g), y


def _read_by_triton(g, q_SxHxd, pages, layer, rows, plan):
    return paged_triton.attend(q_SxHxd, pages, layer * g.pages, rows)


def _write_and_read(g: Geometry, layer, pages, heads, rows: CacheRows, plan):
    """The same by the kernel, which also rotates q and k."""
    pages = _flat(pages, g)
    if g.reader == "triton":
        given = jnp.concatenate(heads, 1)[:, :, 0], pages, layer * g.pages, rows, plan
        pages, y = paged_triton.attend(*given)
        return _stacked(pages, g), y[:, :, None]
    d, new = heads[0].shape[-1], (_padded(x[:, :, 0], g) for x in heads)
    given = *new, pages, layer * g.pages, plan, d
    pages, y = paged_queries.attend(*given, g.queries) if g.gathers else paged_kernel.attend(*given)
    return _stacked(pages, g), y[:, :, None, :d]


def _kernel_plan(g: Geometry, rows: CacheRows, angles) -> paged_kernel.Work | paged_queries.Passes:
    length_S = jnp.where(rows.active_S, rows.position_S + 1, 0)
    cos, sin = (x[:, 0, 0] for x in angles)
    turn = paged_kernel.turn(cos, sin, g.head_dim)
    if g.gathers:
        return paged_queries.passes(length_S, rows.table_SxR, turn, g.cores, g.queries)
    return paged_kernel.work(length_S, rows.table_SxR, turn, g.cores)


def prefill_attend(g: Geometry, prompts: Prompts, chunk: int, window: int):
    """attend(angles)(layer, pool, q, k, v) for a chunk of prompt tokens: rotates q and k, writes
    whole parts of pages, attends causally. window (static): tokens of the longest prompt, which the
    pool is not read for if it fits into one chunk. chunk: queries per step of attention."""
    T = prompts.tokens_BxT.shape[1]
    part, once = math.gcd(T, g.page_tokens), window <= T  # part: tokens written together

    def local(layer, pages, k, v, prompts):
        token_J = prompts.start + part * jnp.arange(T // part)
        column_J = jnp.minimum(token_J // g.page_tokens, g.row_pages - 1)
        page_BxJ = layer * g.pages + prompts.table_BxR[:, column_J]
        inside_BxJ = token_J < prompts.length_B[:, None]
        offset_BxJ = jnp.broadcast_to(token_J % g.page_tokens, page_BxJ.shape)
        place = (x.reshape(-1) for x in (page_BxJ, offset_BxJ, inside_BxJ))

        def pieces(x_BxKxTxd):
            B, K, _, d = x_BxKxTxd.shape
            x = x_BxKxTxd.reshape(B, K, T // part, part, d).transpose(1, 0, 2, 3, 4)
            return x.reshape(K, B * (T // part), part, d)

        pages = _store(g, pages, pieces(k), pieces(v), *place)
        seen = (k, v)
        if not once:
            table = layer * g.pages + prompts.table_BxR[:, : -(-window // g.page_tokens)]
            seen = _gather(pages[0], table, g.transposed), _gather(pages[1], table)
            seen = tuple(x[..., : k.shape[-1]] for x in seen)
        if g.quantized:  # as the cache has them, so that chunks of a prompt do not show
            scales = () if once else _gather_scales(pages, table)
            whole = map(quantize, seen) if once else zip(seen, scales, strict=True)
            seen = tuple((x.astype(jnp.float32) * s).astype(k.dtype) for x, s in whole)
        return _stacked(pages, g), seen

    kv = ("batch", "kv_heads", None, None)
    arguments = ((), g.pages_axes, kv, kv, PROMPT_AXES)
    mapped = parallel.per_shard(local, arguments, (g.pages_axes, (kv, kv)))

    def attend(angles, layer, pool, *heads):
        q, k, v = joined.apart(heads, g.kv_heads)
        q, k = rope.rotate(q, angles), rope.rotate(k, angles)
        pool, seen = _with_layer(g, pool, layer, lambda *place: mapped(*place, k, v, prompts))
        if once and g.reader == "triton" and q.dtype == jnp.bfloat16:
            return pool, attend_packed(q, *seen, jnp.ones_like(prompts.tokens_BxT), "")
        return pool, attention.causal(q, *seen, 0 if once else prompts.start, chunk)

    return lambda angles: functools.partial(attend, angles)


def _with_layer(g: Geometry, pool: Pool, layer, act):
    """Run act(layer in its array, its pages) -> (pages, out); returns (pool, out)."""
    if g.arrays == 1:
        pages, out = act(jnp.int32(layer), pool[0])
        return (pages,), out
    pages, out = act(jnp.int32(0), pool[layer])
    return (*pool[:layer], pages, *pool[layer + 1 :]), out


def _flat(pages: Pages, g: Geometry) -> Pages:
    """All layers' pages in one row of pages: [K, L N, P, d]."""
    return tuple(x.reshape(x.shape[0], g.layers * g.pages, *x.shape[-2:]) for x in pages)


def _stacked(pages: Pages, g: Geometry) -> Pages:
    return tuple(x.reshape(x.shape[0], *g.stack, g.pages, *x.shape[-2:]) for x in pages)


def _padded(x, g: Geometry):
    missing = g.head_dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _store(g: Geometry, pages, k_KxWxuxd, v_KxWxuxd, page_W, offset_W, keep_W) -> Pages:
    """W pieces of u tokens into the pool, piece w from `offset` of its page on: the flat pages.
    Heads are part of the index: XLA on CPU would transpose the whole pool for each write if they
    were a dimension that every update spans."""
    K, W, u, _ = k_KxWxuxd.shape
    M, P, d = g.layers * g.pages, g.page_tokens, g.head_dim
    page_W = jnp.where(keep_W, page_W, K * M)  # out of range for every head: dropped
    page_KxW = jnp.arange(K)[:, None] * M + page_W

    def tokens(pages, new_KxWxuxd):  # one index counts pieces from the first page on
        piece = (d,) if u == 1 else (u, d)
        spot = (page_KxW * (P // u) + offset_W // u).reshape(-1)
        new = _padded(new_KxWxuxd, g).reshape(K * W, *piece)
        out = pages.reshape(K * M * (P // u), *piece).at[spot].set(new, mode="drop")
        return out.reshape(K, M, P, d)

    def columns(pages, new_KxWxuxd):  # one index counts rows of one component of a page
        row = page_KxW[:, :, None, None] * d + jnp.arange(d)
        column = offset_W[:, None] + jnp.arange(u)
        row = jnp.broadcast_to(row, new_KxWxuxd.shape)
        column = jnp.broadcast_to(column[None, :, :, None], row.shape)
        out = pages.reshape(K * M * d, P).at[row, column].set(new_KxWxuxd, mode="drop")
        return out.reshape(K, M, d, P)

    def by_token(scales, new_KxWx2xu):
        spot = (page_KxW[..., None] * 2 + jnp.arange(2)) * (P // u) + offset_W[:, None] // u
        out = scales.reshape(K * M * 2 * (P // u), u).at[spot.reshape(-1)]
        return out.set(new_KxWx2xu.reshape(-1, u), mode="drop").reshape(K, M, 2, P)

    keys, values, *scales = _flat(pages, g)
    if g.quantized:
        (k_KxWxuxd, k_scale), (v_KxWxuxd, v_scale) = quantize(k_KxWxuxd), quantize(v_KxWxuxd)
        scales = [by_token(*scales, jnp.stack([k_scale[..., 0], v_scale[..., 0]], 2))]
    keys = (columns if g.transposed else tokens)(keys, paged_xla.held(k_KxWxuxd, keys))
    return keys, tokens(values, paged_xla.held(v_KxWxuxd, values)), *scales


def _gather(pages_KxMxPxd, table_BxQ, transposed: bool = False):
    """The listed pages of each prompt as one stretch of tokens: [B, K, Q P, d]."""
    found = paged_xla.numbers(pages_KxMxPxd[:, table_BxQ])
    found = found.swapaxes(-1, -2) if transposed else found
    K, B, Q, P, d = found.shape
    return found.transpose(1, 0, 2, 3, 4).reshape(B, K, Q * P, d)


def _gather_scales(pages: Pages, table_BxQ):
    """Scales of keys and of values in the order of `_gather`: [B, K, Q P, 1] each."""
    found = pages[2][:, table_BxQ]
    K, B, Q, _, P = found.shape
    return found.transpose(3, 1, 0, 2, 4).reshape(2, B, K, Q * P, 1)
