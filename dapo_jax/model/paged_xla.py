"""Attention over the cache (paged.py) by XLA: on CPUs, and on GPUs that run no kernel.

'rows': a page is a whole row, page i belongs to row i, and nothing is gathered. 'pages': blocks of
live pages, gathered; then a row's pages in order, by an online softmax. g: `paged.Geometry`.

Dims: S rows, R pages of a row's table, K key/value heads, G query heads a key/value head, H = K G,
M pages, P tokens of a page, C = P where a page is a row, d head_dim.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row without keys must not turn into NaN
_BLOCK, _TOGETHER = 32, 8  # pages, and pages of each row, a step of the 'pages' reader


def held(x, pages):
    """Numbers as the pool holds them, which is the dtype of `pages` (see `paged.new_pool`)."""
    if pages.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x


def numbers(held):
    """The numbers that a part of the pool holds."""
    return jax.lax.bitcast_convert_type(held, jnp.bfloat16) if held.dtype == jnp.uint16 else held


def read_rows(g, q_SxHxd, pages, layer, rows, plan):
    """q_SxHxd over the pages of each row -> [S, H, d]. plan: not read."""
    S, H, d = q_SxHxd.shape
    K, C = pages[0].shape[0], g.page_tokens
    if g.gathers:
        pages = (x[:, layer * g.pages + rows.table_SxR[:, 0]] for x in pages)
    elif g.layers > 1 or g.pages > S:  # a call of few requests has fewer rows than the pool
        pages = (jax.lax.dynamic_slice_in_dim(x, layer * g.pages, S, axis=1) for x in pages)
    keys, values, *scales = pages
    keys, values = (numbers(x).astype(q_SxHxd.dtype) for x in (keys, values))
    q = q_SxHxd.reshape(S, K, H // K, d).swapaxes(0, 1) * d**-0.5
    scores = jnp.einsum("KSGd,KSdC->KSGC", q, keys, preferred_element_type=jnp.float32)
    seen_SxC = jnp.arange(C) <= rows.position_S[:, None]
    scores = jnp.where(seen_SxC[None, :, None], _scaled(scores, scales, 0), _MASKED)
    weights = _scaled(jax.nn.softmax(scores, axis=-1), scales, 1)
    y_KxSxGxd = jnp.einsum("KSGC,KSCd->KSGd", weights.astype(values.dtype), values)
    return y_KxSxGxd.swapaxes(0, 1).reshape(S, H, d)


def _scaled(x_KxMxGxP, scales: list[jax.Array], which: int):
    """Scores (0) or weights (1) of M pages, by the scales [K, M, 2, P] of their keys or values."""
    return x_KxMxGxP * scales[0][:, :, which, None] if scales else x_KxMxGxP


class Plan(NamedTuple):
    """All live pages of a shard's rows, one behind the other, padded to whole blocks."""

    row_M: jax.Array  # int32, whose
    page_M: jax.Array  # int32, number in layer 0
    first_M: jax.Array  # int32, position of the page's first token
    live_M: jax.Array  # bool
    start_S: jax.Array  # int32, a row's first index of M
    count_S: jax.Array  # int32, its pages


def plan_of(rows, page_tokens: int) -> Plan:
    """rows: `paged.CacheRows`."""
    S, R = rows.table_SxR.shape
    M = -(-S * R // _BLOCK) * _BLOCK
    count_S = jnp.where(rows.active_S, rows.position_S // page_tokens + 1, 0)
    end_S = jnp.cumsum(count_S)
    start_S = end_S - count_S
    index_M = jnp.arange(M)
    row_M = jnp.searchsorted(end_S, index_M, side="right", method="compare_all")
    row_M = jnp.minimum(row_M, S - 1)
    column_M = jnp.clip(index_M - start_S[row_M], 0, R - 1)
    page_M = rows.table_SxR[row_M, column_M]
    of_pages = row_M, page_M, column_M * page_tokens, index_M < end_S[-1]
    return Plan(*of_pages, start_S, count_S)


def read_pages(g, q_SxHxd, pages, layer, rows, plan):
    """Each page by itself, then the pages of a row in their own order: who stands beside a row
    changes no bit of it."""
    S, H, d = q_SxHxd.shape
    K, M = pages[0].shape[0], len(plan.row_M)
    G, P = H // K, g.page_tokens
    q_KxSxGxd = q_SxHxd.reshape(S, K, G, d).swapaxes(0, 1) * d**-0.5
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def read(i, carry):
        part = (jax.lax.dynamic_slice_in_dim(x, i * _BLOCK, _BLOCK) for x in plan[:4])
        row_M, page_M, first_M, live_M = part
        keys, values, *scales = (numbers(x[:, layer * g.pages + page_M]) for x in pages)
        keys, values = keys.astype(q_SxHxd.dtype), values.astype(q_SxHxd.dtype)
        scores = _scaled(product("KMGd,KMdP->KMGP", q_KxSxGxd[:, row_M], keys), scales, 0)
        token_MxP = first_M[:, None] + jnp.arange(P)
        seen_MxP = live_M[:, None] & (token_MxP <= rows.position_S[row_M][:, None])
        scores = jnp.where(seen_MxP[None, :, None], scores, _MASKED)
        top_KxMxG = scores.max(-1)
        weights = jnp.exp(scores - top_KxMxG[..., None])
        scaled = _scaled(weights, scales, 1).astype(q_SxHxd.dtype)
        y = product("KMGP,KMPd->KMGd", scaled, values)
        new = top_KxMxG, jnp.concatenate([y, weights.sum(-1, keepdims=True)], -1)
        put = lambda array, x: jax.lax.dynamic_update_slice_in_dim(array, x, i * _BLOCK, 1)
        return tuple(map(put, carry, new))

    def add(i, carry):
        top_KxSxG, y_KxSxGxn = carry
        column_Q = i * _TOGETHER + jnp.arange(_TOGETHER)
        at_SxQ = jnp.minimum(plan.start_S[:, None] + column_Q, M - 1)
        live_SxQx1 = (column_Q < plan.count_S[:, None])[..., None]
        tops = jnp.where(live_SxQx1, found[0][:, at_SxQ], _MASKED)
        new_top = jnp.maximum(top_KxSxG, tops.max(2))
        share = jnp.where(live_SxQx1, jnp.exp(tops - new_top[:, :, None]), 0.0)[..., None]
        fade = jnp.exp(top_KxSxG - new_top)[..., None]
        return new_top, y_KxSxGxn * fade + (share * found[1][:, at_SxQ]).sum(2)

    # Largest scores, and values with the sum of weights behind them: of pages, then of rows.
    start = lambda n: (jnp.full((K, n, G), _MASKED), jnp.zeros((K, n, G, d + 1)))
    found = jax.lax.fori_loop(0, -(-plan.live_M.sum() // _BLOCK), read, start(M))
    _, y = jax.lax.fori_loop(0, -(-plan.count_S.max() // _TOGETHER), add, start(S))
    y = y[..., :d] / jnp.maximum(y[..., d:], 1e-30)
    return y.swapaxes(0, 1).reshape(S, H, d)
