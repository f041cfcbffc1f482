"""Attention of one new token a row over its pages, for TPU: a Pallas kernel that also rotates the
token's queries and key and stores its key and value.

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

_BLOCK_TOKENS = 1024  # read together: amortizes the latencies of a step of the softmax
_AHEAD = 7  # blocks in flight: 3.5 MB of 128 dimensions in bfloat16, 2.1 us of v6e's stream
_LEAVING = 4  # rows whose results are still on their way to HBM
_VMEM = 16 << 20  # bytes, what a kernel may have unasked; buffers take a third
_ROWS = 8  # that share a register in float32
_TILE = 16  # tokens written back together: as many as share a register in bfloat16; int8: twice
_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN


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
    from jax.experimental import pallas as pl  # here: it takes 0.2 s, and where no kernel runs
    from jax.experimental.pallas import tpu as pltpu  # nobody should wait for it

    S, H, d = q_SxHxd.shape
    K, _, P, _ = pages[0].shape
    dtype, n = pages[0].dtype, len(pages)
    B = min(max(1, _BLOCK_TOKENS // P), todo.table_SxR.shape[1])
    rows = (x.reshape(S, -1) for x in (q_SxHxd, k_SxKxd, v_SxKxd, todo.turn_Sx3d))
    rows = [jnp.pad(x.astype(jnp.float32), [(0, -S % _ROWS), (0, 0)]) for x in rows]
    full = S * todo.table_SxR.shape[1] * P * d  # how long rows are is not known here
    scalars = first.reshape(1), todo.count_C, todo.rows_CxW.reshape(-1), todo.length_S
    here, there = (pl.BlockSpec(memory_space=x) for x in (pltpu.VMEM, pl.ANY))
    block = pltpu.VMEM((_AHEAD + 1, B, P, d), dtype)
    scale = [pltpu.VMEM((_AHEAD + 1, B, 2, P), jnp.float32)] * (n - 2)
    scale_tile = [pltpu.VMEM((_LEAVING, 2, P), jnp.float32)] * (n - 2)
    y_Sx1xHd, *pages = pl.pallas_call(
        functools.partial(_kernel, head_dim=head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=todo.count_C.shape,
            in_specs=[here] * 4 + [there] * n,
            out_specs=[there] * (1 + n),
            scratch_shapes=[
                block,
                block,
                *scale,
                pltpu.VMEM((_LEAVING, 1, H // K * d), q_SxHxd.dtype),
                pltpu.VMEM((_LEAVING, 2, math.gcd(_TILE * (n - 1), P), d), dtype),
                *scale_tile,
                pltpu.SemaphoreType.DMA((_AHEAD + 1,)),
                pltpu.SemaphoreType.DMA((_LEAVING,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((S, 1, H * d), q_SxHxd.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages),
        ],
        input_output_aliases={9 + i: 1 + i for i in range(n)},  # counted with the five scalars
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
    y_SxHd = jnp.where((todo.length_S > 0)[:, None], y_Sx1xHd[:, 0], 0)
    return tuple(pages), y_SxHd.reshape(S, H, d)


def _kernel(*refs, head_dim: int):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    first_ref, count_ref, rows_ref, length_ref, table_ref, *refs = refs
    q_ref, k_ref, v_ref, turn_ref, *refs = refs
    quantized = len(refs) == 15  # there are scales beside keys and values
    n = 2 + quantized
    y_ref, pages_refs, buffers = refs[n], refs[n + 1 : 2 * n + 1], refs[2 * n + 1 : 3 * n + 1]
    y_buffer, *tile_buffers, arrived, left = refs[3 * n + 1 :]
    (k_buffer, v_buffer), tile_buffer = buffers[:2], tile_buffers[0]
    depth, B, P, d = k_buffer.shape
    S, K = length_ref.shape[0], k_ref.shape[1] // d
    heads = q_ref.shape[1] // (K * d)  # of a key/value head
    G = -(-heads // 8) * 8
    R, W = table_ref.shape[0] // S, rows_ref.shape[0] // pl.num_programs(0)
    T, tile = B * P, tile_buffer.shape[2]
    core = pl.program_id(0)
    count = count_ref[core]
    div, rem = jax.lax.div, jax.lax.rem  # of what is never negative; // also asks for signs

    def row_at(n):
        """(row, its length, its last block) of the n-th of the core's rows."""
        row = rows_ref[core * W + jnp.minimum(n, W - 1)]
        length = length_ref[row]
        return row, length, div(length - 1, T)

    def page_of(row, column):
        return first_ref[0] + table_ref[row * R + column]

    def copies(head, page, slot, p):
        """Copies of one page to place p of a buffer."""
        return [
            pltpu.make_async_copy(pages.at[head, page], buffer.at[slot, p], arrived.at[slot])
            for pages, buffer in zip(pages_refs, buffers, strict=True)
        ]

    def last_pages(length, act):
        """act(p) for each page of a row's last block."""
        pages = div(rem(length - 1, T), P) + 1
        jax.lax.fori_loop(0, pages, lambda p, _: act(p), None)

    def start(cursor, slot):
        """Start the copies of the block at `cursor`, (n, head, block); returns the one after it."""
        n, head, i = cursor
        row, length, last = row_at(n)

        def page(p):
            for copy in copies(head, page_of(row, i * B + p), slot, p):
                copy.start()

        pl.when((n < count) & (i < last))(lambda: [page(p) for p in range(B)] and None)
        pl.when((n < count) & (i == last))(lambda: last_pages(length, page))
        ends = i == last
        row_ends = ends & (head == K - 1)
        return (
            n + row_ends.astype(jnp.int32),
            jnp.where(ends, jnp.where(row_ends, 0, head + 1), head),
            jnp.where(ends, 0, i + 1),
        )

    def scales(slot, which):
        """Scales of a block's keys (0) or values (1), [1, T]."""
        return jnp.concatenate([buffers[2][slot, p, which : which + 1] for p in range(B)], axis=1)

    def step(q_Gxd, slot, softmax, tokens=None):
        """Take a block into the softmax, or its first `tokens`."""
        top_Gx1, sum_Gx1, y_Gxd = softmax
        k_Txd, v_Txd = k_buffer[slot].reshape(T, d), v_buffer[slot].reshape(T, d)
        if quantized:
            k_Txd, v_Txd = k_Txd.astype(q_Gxd.dtype), v_Txd.astype(q_Gxd.dtype)
        f32 = dict(preferred_element_type=jnp.float32)
        scores_GxT = jax.lax.dot_general(q_Gxd, k_Txd, (((1,), (1,)), ((), ())), **f32)
        unit = head_dim**-0.5 * math.log2(math.e)
        scores_GxT *= scales(slot, 0) * unit if quantized else unit
        if tokens is not None:
            place_GxT = jax.lax.broadcasted_iota(jnp.int32, scores_GxT.shape, 1)
            scores_GxT = jnp.where(place_GxT < tokens, scores_GxT, _MASKED)
        new_Gx1 = jnp.maximum(top_Gx1, scores_GxT.max(-1, keepdims=True))
        weights_GxT = jnp.exp2(scores_GxT - new_Gx1)
        fade_Gx1 = jnp.exp2(top_Gx1 - new_Gx1)
        sum_Gx1 = sum_Gx1 * fade_Gx1 + weights_GxT.sum(-1, keepdims=True)
        if quantized:
            weights_GxT *= scales(slot, 1)
        y_Gxd = y_Gxd * fade_Gx1 + jnp.dot(weights_GxT.astype(v_Txd.dtype), v_Txd, **f32)
        return new_Gx1, sum_Gx1, y_Gxd

    def lanes(i, width):
        return pl.ds(pl.multiple_of(i * width, d), width)

    def new_of(row, head):
        """A row's queries of a head, [G, d], key and value, [1, d], these as they are quantized or
        in the pool's dtype."""

        def stretch(ref, i, width=d):  # a load starts at a multiple of _ROWS, a rotation does not
            some = ref[pl.ds(pl.multiple_of(row - rem(row, _ROWS), _ROWS), _ROWS), lanes(i, width)]
            return pltpu.roll(some, _ROWS - rem(row, _ROWS), 0)[:1]

        cos_1xd, after_1xd, before_1xd = (stretch(turn_ref, i) for i in range(3))

        def rotated(x):
            after, before = (pltpu.roll(x, n, 1) for n in (d - head_dim // 2, head_dim // 2))
            return x * cos_1xd + after * after_1xd + before * before_1xd

        q_1xGd = stretch(q_ref, head, heads * d)
        parts = [q_1xGd[:, g * d : (g + 1) * d] for g in range(heads)]
        q_Gxd = jnp.concatenate([*parts, jnp.zeros((G - heads, d))] if heads < G else parts)
        k_1xd, v_1xd = stretch(k_ref, head), stretch(v_ref, head)
        new = rotated(q_Gxd), rotated(k_1xd), v_1xd
        if quantized:
            return new[0].astype(y_buffer.dtype), *new[1:]
        return tuple(x.astype(k_buffer.dtype) for x in new)

    def leaving(spot, row, head, page, offset):
        """The copies of what a row and head makes: attention, the tiles of its key and value."""
        place = pl.ds(offset, tile)
        pairs = [
            (y_buffer.at[spot], y_ref.at[row, :, lanes(head, heads * d)]),
            (tile_buffer.at[spot, 0], pages_refs[0].at[head, page, place]),
            (tile_buffer.at[spot, 1], pages_refs[1].at[head, page, place]),
        ]
        if quantized:
            pairs.append((tile_buffers[1].at[spot], pages_refs[2].at[head, page]))
        return [pltpu.make_async_copy(*pair, left.at[spot]) for pair in pairs]

    def wait_left(spot):  # all are of the same size, whoever waits
        for copy in leaving(spot, 0, 0, 0, 0):
            copy.wait()

    def one_head(item, carry):
        cursor, slot = carry
        n, head = div(item, K), rem(item, K)
        row, length, last = row_at(n)
        q_Gxd, k_1xd, v_1xd = new_of(row, head)
        zeros = jnp.zeros((G, 1), jnp.float32)
        softmax = zeros + _MASKED, zeros, jnp.zeros((G, d), jnp.float32)

        def whole(_, carry):
            cursor, slot, softmax = carry
            cursor = start(cursor, rem(slot + _AHEAD, depth))
            for buffer in buffers:
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()
            return cursor, rem(slot + 1, depth), step(q_Gxd, slot, softmax)

        cursor, slot, softmax = jax.lax.fori_loop(0, last, whole, (cursor, slot, softmax))
        cursor = start(cursor, rem(slot + _AHEAD, depth))
        spot = rem(item, _LEAVING)
        pl.when(item >= _LEAVING)(lambda: wait_left(spot))
        last_pages(length, lambda p: [copy.wait() for copy in copies(0, 0, slot, p)] and None)

        token = length - 1 - last * T  # the new one, in the block
        p, offset = div(token, P), pl.multiple_of(div(rem(token, P), tile) * tile, tile)
        own = jax.lax.broadcasted_iota(jnp.int32, (tile, d), 0) == rem(token, tile)
        for j, (buffer, new_1xd) in enumerate(((k_buffer, k_1xd), (v_buffer, v_1xd))):
            there = (slot, p, pl.ds(offset, tile))
            if quantized:
                new_1xd, scale = quantize(new_1xd)
                mine = jax.lax.broadcasted_iota(jnp.int32, (1, P), 1) == rem(token, P)
                old = buffers[2][slot, p, j : j + 1]
                buffers[2][slot, p, j : j + 1] = jnp.where(mine, scale, old)
                tile_buffers[1][spot, j : j + 1] = jnp.where(mine, scale, old)
                old = buffer[there].astype(jnp.int32)  # registers of bytes are not masked
                tokens = jnp.where(own, new_1xd.astype(jnp.int32), old).astype(buffer.dtype)
            else:
                tokens = jnp.where(own, new_1xd, buffer[there])
            buffer[there] = tokens
            tile_buffer[spot, j] = tokens
        _, sum_Gx1, y_Gxd = step(q_Gxd, slot, softmax, token + 1)
        y_Gxd = (y_Gxd / sum_Gx1).astype(y_buffer.dtype)
        for g in range(heads):
            y_buffer[spot, :, g * d : (g + 1) * d] = y_Gxd[g : g + 1]
        for copy in leaving(spot, row, head, page_of(row, div(length - 1, P)), offset):
            copy.start()
        return cursor, rem(slot + 1, depth)

    def clear(slot):
        """Tokens that are not copied have weight 0: what stands in their place must be a number."""
        buffers[-1][slot] = jnp.zeros_like(buffers[-1][slot])  # values, or their scales

    def begin(slot, cursor):
        clear(slot)
        return start(cursor, slot)

    cursor = jax.lax.fori_loop(0, _AHEAD, begin, (jnp.int32(0),) * 3)
    clear(_AHEAD)
    items = count * K
    jax.lax.fori_loop(0, items, one_head, (cursor, jnp.int32(0)))
    jax.lax.fori_loop(0, jnp.minimum(items, _LEAVING), lambda spot, _: wait_left(spot), None)
