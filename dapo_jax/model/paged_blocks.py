"""Blocks of pages on their way to VMEM and through the softmax: what the TPU kernels of one query a
row (paged_kernel.py) and of several (paged_queries.py) both do.

It imports Pallas, which takes 0.2 s: only what traces a kernel imports it.

Dims: as paged_kernel.py; Q places of a row, M queries of a row and head, padded to whole registers.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem  # of what is never negative; // also asks for signs

ROWS = 8  # that share a register in float32
_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN


def rows_of(queries: int) -> int:
    """Rows of whole registers that have `queries` in a row, wherever the first one is."""
    return -(-(queries + ROWS - 1) // ROWS) * ROWS


class Blocks:
    """Blocks of a core's rows: over the references that `paged_kernel.call` gives to a kernel, from
    `first` on. A buffer has `depth` slots of a block each, one to read and `ahead` to fill.

    A cursor is what to ask for next: (n-th of the core's rows, head, block). A softmax is, of each
    query: (largest score [M, 1], sum of weights [M, 1], sum of weighted values [M, d]), float32."""

    def __init__(self, refs, head_dim: int, queries: int = 1):
        self.first, count, self.rows, self.length, self.table, *refs = refs
        self.q, self.k, self.v, self.turn, *refs = refs
        self.quantized = len(refs) == 15  # there are scales beside keys and values
        n = 2 + self.quantized
        self.y, self.pages = refs[n], refs[n + 1 : 2 * n + 1]
        self.buffers, self.y_buffer = refs[2 * n + 1 : 3 * n + 1], refs[3 * n + 1]
        *self.tile_buffers, self.arrived, self.left = refs[3 * n + 2 :]
        self.depth, self.B, self.P, self.d = self.buffers[0].shape
        self.ahead, self.T = self.depth - 1, self.B * self.P
        self.tile = self.tile_buffers[0].shape[3]  # tokens written back together
        self.K, self.Q, self.head_dim = self.k.shape[1] // self.d, queries, head_dim
        self.unit = head_dim**-0.5 * math.log2(math.e)  # of scores, for powers of 2
        self.heads = self.q.shape[1] // (self.K * self.d)  # of a key/value head
        self.R = self.table.shape[0] // self.length.shape[0]
        self.W, self.core = self.rows.shape[0] // pl.num_programs(0), pl.program_id(0)
        self.count = count[self.core]

    def row_at(self, n):
        """(row, its length, its last block) of the n-th of the core's rows."""
        row = self.rows[self.core * self.W + jnp.minimum(n, self.W - 1)]
        length = self.length[row]
        return row, length, div(length - 1, self.T)

    def page_of(self, row, column):
        return self.first[0] + self.table[row * self.R + column]

    def copies(self, head, page, slot, p):
        """Copies of one page to place p of a buffer."""
        pairs = zip(self.pages, self.buffers, strict=True)
        pairs = [(pages.at[head, page], buffer.at[slot, p]) for pages, buffer in pairs]
        return [pltpu.make_async_copy(*pair, self.arrived.at[slot]) for pair in pairs]

    def last_pages(self, length, act):
        """act(p) for each page of a row's last block."""
        pages = div(rem(length - 1, self.T), self.P) + 1
        jax.lax.fori_loop(0, pages, lambda p, _: act(p), None)

    def start(self, cursor, slot):
        """Start the copies of the block at `cursor`; returns the one after it."""
        n, head, i = cursor
        row, length, last = self.row_at(n)

        def page(p):
            for copy in self.copies(head, self.page_of(row, i * self.B + p), slot, p):
                copy.start()

        pl.when((n < self.count) & (i < last))(lambda: [page(p) for p in range(self.B)] and None)
        pl.when((n < self.count) & (i == last))(lambda: self.last_pages(length, page))
        ends = i == last
        row_ends = ends & (head == self.K - 1)
        return (
            n + row_ends.astype(jnp.int32),
            jnp.where(ends, jnp.where(row_ends, 0, head + 1), head),
            jnp.where(ends, 0, i + 1),
        )

    def start_ahead(self, cursor, slot):
        return self.start(cursor, rem(slot + self.ahead, self.depth))

    def wait_whole(self, slot):
        for x in self.buffers:
            pltpu.make_async_copy(x.at[slot], x.at[slot], self.arrived.at[slot]).wait()

    def wait_last(self, slot, length):
        """Wait for the pages of a row's last block."""
        wait = lambda p: [copy.wait() for copy in self.copies(0, 0, slot, p)] and None
        self.last_pages(length, wait)

    def clear(self, slot):
        """Tokens that are not copied have weight 0: what stands in their place must be a number."""
        last = self.buffers[-1]  # values, or their scales
        last[slot] = jnp.zeros_like(last[slot])

    def begin(self):
        """Clear all buffers and start the copies of the first blocks: (cursor, slot)."""

        def one(slot, cursor):
            self.clear(slot)
            return self.start(cursor, slot)

        cursor = jax.lax.fori_loop(0, self.ahead, one, (jnp.int32(0),) * 3)
        self.clear(self.ahead)
        return cursor, jnp.int32(0)

    def scales(self, slot, which):
        """Scales of a block's keys (0) or values (1), [1, T]."""
        parts = [self.buffers[2][slot, p, which : which + 1] for p in range(self.B)]
        return jnp.concatenate(parts, axis=1)

    def step(self, q_Mxd, slot, softmax, seen=None):
        """Take a block into the softmax, or its first `seen` tokens; also [M, 1], by query."""
        top_Mx1, sum_Mx1, y_Mxd = softmax
        k_Txd, v_Txd = (x[slot].reshape(self.T, self.d) for x in self.buffers[:2])
        if self.quantized:
            k_Txd, v_Txd = k_Txd.astype(q_Mxd.dtype), v_Txd.astype(q_Mxd.dtype)
        f32 = dict(preferred_element_type=jnp.float32)
        scores_MxT = jax.lax.dot_general(q_Mxd, k_Txd, (((1,), (1,)), ((), ())), **f32)
        scores_MxT *= self.scales(slot, 0) * self.unit if self.quantized else self.unit
        if seen is not None:
            place_MxT = jax.lax.broadcasted_iota(jnp.int32, scores_MxT.shape, 1)
            scores_MxT = jnp.where(place_MxT < seen, scores_MxT, _MASKED)
        new_Mx1 = jnp.maximum(top_Mx1, scores_MxT.max(-1, keepdims=True))
        weights_MxT = jnp.exp2(scores_MxT - new_Mx1)
        fade_Mx1 = jnp.exp2(top_Mx1 - new_Mx1)
        sum_Mx1 = sum_Mx1 * fade_Mx1 + weights_MxT.sum(-1, keepdims=True)
        if self.quantized:
            weights_MxT *= self.scales(slot, 1)
        y_Mxd = y_Mxd * fade_Mx1 + jnp.dot(weights_MxT.astype(v_Txd.dtype), v_Txd, **f32)
        return new_Mx1, sum_Mx1, y_Mxd

    def whole(self, q_Mxd, blocks, cursor, slot):
        """A softmax over the first `blocks` of a row, which are whole: (cursor, slot, softmax)."""
        zeros = jnp.zeros((len(q_Mxd), 1), jnp.float32)
        softmax = zeros + _MASKED, zeros, jnp.zeros(q_Mxd.shape, jnp.float32)

        def one(_, carry):
            cursor, slot, softmax = carry
            cursor = self.start_ahead(cursor, slot)
            self.wait_whole(slot)
            return cursor, rem(slot + 1, self.depth), self.step(q_Mxd, slot, softmax)

        return jax.lax.fori_loop(0, blocks, one, (cursor, slot, softmax))

    def lanes(self, i, width):
        return pl.ds(pl.multiple_of(i * width, self.d), width)

    def stretch(self, ref, row, i, width):
        """The i-th [Q, width] of a row's places, from rows of numbers that lie in VMEM."""
        n, above = rows_of(self.Q), rem(row, ROWS)  # a load starts at a multiple of ROWS
        some = ref[pl.ds(pl.multiple_of(row - above, ROWS), n), self.lanes(i, width)]
        return pltpu.roll(some, n - above, 0)[: self.Q]

    def rotation(self, row):
        """What rotates [Q, d] of a row's places, or with Q = 1 any [..., d]."""
        parts = (self.stretch(self.turn, row, i, self.d) for i in range(3))
        (cos_Qxd, after_Qxd, before_Qxd), half = parts, self.head_dim // 2

        def rotated(x):
            after, before = (pltpu.roll(x, n, 1) for n in (self.d - half, half))
            return x * cos_Qxd + after * after_Qxd + before * before_Qxd

        return rotated
