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
from jax.lax import div, rem

from dapo_jax.model import paged_kernel
from dapo_jax.model.paged_kernel import _LEAVING, _TILE, Work, quantize


class Passes(NamedTuple):
    """`Work` of rows, and which places are whose; the same for all layers of a token."""

    work: Work  # a row by its first place, its length with the tokens of all its places
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
    length_S = jnp.where(first_S, length_S + count_S - 1, 0)
    return Passes(paged_kernel.work(length_S, table_SxR, turn_Sx3d, cores), count_S, live_S)


def attend(
    q_SxHxd, k_SxKxd, v_SxKxd, pages: tuple[jax.Array, ...], first, todo: Passes,
    head_dim: int, queries: int,
) -> tuple[tuple[jax.Array, ...], jax.Array]:  # fmt: skip
    """As `paged_kernel.attend`, of places. queries: places of a row at most, Q, `most` of them."""
    kernel = functools.partial(_kernel, head_dim=head_dim, queries=queries)
    new, counts = (q_SxHxd, k_SxKxd, v_SxKxd), [todo.count_S]
    return paged_kernel.call(kernel, new, pages, first, todo.work, todo.live_S, counts, queries)


def _kernel(queries_ref, *refs, head_dim: int, queries: int):
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import tpu as pltpu

    from dapo_jax.model.paged_blocks import ROWS, Blocks

    at, Q = Blocks(refs, head_dim, queries), queries
    P, T, d, heads, tile, quantized = at.P, at.T, at.d, at.heads, at.tile, at.quantized
    M = -(-Q * heads // ROWS) * ROWS
    unit, at.unit = at.unit, 1.0  # of queries, which are fewer than their scores

    def row_at(n):
        """(first place, position of its token, end, last block) of the n-th of the core's rows."""
        row, end, last = at.row_at(n)
        return row, end - queries_ref[row], end, last

    def by_query(parts):
        """One [Q, ...] of each query head as [M, ...]."""
        rest = jnp.zeros((M - Q * heads, *parts[0].shape[1:]), parts[0].dtype)
        parts = [*parts, rest] if Q * heads < M else parts
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def new_of(row, head):
        """A row's places in one head: queries [M, d], keys and values [Q, d] in float32."""
        rotated, q_QxGd = at.rotation(row), at.stretch(at.q, row, head, heads * d)
        q_Mxd = by_query([rotated(q_QxGd[:, g * d : (g + 1) * d]) * unit for g in range(heads)])
        k_Qxd, v_Qxd = (at.stretch(x, row, head, d) for x in (at.k, at.v))
        return q_Mxd.astype(at.y_buffer.dtype), rotated(k_Qxd), v_Qxd

    def in_tile(new_Qxd, position):
        """The places' rows of a tile, the first of them where `position` is; those that go on in
        the next tile come round at its top."""
        rest = jnp.zeros((tile - Q, d), new_Qxd.dtype)
        whole = jnp.concatenate([new_Qxd, rest]) if tile > Q else new_Qxd
        return pltpu.roll(whole, rem(position, tile), 0)

    def leaving(item):
        """(condition, copy) of what a row and head makes: attention, and of keys, values and their
        scales the one or two tiles and pages that they are in."""
        n, head, spot = div(item, at.K), rem(item, at.K), rem(item, _LEAVING)
        row, position, end, _ = row_at(n)
        copy = lambda *pair: pltpu.make_async_copy(*pair, at.left.at[spot])
        place = at.lanes(head, heads * d)
        out = [
            (j < end - position, copy(at.y_buffer.at[spot, j], at.y.at[row + j, :, place]))
            for j in range(Q)
        ]
        for i, token in enumerate((position, end - 1)):
            page = at.page_of(row, div(token, P))
            more = div(position, tile) < div(end - 1, tile) if i else True
            place = pl.ds(pl.multiple_of(div(rem(token, P), tile) * tile, tile), tile)
            for j in range(2):
                pair = at.tile_buffers[0].at[spot, i, j], at.pages[j].at[head, page, place]
                out.append((more, copy(*pair)))
            if quantized:
                more = div(position, P) < div(end - 1, P) if i else True
                pair = at.tile_buffers[1].at[spot, i], at.pages[2].at[head, page]
                out.append((more, copy(*pair)))
        return out

    def each_leaving(item, act):
        for there, copy in leaving(item):
            if there is True:
                act(copy)
            else:
                pl.when(there)(functools.partial(act, copy))

    def one_head(item, carry):
        cursor, slot = carry
        n, head = div(item, at.K), rem(item, at.K)
        row, position, end, last = row_at(n)
        q_Mxd, *new = new_of(row, head)
        spot = rem(item, _LEAVING)
        begun = div(position, T)  # the first block with a new token
        carry = at.whole(q_Mxd, begun, cursor, slot)
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
            for j, buffer in enumerate(at.buffers[:2]):
                there = (slot, p, pl.ds(offset, tile))
                old = buffer[there].astype(rolled[j].dtype)
                tokens = jnp.where(own, rolled[j], old).astype(buffer.dtype)
                buffer[there] = tokens
                at.tile_buffers[0][spot, which, j] = tokens

        def join_scales(slot, i, which):
            """New tokens' scales into the first (0) or second page."""
            token = end - 1 if which else position
            p, begins = div(token - i * T, P), token - rem(token, P)
            place_1xP = begins + jax.lax.broadcasted_iota(jnp.int32, (1, P), 1)
            for j, scale_Qx1 in enumerate(new_scales):
                scale_1xP = at.buffers[2][slot, p, j : j + 1]
                for k in range(Q):
                    mine = (place_1xP == position + k) & (place_1xP < end)
                    scale_1xP = jnp.where(mine, scale_Qx1[k : k + 1], scale_1xP)
                at.buffers[2][slot, p, j : j + 1] = scale_1xP
                at.tile_buffers[1][spot, which, j : j + 1] = scale_1xP

        def tail(i, carry):
            """A block with new tokens: the last, or with the one before it both."""
            cursor, slot, softmax = carry
            cursor = at.start_ahead(cursor, slot)
            pl.when(i < last)(lambda: at.wait_whole(slot))
            pl.when(i == last)(lambda: at.wait_last(slot, end))
            for size, act in ((tile, join), *([(P, join_scales)] if quantized else [])):
                pl.when(i == begun)(functools.partial(act, slot, i, 0))
                second = (i == last) & (div(position, size) < div(end - 1, size))
                pl.when(second)(functools.partial(act, slot, i, 1))
            softmax = at.step(q_Mxd, slot, softmax, seen_Mx1 - i * T)
            return cursor, rem(slot + 1, at.depth), softmax

        cursor, slot, softmax = jax.lax.fori_loop(begun, last + 1, tail, carry)
        _, sum_Mx1, y_Mxd = softmax
        y_Mxd = (y_Mxd / sum_Mx1).astype(at.y_buffer.dtype)
        for g in range(heads):
            for j in range(Q):
                m = g * Q + j
                at.y_buffer[spot, j, :, g * d : (g + 1) * d] = y_Mxd[m : m + 1]
        each_leaving(item, lambda x: x.start())
        return cursor, slot

    items = at.count * at.K
    jax.lax.fori_loop(0, items, one_head, at.begin())
    late = jnp.maximum(items - _LEAVING, 0)
    jax.lax.fori_loop(late, items, lambda item, _: each_leaving(item, lambda x: x.wait()), None)
