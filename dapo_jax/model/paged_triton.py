"""Attention of one new token a row over its pages, for NVIDIA GPUs: a Pallas kernel by Triton.

One program a row, key/value head and share of the row's live pages goes through that share with an
online softmax; where there are several shares, XLA joins them. It also rotates the new token's
query and key, and stores its key and value; those it has in registers, so that no program reads
what another writes. Pages are those of XLA's readers; scales multiply scores and weights. Page
numbers are not checked.

Dims: S rows, R pages of a row's table, C shares, H query heads, K key/value heads, G query heads of
one, in a product of 16, N pages or heads side by side, P tokens of a page, d head_dim.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dapo_jax import parallel

_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN
_HEADS = 16  # rows of a tensor core's product, at least
_WARPS, _STAGES = 4, 2
_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors; one number for all cards
_SHARE = 8  # pages, of the longest row, that are worth a program


def fits(page_tokens: int, head_dim: int, group: int = 1) -> bool:
    """Triton's blocks are powers of two, a tensor core's of 16 at least. group: query heads of a
    key head, all in one block of _HEADS."""
    power_of_two = lambda n: n & (n - 1) == 0
    blocks = all(n >= 16 and power_of_two(n) for n in (page_tokens, head_dim))
    return blocks and group <= _HEADS


def shares(rows: int, kv_heads: int, row_pages: int) -> int:
    """Programs that share out the pages of a row and head of a device: 1 where rows and heads fill
    the GPU, or where rows are short. By sizes of the program alone, so that bits stay the same."""
    return max(min(_PROGRAMS // (rows * kv_heads), row_pages // _SHARE), 1)


def turn(cos_Sxh: jax.Array, sin_Sxh: jax.Array) -> jax.Array:
    """Rotary angles as [S, 2 d]: x turns into x times the first half of them, plus x from half a
    head on (around the end) times the second."""
    return jnp.concatenate([cos_Sxh, cos_Sxh, -sin_Sxh, sin_Sxh], axis=1)


def attend(heads_SxNxd, pages, first, rows, turn_Sx2d=None, count: int = 0):
    """Attention [S, H, d] in the dtype of `heads`, the queries. With `turn`'s angles they are the
    new token's queries, keys and values side by side, N = H + 2 K: the kernel rotates queries and
    keys, stores keys and values in the pool, and (pages, attention) comes back. pages: keys
    [K, N, d, P], values [K, N, P, d] and perhaps scales float32 [K, N, 2, P]; first: page 0 of the
    layer; rows: `paged.CacheRows`, of which an idle one sees nothing. count: of programs that share
    a row; 0 = `shares`. Off GPUs it is interpreted, for tests."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import triton

    K, S, R, d = len(pages[0]), *rows.table_SxR.shape, heads_SxNxd.shape[2]
    length_S = jnp.where(rows.active_S, rows.position_S + 1, 0)
    stored = () if turn_Sx2d is None else pages
    H = heads_SxNxd.shape[1] - (2 * K if stored else 0)
    C = count or shares(S, K, R)
    pool = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda s, k, c: (k, 0, 0, 0))
    row = lambda *size: pl.BlockSpec((None, *size), lambda s, k, c: (s, *[0] * len(size)))
    share = lambda *size: pl.BlockSpec(
        (None, None, *size), lambda s, k, c: (c, s, *[0] * len(size))
    )
    outs = [(H, d)] if C == 1 else [(H, d), (H,), (H,)]
    dtype = heads_SxNxd.dtype if C == 1 else jnp.float32
    out = pl.pallas_call(
        functools.partial(_attend_share, count=C, pools=len(pages), H=H),
        grid=(S, K, C),
        in_specs=[
            *map(pool, pages),
            row(*heads_SxNxd.shape[1:]),
            row(R),
            pl.BlockSpec((1,), lambda s, k, c: (s,)),
            *([row(2 * d)] if stored else []),
        ],
        out_specs=[*map(pool, stored), *(share(*size) for size in outs)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored]
        + [jax.ShapeDtypeStruct((C, S, *size), dtype) for size in outs],
        input_output_aliases={i: i for i in range(len(stored))},
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=parallel.platform() != "gpu",
        name="paged_attention",
    )(*pages, heads_SxNxd, rows.table_SxR + first, length_S, *([turn_Sx2d] if stored else []))
    stored, (y_CxSxHxd, *sums) = out[: len(stored)], out[len(stored) :]
    y = _joined(y_CxSxHxd, *sums).astype(heads_SxNxd.dtype) if sums else y_CxSxHxd[0]
    return (tuple(stored), y) if stored else y


def _joined(y_CxSxHxd, top_CxSxH, sum_CxSxH):
    """The attention of whole rows. A share without pages has the least top, and weighs nothing."""
    weight_CxSxH = jnp.exp2(top_CxSxH - top_CxSxH.max(0))
    sum_SxH = (weight_CxSxH * sum_CxSxH).sum(0)
    y_SxHxd = (weight_CxSxH[..., None] * y_CxSxHxd).sum(0)
    return y_SxHxd / jnp.maximum(sum_SxH, 1e-30)[..., None]


def _attend_share(*refs, count, pools, H):
    """count 1: writes the row's attention; else that of a share, not yet divided by the sum of its
    weights, and beside it its largest score and that sum. The first share has a new token, and
    stores it; all others are read from the pages."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (keys_ref, values_ref, *scales_ref), refs = refs[:pools], refs[pools:]
    (heads_ref, table_ref, length_ref), refs = refs[:3], refs[3:]
    (N, d), P, k = heads_ref.shape, keys_ref.shape[2], pl.program_id(1)
    K, new = pl.num_programs(1), N > H
    stored_refs, (y_ref, *sums_ref) = refs[new : (1 + pools) * new], refs[(1 + pools) * new :]
    G = H // K  # of _HEADS rows of a product that many count
    mine, heads = jnp.arange(_HEADS) < G, pl.ds(k * G, _HEADS)
    q_Gxd = triton.load(heads_ref.at[heads], mask=mine[:, None], other=0.0)
    keep = lambda ref, x, mask: triton.store(ref.at[heads], x, mask=mask)
    length, scale = length_ref[0], d**-0.5 * math.log2(math.e)
    # bfloat16 products are exact; float32 ones would otherwise be TF32's.
    exact = jax.lax.Precision.HIGHEST if q_Gxd.dtype == jnp.float32 else None
    product = functools.partial(triton.dot, precision=exact)
    if new:  # read while pages are on their way
        length -= 1
        live = (length >= 0) & (pl.program_id(2) == 0)
        rotated = functools.partial(_rotated, heads_ref, refs[0])
        q_Gxd = rotated(q_Gxd, k * G + jnp.arange(_HEADS), mine)
        key_d, value_d = rotated(heads_ref[H + k], H + k, None), heads_ref[H + K + k]

    def page(j, carry):
        n, top_G, sum_G, y_Gxd = carry
        following = table_ref[jnp.minimum(j + 1, last)]  # its keys need not wait for their number
        scores_GxP = product(q_Gxd, keys_ref[n].astype(q_Gxd.dtype)) * scale
        if scales_ref:
            scores_GxP *= scales_ref[0][n, 0][None]
        seen_P = j * P + jnp.arange(P) < length
        scores_GxP = jnp.where(seen_P[None], scores_GxP, _MASKED)
        new_top_G = jnp.maximum(top_G, scores_GxP.max(1))
        weights_GxP = jnp.exp2(scores_GxP - new_top_G[:, None])
        fade_G = jnp.exp2(top_G - new_top_G)
        sum_G = sum_G * fade_G + weights_GxP.sum(1)
        if scales_ref:
            weights_GxP *= scales_ref[0][n, 1][None]
        more_Gxd = product(weights_GxP.astype(q_Gxd.dtype), values_ref[n].astype(q_Gxd.dtype))
        return following, new_top_G, sum_G, y_Gxd * fade_G[:, None] + more_Gxd

    end, last = pl.cdiv(length, P), table_ref.shape[0] - 1
    share = pl.cdiv(end, count)  # of the live pages: the programs of a row have as much to do
    first = pl.program_id(2) * share
    zeros = jnp.full(_HEADS, _MASKED), jnp.zeros(_HEADS), jnp.zeros((_HEADS, d))
    start = table_ref[jnp.minimum(first, last)], *zeros
    span = first, jnp.minimum(first + share, end)
    _, top_G, sum_G, y_Gxd = jax.lax.fori_loop(*span, page, start)
    if new:
        held = _store(stored_refs, table_ref, length, live, key_d, value_d)
        (key_d, key_scale), (value_d, value_scale) = held
        score_G = (q_Gxd.astype(jnp.float32) * key_d[None]).sum(1) * scale * key_scale
        score_G = jnp.where(live, score_G, _MASKED)
        new_top_G = jnp.maximum(top_G, score_G)
        fade_G = jnp.exp2(top_G - new_top_G)
        weight_G = jnp.where(live, jnp.exp2(score_G - new_top_G), 0.0)
        top_G, sum_G = new_top_G, sum_G * fade_G + weight_G
        more_Gxd = (weight_G * value_scale)[:, None] * value_d[None]
        y_Gxd = y_Gxd * fade_G[:, None] + jnp.where(live, more_Gxd, 0.0)
    if count == 1:
        y_Gxd /= jnp.maximum(sum_G, 1e-30)[:, None]
    keep(y_ref, y_Gxd.astype(y_ref.dtype), mine[:, None])
    for ref, x_G in zip(sums_ref, (top_G, sum_G), strict=count > 1):
        keep(ref, x_G, mine)


def _rotated(heads_ref, turn_ref, x_xd, head, mask):
    """The heads `x` of these numbers, rotated."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    d = x_xd.shape[-1]
    place = jnp.broadcast_to(jnp.expand_dims(head, -1), x_xd.shape)
    place = place, jnp.broadcast_to((jnp.arange(d) + d // 2) % d, x_xd.shape)
    how = {} if mask is None else dict(mask=mask[:, None], other=0.0)
    beside_xd = triton.load(heads_ref.at[place], **how)
    wide = lambda x: x.astype(jnp.float32)
    turned_xd = wide(x_xd) * turn_ref[pl.ds(0, d)] + wide(beside_xd) * turn_ref[pl.ds(d, d)]
    return turned_xd.astype(x_xd.dtype)


def _store(refs, table_ref, position, live, *new):
    """Writes a key and a value [d]; returns each as the pages hold it, float32, and its scale."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (keys_ref, values_ref, *scales_ref), held = refs, []
    d, P = keys_ref.shape[1:]
    position = jnp.maximum(position, 0)
    n, column, all_d = table_ref[position // P], position % P, pl.ds(0, d)
    places = keys_ref.at[n, all_d, column], values_ref.at[n, column, all_d]
    for i, (place, x_d) in enumerate(zip(places, new, strict=True)):
        scale = jnp.float32(1.0)
        if scales_ref:
            x_d = x_d.astype(jnp.float32)
            scale = jnp.maximum(jnp.abs(x_d).max(), 1e-30) / 127
            x_d = jnp.floor(x_d / scale + 0.5)  # Triton has no operation that rounds
            at = scales_ref[0].at[n, jnp.int32(i), pl.ds(column, 1)]
            triton.store(at, jnp.full(1, scale), mask=jnp.full(1, live))
        triton.store(place, x_d.astype(place.dtype), mask=jnp.broadcast_to(live, d))
        held.append((x_d.astype(jnp.float32), scale))
    return held
