"""Attention of one new token a row over its pages, for TPU: a Pallas kernel that also rotates the
token's queries and key and stores its key and value. What it shares with the kernel of several
queries is in paged_blocks.py.

What decoding costs is reading keys and values from HBM. A core works through a list of rows; of
each row it copies blocks of several live pages to VMEM, `_AHEAD` blocks before they are needed and
across the ends of rows, so that the latency of a copy is paid once a call. The new key and value
join a row's last block on its way, and the tile that holds them goes back to the pool. On chips
whose two cores work as one (v4, v5p) each has a list. Page numbers, which the host gives
(rollout/schedule.py), are not checked. Of a quantized pool whole numbers become the queries' dtype,
which has them exactly, and scales multiply scores and weights, not keys and values.

Dims: S rows, R pages of a row's table, K key/value heads, G query heads a key/value head, padded to
whole registers, N pages, P tokens of a page, d head_dim, C cores, W rows of a core's list, B pages
of a block, T tokens of a block.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import div, rem  # of what is never negative; // also asks for signs

_BLOCK_TOKENS = 1024  # read together: amortizes the latencies of a step of the softmax
_AHEAD = 7  # blocks in flight: 3.5 MB of 128 dimensions in bfloat16, 2.1 us of v6e's stream
_LEAVING = 4  # rows whose results are still on their way to HBM
_VMEM = 16 << 20  # bytes, what a kernel may have unasked; buffers take a third
_TILE = 16  # tokens written back together: as many as share a register in bfloat16; int8: twice


class Work(NamedTuple):
    """Which rows each core reads, in order; the same for all layers of a token."""

    rows_CxW: jax.Array  # int32, row numbers; those from `count` on are filler
    count_C: jax.Array  # int32
    length_S: jax.Array  # int32, tokens that a row sees, with the new one; 0 = idle, not listed
    table_SxR: jax.Array  # int32
    turn_Sx3d: jax.Array  # float32, of `turn`


# Logical axes: rows, and the lists of them, lie over `batch`.
WORK_AXES = Work(("batch", None), ("batch",), ("batch",), ("batch", None), ("batch", None))


def turn(cos_Sxh: jax.Array, sin_Sxh: jax.Array, d: int) -> jax.Array:
    """Rotary angles as three stretches of d lanes, [S, 3 d]: x turns into x times the first, plus x
    from h lanes on times the second, plus x from h lanes before times the third. h: half a head,
    of which lanes from 2 h on are padding."""
    S, h = cos_Sxh.shape
    rest, zero = jnp.zeros((S, d - 2 * h)), jnp.zeros((S, h))
    parts = cos_Sxh, cos_Sxh, rest, -sin_Sxh, zero, rest, zero, sin_Sxh, rest
    return jnp.concatenate(parts, axis=1)


def work(length_S: jax.Array, table_SxR: jax.Array, turn_Sx3d: jax.Array, cores: int) -> Work:
    """Rows with a length above 0, dealt out to the cores longest first and there and back (0, 1, 1,
    0, 0, ...), which leaves their sums closer than the longest row is long."""
    S = length_S.shape[0]
    W = -(-S // cores)

    def dealt(x_S):
        x_WxC = jnp.pad(x_S, (0, W * cores - S)).reshape(W, cores)
        return jnp.where(jnp.arange(W)[:, None] % 2 == 1, x_WxC[:, ::-1], x_WxC).T

    order_S = jnp.argsort(-length_S).astype(jnp.int32)
    live_CxW = dealt(jnp.arange(S) < (length_S > 0).sum())
    count_C = live_CxW.sum(1, dtype=jnp.int32)
    return Work(dealt(order_S), count_C, length_S, table_SxR, turn_Sx3d)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., d] as int8 and float32 scales [..., 1] = max |x| / 127; errors are <= scale / 2."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int32).astype(jnp.int8), scale


def attend(
    q_SxHxd, k_SxKxd, v_SxKxd, pages: tuple[jax.Array, ...], first, todo: Work, head_dim: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Rotate q and k, store each listed row's new key and value as its last token, in the place of
    the pool, and read all: (pages, attention of [S, H, d] in q's dtype, 0 for idle rows). pages:
    keys and values [K, N, P, d], in q's dtype or int8 with float32 scales [K, N, 2, P]. first:
    int32, the number of the page that tables call 0. head_dim: the model's, where d is padded.
    Products take q's dtype and add up in float32, in which rotation and softmax are; the softmax's
    weights are rounded to q's dtype."""
    kernel, new = functools.partial(_kernel, head_dim=head_dim), (q_SxHxd, k_SxKxd, v_SxKxd)
    return call(kernel, new, pages, first, todo, todo.length_S > 0)


def call(kernel, new, pages, first, todo: Work, live_S, counts=(), queries=1):
    """`attend` by a kernel. new: (q, k, v). live_S: bool. counts: int32 [S] that it takes before
    the other scalars. queries: places of a row at most, Q. Buffers hold what leaves of a row and
    head: [Q, 1, G d] of attention, keys and values of as many tiles as its places can be in."""
    from jax.experimental import pallas as pl  # here: it takes 0.2 s, and where no kernel runs
    from jax.experimental.pallas import tpu as pltpu  # nobody should wait for it

    from dapo_jax.model.paged_blocks import ROWS, rows_of

    S, H, d = new[0].shape
    K, _, P, _ = pages[0].shape
    kind, dtype, n = new[0].dtype, pages[0].dtype, len(pages)
    B = min(max(1, _BLOCK_TOKENS // P), todo.table_SxR.shape[1])
    below = -S % ROWS + rows_of(queries) - ROWS  # a row's places are loaded as if all were there
    rows = (x.reshape(S, -1).astype(jnp.float32) for x in (*new, todo.turn_Sx3d))
    rows = [jnp.pad(x, [(0, below), (0, 0)]) for x in rows]
    full = S * todo.table_SxR.shape[1] * P * d  # how long rows are is not known here
    scalars = *counts, first.reshape(1), todo.count_C, todo.rows_CxW.reshape(-1), todo.length_S
    here, there = (pl.BlockSpec(memory_space=x) for x in (pltpu.VMEM, pl.ANY))
    tiles = _LEAVING, min(queries, 2), 2
    block = [pltpu.VMEM((_AHEAD + 1, B, P, d), dtype)] * 2
    tile = [pltpu.VMEM((*tiles, math.gcd(_TILE * (n - 1), P), d), dtype)]
    if n > 2:
        block.append(pltpu.VMEM((_AHEAD + 1, B, 2, P), jnp.float32))
        tile.append(pltpu.VMEM((*tiles, P), jnp.float32))
    y_Sx1xHd, *pages = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars) + 1,
            grid=todo.count_C.shape,
            in_specs=[here] * 4 + [there] * n,
            out_specs=[there] * (1 + n),
            scratch_shapes=[
                *block,
                pltpu.VMEM((_LEAVING, queries, 1, H // K * d), kind),
                *tile,
                pltpu.SemaphoreType.DMA((_AHEAD + 1,)),
                pltpu.SemaphoreType.DMA((_LEAVING,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((S, 1, H * d), kind),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages),
        ],
        input_output_aliases={len(scalars) + 5 + i: 1 + i for i in range(n)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=max(_VMEM, _VMEM // 2 + 2 * sum(x.nbytes for x in rows)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * H * full, transcendentals=0, bytes_accessed=2 * K * full * dtype.itemsize
        ),
        name="decode_attention",
    )(*scalars, todo.table_SxR.reshape(-1), *rows, *pages)
    return tuple(pages), jnp.where(live_S[:, None], y_Sx1xHd[:, 0], 0).reshape(S, H, d)


def _kernel(*refs, head_dim: int):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from dapo_jax.model.paged_blocks import ROWS, Blocks

    at = Blocks(refs, head_dim)
    P, d, heads, tile, quantized = at.P, at.d, at.heads, at.tile, at.quantized
    G = -(-heads // ROWS) * ROWS

    def new_of(row, head):
        """A row's queries of a head, [G, d], key and value, [1, d], these as they are quantized or
        in the pool's dtype."""
        rotated, q_1xGd = at.rotation(row), at.stretch(at.q, row, head, heads * d)
        parts = [q_1xGd[:, g * d : (g + 1) * d] for g in range(heads)]
        q_Gxd = jnp.concatenate([*parts, jnp.zeros((G - heads, d))] if heads < G else parts)
        k_1xd, v_1xd = (at.stretch(x, row, head, d) for x in (at.k, at.v))
        new = rotated(q_Gxd), rotated(k_1xd), v_1xd
        if quantized:
            return new[0].astype(at.y_buffer.dtype), *new[1:]
        return tuple(x.astype(at.buffers[0].dtype) for x in new)

    def leaving(spot, row, head, page, offset):
        """The copies of what a row and head makes: attention, the tiles of its key and value."""
        pairs = [(at.y_buffer.at[spot, 0], at.y.at[row, :, at.lanes(head, heads * d)])]
        for j in range(2):
            place = at.pages[j].at[head, page, pl.ds(offset, tile)]
            pairs.append((at.tile_buffers[0].at[spot, 0, j], place))
        if quantized:
            pairs.append((at.tile_buffers[1].at[spot, 0], at.pages[2].at[head, page]))
        return [pltpu.make_async_copy(*pair, at.left.at[spot]) for pair in pairs]

    def wait_left(spot):  # all are of the same size, whoever waits
        for copy in leaving(spot, 0, 0, 0, 0):
            copy.wait()

    def one_head(item, carry):
        cursor, slot = carry
        n, head = div(item, at.K), rem(item, at.K)
        row, length, last = at.row_at(n)
        q_Gxd, *new = new_of(row, head)
        cursor, slot, softmax = at.whole(q_Gxd, last, cursor, slot)
        cursor = at.start_ahead(cursor, slot)
        spot = rem(item, _LEAVING)
        pl.when(item >= _LEAVING)(lambda: wait_left(spot))
        at.wait_last(slot, length)

        token = length - 1 - last * at.T  # the new one, in the block
        p, offset = div(token, P), pl.multiple_of(div(rem(token, P), tile) * tile, tile)
        own = jax.lax.broadcasted_iota(jnp.int32, (tile, d), 0) == rem(token, tile)
        for j, new_1xd in enumerate(new):
            buffer, there = at.buffers[j], (slot, p, pl.ds(offset, tile))
            if quantized:
                new_1xd, scale = quantize(new_1xd)
                mine = jax.lax.broadcasted_iota(jnp.int32, (1, P), 1) == rem(token, P)
                old = at.buffers[2][slot, p, j : j + 1]
                at.buffers[2][slot, p, j : j + 1] = jnp.where(mine, scale, old)
                at.tile_buffers[1][spot, 0, j : j + 1] = jnp.where(mine, scale, old)
                old = buffer[there].astype(jnp.int32)  # registers of bytes are not masked
                tokens = jnp.where(own, new_1xd.astype(jnp.int32), old).astype(buffer.dtype)
            else:
                tokens = jnp.where(own, new_1xd, buffer[there])
            buffer[there] = tokens
            at.tile_buffers[0][spot, 0, j] = tokens
        _, sum_Gx1, y_Gxd = at.step(q_Gxd, slot, softmax, token + 1)
        y_Gxd = (y_Gxd / sum_Gx1).astype(at.y_buffer.dtype)
        for g in range(heads):
            at.y_buffer[spot, 0, :, g * d : (g + 1) * d] = y_Gxd[g : g + 1]
        for copy in leaving(spot, row, head, at.page_of(row, div(length - 1, P)), offset):
            copy.start()
        return cursor, rem(slot + 1, at.depth)

    items = at.count * at.K
    jax.lax.fori_loop(0, items, one_head, at.begin())
    jax.lax.fori_loop(0, jnp.minimum(items, _LEAVING), lambda spot, _: wait_left(spot), None)
