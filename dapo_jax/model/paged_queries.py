"""Attention of a row's new token and of guesses that follow it, for TPU: paged_kernel.py with
several queries of a row, whose pages are read once for all of them.

The new token and its guesses (rollout/drafts.py) stand at consecutive positions and in places one
behind the other. All their keys join the row's last blocks before any query meets them, and each
query sees the keys up to its own. A query's blocks, and the order in which they are added up, are
those that it has alone: the same bits, whoever stands beside it. A product with few queries takes
its time by keys, so that a pass of four takes hardly more of it than one of one.

Dims: as paged_kernel.py; Q places of a row at most, M = Q G queries padded to whole registers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.model import paged_kernel
from dapo_jax.model.paged_kernel import (
    _AHEAD,
    _BLOCK_TOKENS,
    _LEAVING,
    _MASKED,
    _ROWS,
    _TILE,
    _VMEM,
    Work,
    quantize,
)  # fmt: skip


class Passes(NamedTuple):
    """`Work` of rows, and which places are whose; the same for all layers of a token."""

    work: Work  # a row by its first place, its length with that place's token
    count_S: jax.Array  # int32, places of the row that begins here; 0 = none does
    live_S: jax.Array  # bool


PASS_AXES = Passes(paged_kernel.WORK_AXES, ("batch",), ("batch",))


def most(page_tokens: int, quantized: bool) -> int:
    """Places of a row, at most: their keys lie in two of the tiles that are written at once."""
    return math.gcd(_TILE * (1 + quantized), page_tokens)


def passes(length_S, table_SxR, turn_Sx3d, cores: int, queries: int) -> Passes:
    """A place goes on with the row of the place before it if it has the same pages and sees one
    token more. length_S: int32, tokens that a place sees, with its own; 0 = idle. queries: Q."""
    live_S = length_S > 0
    same_S = live_S & jnp.roll(live_S, 1) & (length_S == jnp.roll(length_S, 1) + 1)
    same_S &= (table_SxR == jnp.roll(table_SxR, 1, axis=0)).all(1)
    same_S &= jnp.arange(len(length_S)) > 0
    first_S = live_S & ~same_S
    count_S = going_S = first_S.astype(jnp.int32)
    for n in range(1, queries):
        going_S = going_S * jnp.roll(same_S, -n)  # beyond the last place stands False
        count_S = count_S + going_S
    todo = paged_kernel.work(jnp.where(first_S, length_S, 0), table_SxR, turn_Sx3d, cores)
    return Passes(todo, count_S, live_S)


def attend(
    q_SxHxd, k_SxKxd, v_SxKxd, pages: tuple[jax.Array, ...], first, todo: Passes,
    head_dim: int, queries: int,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
    """As `paged_kernel.attend`, of places. queries: places of a row at most, Q, `most` of them."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import tpu as pltpu

    S, H, d = q_SxHxd.shape
    K, _, P, _ = pages[0].shape
    dtype, n, work = pages[0].dtype, len(pages), todo.work
    tile, B = most(P, n > 2), min(max(1, _BLOCK_TOKENS // P), work.table_SxR.shape[1])
    rows = (x.reshape(S, -1) for x in (q_SxHxd, k_SxKxd, v_SxKxd, work.turn_Sx3d))
    below = -S % _ROWS + _rows_of(queries) - _ROWS  # a row's places are loaded as if all were there
    rows = [jnp.pad(x.astype(jnp.float32), [(0, below), (0, 0)]) for x in rows]
    full = S * work.table_SxR.shape[1] * P * d
    scalars = first.reshape(1), work.count_C, work.rows_CxW.reshape(-1), work.length_S, todo.count_S
    here, there = (pl.BlockSpec(memory_space=x) for x in (pltpu.VMEM, pl.ANY))
    block = pltpu.VMEM((_AHEAD + 1, B, P, d), dtype)
    scale = [pltpu.VMEM((_AHEAD + 1, B, 2, P), jnp.float32)] * (n - 2)
    scale_tile = [pltpu.VMEM((_LEAVING, 2, 2, P), jnp.float32)] * (n - 2)
    y_Sx1xHd, *pages = pl.pallas_call(
        functools.partial(_kernel, head_dim=head_dim, queries=queries),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=work.count_C.shape,
            in_specs=[here] * 4 + [there] * n,
            out_specs=[there] * (1 + n),
            scratch_shapes=[
                block,
                block,
                *scale,
                pltpu.VMEM((_LEAVING, queries, 1, H // K * d), q_SxHxd.dtype),
                pltpu.VMEM((_LEAVING, 2, 2, tile, d), dtype),
                *scale_tile,
                pltpu.SemaphoreType.DMA((_AHEAD + 1,)),
                pltpu.SemaphoreType.DMA((_LEAVING,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((S, 1, H * d), q_SxHxd.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages),
        ],
        input_output_aliases={10 + i: 1 + i for i in range(n)},  # counted with the six scalars
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=max(_VMEM, _VMEM // 2 + 2 * sum(x.nbytes for x in rows)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * H * full, transcendentals=0, bytes_accessed=2 * K * full * dtype.itemsize
        ),
        name="decode_attention",
    )(*scalars, work.table_SxR.reshape(-1), *rows, *pages)
    y_SxHd = jnp.where(todo.live_S[:, None], y_Sx1xHd[:, 0], 0)
    return tuple(pages), y_SxHd.reshape(S, H, d)


def _rows_of(queries: int) -> int:
    """Rows of whole registers that have `queries` in a row, wherever the first one is."""
    return -(-(queries + _ROWS - 1) // _ROWS) * _ROWS


def _kernel(*refs, head_dim: int, queries: int):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    first_ref, count_ref, rows_ref, length_ref, queries_ref, table_ref, *refs = refs
    q_ref, k_ref, v_ref, turn_ref, *refs = refs
    quantized = len(refs) == 15  # there are scales beside keys and values
    n = 2 + quantized
    y_ref, pages_refs, buffers = refs[n], refs[n + 1 : 2 * n + 1], refs[2 * n + 1 : 3 * n + 1]
    y_buffer, *tile_buffers, arrived, left = refs[3 * n + 1 :]
    (k_buffer, v_buffer), tile_buffer = buffers[:2], tile_buffers[0]
    depth, B, P, d = k_buffer.shape
    S, K, Q = length_ref.shape[0], k_ref.shape[1] // d, queries
    heads = q_ref.shape[1] // (K * d)  # of a key/value head
    M = -(-Q * heads // _ROWS) * _ROWS
    R, W = table_ref.shape[0] // S, rows_ref.shape[0] // pl.num_programs(0)
    T, tile = B * P, tile_buffer.shape[3]
    core = pl.program_id(0)
    count = count_ref[core]
    div, rem = jax.lax.div, jax.lax.rem  # of what is never negative; // also asks for signs

    def row_at(n):
        """(first place, position of its token, end, last block) of the n-th of the core's rows."""
        row = rows_ref[core * W + jnp.minimum(n, W - 1)]
        position = length_ref[row] - 1
        end = position + queries_ref[row]
        return row, position, end, div(end - 1, T)

    def page_of(row, column):
        return first_ref[0] + table_ref[row * R + column]

    def copies(head, page, slot, p):
        """Copies of one page to place p of a buffer."""
        return [
            pltpu.make_async_copy(pages.at[head, page], buffer.at[slot, p], arrived.at[slot])
            for pages, buffer in zip(pages_refs, buffers, strict=True)
        ]

    def last_pages(end, act):
        """act(p) for each page of a row's last block."""
        pages = div(rem(end - 1, T), P) + 1
        jax.lax.fori_loop(0, pages, lambda p, _: act(p), None)

    def start(cursor, slot):
        """Start the copies of the block at `cursor`, (n, head, block); returns the one after it."""
        n, head, i = cursor
        row, _, end, last = row_at(n)

        def page(p):
            for copy in copies(head, page_of(row, i * B + p), slot, p):
                copy.start()

        pl.when((n < count) & (i < last))(lambda: [page(p) for p in range(B)] and None)
        pl.when((n < count) & (i == last))(lambda: last_pages(end, page))
        ends = i == last
        row_ends = ends & (head == K - 1)
        return (
            n + row_ends.astype(jnp.int32),
            jnp.where(ends, jnp.where(row_ends, 0, head + 1), head),
            jnp.where(ends, 0, i + 1),
        )

    def wait_whole(slot):
        for buffer in buffers:
            pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

    def scales(slot, which):
        """Scales of a block's keys (0) or values (1), [1, T]."""
        return jnp.concatenate([buffers[2][slot, p, which : which + 1] for p in range(B)], axis=1)

    def step(q_Mxd, slot, softmax, seen_Mx1=None):
        """Take a block into the softmax, or of each query the tokens that it sees."""
        top_Mx1, sum_Mx1, y_Mxd = softmax
        k_Txd, v_Txd = k_buffer[slot].reshape(T, d), v_buffer[slot].reshape(T, d)
        if quantized:
            k_Txd, v_Txd = k_Txd.astype(q_Mxd.dtype), v_Txd.astype(q_Mxd.dtype)
        f32 = dict(preferred_element_type=jnp.float32)
        scores_MxT = jax.lax.dot_general(q_Mxd, k_Txd, (((1,), (1,)), ((), ())), **f32)
        unit = head_dim**-0.5 * math.log2(math.e)
        scores_MxT *= scales(slot, 0) * unit if quantized else unit
        if seen_Mx1 is not None:
            place_MxT = jax.lax.broadcasted_iota(jnp.int32, scores_MxT.shape, 1)
            scores_MxT = jnp.where(place_MxT < seen_Mx1, scores_MxT, _MASKED)
        new_Mx1 = jnp.maximum(top_Mx1, scores_MxT.max(-1, keepdims=True))
        weights_MxT = jnp.exp2(scores_MxT - new_Mx1)
        fade_Mx1 = jnp.exp2(top_Mx1 - new_Mx1)
        sum_Mx1 = sum_Mx1 * fade_Mx1 + weights_MxT.sum(-1, keepdims=True)
        if quantized:
            weights_MxT *= scales(slot, 1)
        y_Mxd = y_Mxd * fade_Mx1 + jnp.dot(weights_MxT.astype(v_Txd.dtype), v_Txd, **f32)
        return new_Mx1, sum_Mx1, y_Mxd

    def lanes(i, width):
        return pl.ds(pl.multiple_of(i * width, d), width)

    def by_query(parts):
        """One [Q, ...] of each query head as [M, ...]."""
        rest = jnp.zeros((M - Q * heads, *parts[0].shape[1:]), parts[0].dtype)
        parts = [*parts, rest] if Q * heads < M else parts
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def new_of(row, head):
        """A row's places in one head: queries [M, d], keys and values [Q, d] in float32."""

        def stretch(ref, i, width=d):
            n = _rows_of(Q)
            some = ref[pl.ds(pl.multiple_of(row - rem(row, _ROWS), _ROWS), n), lanes(i, width)]
            return pltpu.roll(some, n - rem(row, _ROWS), 0)[:Q]

        cos_Qxd, after_Qxd, before_Qxd = (stretch(turn_ref, i) for i in range(3))

        def rotated(x):
            after, before = (pltpu.roll(x, n, 1) for n in (d - head_dim // 2, head_dim // 2))
            return x * cos_Qxd + after * after_Qxd + before * before_Qxd

        q_QxGd = stretch(q_ref, head, heads * d)
        q_Mxd = by_query([rotated(q_QxGd[:, g * d : (g + 1) * d]) for g in range(heads)])
        return q_Mxd.astype(y_buffer.dtype), rotated(stretch(k_ref, head)), stretch(v_ref, head)

    def in_tile(new_Qxd, position):
        """The places' rows of a tile, the first of them where `position` is; those that go on in
        the next tile come round at its top."""
        rest = jnp.zeros((tile - Q, d), new_Qxd.dtype)
        whole = jnp.concatenate([new_Qxd, rest]) if tile > Q else new_Qxd
        return pltpu.roll(whole, rem(position, tile), 0)

    def leaving(item):
        """(condition, copy) of what a row and head makes: attention, and of keys, values and their
        scales the one or two tiles and pages that they are in."""
        n, head, spot = div(item, K), rem(item, K), rem(item, _LEAVING)
        row, position, end, _ = row_at(n)
        copy = lambda *pair: pltpu.make_async_copy(*pair, left.at[spot])
        place = lanes(head, heads * d)
        out = [
            (j < end - position, copy(y_buffer.at[spot, j], y_ref.at[row + j, :, place]))
            for j in range(Q)
        ]
        for i, token in enumerate((position, end - 1)):
            page = page_of(row, div(token, P))
            more = div(position, tile) < div(end - 1, tile) if i else True
            place = pl.ds(pl.multiple_of(div(rem(token, P), tile) * tile, tile), tile)
            for j in range(2):
                pair = tile_buffer.at[spot, i, j], pages_refs[j].at[head, page, place]
                out.append((more, copy(*pair)))
            if quantized:
                more = div(position, P) < div(end - 1, P) if i else True
                out.append((more, copy(tile_buffers[1].at[spot, i], pages_refs[2].at[head, page])))
        return out

    def each_leaving(item, act):
        for there, copy in leaving(item):
            if there is True:
                act(copy)
            else:
                pl.when(there)(functools.partial(act, copy))

    def one_head(item, carry):
        cursor, slot = carry
        n, head = div(item, K), rem(item, K)
        row, position, end, last = row_at(n)
        q_Mxd, *new = new_of(row, head)
        zeros = jnp.zeros((M, 1), jnp.float32)
        softmax = zeros + _MASKED, zeros, jnp.zeros((M, d), jnp.float32)

        def whole(_, carry):
            cursor, slot, softmax = carry
            cursor = start(cursor, rem(slot + _AHEAD, depth))
            wait_whole(slot)
            return cursor, rem(slot + 1, depth), step(q_Mxd, slot, softmax)

        spot = rem(item, _LEAVING)
        begun = div(position, T)  # the first block with a new token
        carry = jax.lax.fori_loop(0, begun, whole, (cursor, slot, softmax))
        pl.when(item >= _LEAVING)(lambda: each_leaving(item - _LEAVING, lambda x: x.wait()))
        new_scales = []
        if quantized:
            new, new_scales = zip(*map(quantize, new), strict=True)
            new = [x.astype(jnp.int32) for x in new]  # registers of bytes are not masked
        rolled = [in_tile(x, position) for x in new]
        place_txd = jax.lax.broadcasted_iota(jnp.int32, (tile, d), 0)
        query_Qx1 = jax.lax.broadcasted_iota(jnp.int32, (Q, 1), 0)
        seen_Mx1 = by_query([jnp.minimum(position + query_Qx1, end - 1)] * heads) + 1

        def join(slot, i, which):
            """New tokens into their first (0) or second tile, which lies in block i."""
            token = end - 1 if which else position
            begins = token - rem(token, tile)  # the tile
            p, offset = div(token - i * T, P), pl.multiple_of(rem(begins, P), tile)
            own = (begins + place_txd >= position) & (begins + place_txd < end)
            for j, buffer in enumerate((k_buffer, v_buffer)):
                there = (slot, p, pl.ds(offset, tile))
                old = buffer[there].astype(rolled[j].dtype)
                tokens = jnp.where(own, rolled[j], old).astype(buffer.dtype)
                buffer[there] = tokens
                tile_buffer[spot, which, j] = tokens

        def join_scales(slot, i, which):
            """New tokens' scales into the first (0) or second page."""
            token = end - 1 if which else position
            p, begins = div(token - i * T, P), token - rem(token, P)
            place_1xP = begins + jax.lax.broadcasted_iota(jnp.int32, (1, P), 1)
            for j, scale_Qx1 in enumerate(new_scales):
                scale_1xP = buffers[2][slot, p, j : j + 1]
                for k in range(Q):
                    mine = (place_1xP == position + k) & (place_1xP < end)
                    scale_1xP = jnp.where(mine, scale_Qx1[k : k + 1], scale_1xP)
                buffers[2][slot, p, j : j + 1] = scale_1xP
                tile_buffers[1][spot, which, j : j + 1] = scale_1xP

        def tail(i, carry):
            """A block with new tokens: the last, or with the one before it both."""
            cursor, slot, softmax = carry
            cursor = start(cursor, rem(slot + _AHEAD, depth))
            pl.when(i < last)(lambda: wait_whole(slot))
            wait = lambda p: [copy.wait() for copy in copies(0, 0, slot, p)] and None
            pl.when(i == last)(lambda: last_pages(end, wait))
            for size, act in ((tile, join), *([(P, join_scales)] if quantized else [])):
                pl.when(i == begun)(functools.partial(act, slot, i, 0))
                second = (i == last) & (div(position, size) < div(end - 1, size))
                pl.when(second)(functools.partial(act, slot, i, 1))
            return cursor, rem(slot + 1, depth), step(q_Mxd, slot, softmax, seen_Mx1 - i * T)

        cursor, slot, softmax = jax.lax.fori_loop(begun, last + 1, tail, carry)
        _, sum_Mx1, y_Mxd = softmax
        y_Mxd = (y_Mxd / sum_Mx1).astype(y_buffer.dtype)
        for g in range(heads):
            for j in range(Q):
                at = g * Q + j
                y_buffer[spot, j, :, g * d : (g + 1) * d] = y_Mxd[at : at + 1]
        each_leaving(item, lambda x: x.start())
        return cursor, slot

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
    late = jnp.maximum(items - _LEAVING, 0)
    jax.lax.fori_loop(late, items, lambda item, _: each_leaving(item, lambda x: x.wait()), None)
