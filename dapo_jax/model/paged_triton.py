"""Attention of one new token a row over its pages, for NVIDIA GPUs: a Pallas kernel by Triton.

One program a row, key/value head and share of the row's live pages goes through that share with an
online softmax; where there are several shares, XLA joins them. Pages are those of XLA's readers;
scales multiply scores and weights. Page numbers are not checked.

Dims: S rows, R pages of a row's table, C shares, H query heads, K key/value heads, G query heads of
one, in a product of 16, N pages, P tokens of a page, d head_dim.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dapo_jax import parallel

_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN
_HEADS = 16  # the fewest rows of a tensor core's product
_WARPS, _STAGES = 4, 2
_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors; one number for all cards
_SHARE = 8  # pages, of the longest row, that are worth a program


def fits(page_tokens: int, head_dim: int) -> bool:
    """Triton's blocks are powers of two, a tensor core's of 16 at least."""
    power_of_two = lambda n: n & (n - 1) == 0
    return all(n >= 16 and power_of_two(n) for n in (page_tokens, head_dim))


def shares(rows: int, kv_heads: int, row_pages: int) -> int:
    """Programs that share out the pages of a row and head of a device: 1 where rows and heads fill
    the GPU, or where rows are short. By sizes of the program alone, so that bits stay the same."""
    return max(min(_PROGRAMS // (rows * kv_heads), row_pages // _SHARE), 1)


def attend(q_SxHxd, pages, first, table_SxR, length_S, count: int = 0) -> jax.Array:
    """[S, H, d] as `q`. pages: keys [K, N, d, P], values [K, N, P, d] and perhaps scales float32
    [K, N, 2, P]; first: page 0 of the layer; length_S: int32, tokens a row sees, 0 = idle. count:
    of programs that share a row; 0 = `shares`. Off GPUs it is interpreted, for tests."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import triton

    keys, values, *scales = pages
    (K, N, d, P), (S, H, _), R = keys.shape, q_SxHxd.shape, table_SxR.shape[1]
    C = count or shares(S, K, R)
    pool = lambda *size: pl.BlockSpec((None, N, *size), lambda s, k, c: (k, 0, *[0] * len(size)))
    row = lambda *size: pl.BlockSpec((None, *size), lambda s, k, c: (s, *[0] * len(size)))
    share = lambda *size: pl.BlockSpec(
        (None, None, *size), lambda s, k, c: (c, s, *[0] * len(size))
    )
    outs = [(H, d)] if C == 1 else [(H, d), (H,), (H,)]
    dtype = q_SxHxd.dtype if C == 1 else jnp.float32
    y_CxSxHxd, *sums = pl.pallas_call(
        functools.partial(_attend_share, count=C, quantized=bool(scales)),
        grid=(S, K, C),
        in_specs=[
            row(H, d),
            pool(d, P),
            pool(P, d),
            row(R),
            pl.BlockSpec((1,), lambda s, k, c: (s,)),
            *(pool(2, P) for _ in scales),
        ],
        out_specs=[share(*size) for size in outs],
        out_shape=[jax.ShapeDtypeStruct((C, S, *size), dtype) for size in outs],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=parallel.platform() != "gpu",
        name="paged_attention",
    )(q_SxHxd, keys, values, table_SxR + first, length_S, *scales)
    return _joined(y_CxSxHxd, *sums).astype(q_SxHxd.dtype) if sums else y_CxSxHxd[0]


def _joined(y_CxSxHxd, top_CxSxH, sum_CxSxH):
    """The attention of whole rows. A share without pages has the least top, and weighs nothing."""
    weight_CxSxH = jnp.exp2(top_CxSxH - top_CxSxH.max(0))
    sum_SxH = (weight_CxSxH * sum_CxSxH).sum(0)
    y_SxHxd = (weight_CxSxH[..., None] * y_CxSxHxd).sum(0)
    return y_SxHxd / jnp.maximum(sum_SxH, 1e-30)[..., None]


def _attend_share(q_ref, keys_ref, values_ref, table_ref, length_ref, *rest, count, quantized):
    """count 1: writes the row's attention; else that of a share, not yet divided by the sum of its
    weights, and beside it its largest score and that sum."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    scales_ref, (y_ref, *sums_ref) = rest[:quantized], rest[quantized:]
    (H, d), P = q_ref.shape, keys_ref.shape[2]
    G = H // pl.num_programs(1)  # of _HEADS rows of a product that many count
    mine, heads = jnp.arange(_HEADS) < G, pl.ds(pl.program_id(1) * G, _HEADS)
    q_Gxd = triton.load(q_ref.at[heads], mask=mine[:, None], other=0.0)
    keep = lambda ref, x, mask: triton.store(ref.at[heads], x, mask=mask)
    length = length_ref[0]
    # bfloat16 products are exact; float32 ones would otherwise be TF32's.
    exact = jax.lax.Precision.HIGHEST if q_Gxd.dtype == jnp.float32 else None
    product = functools.partial(triton.dot, precision=exact)

    def page(j, carry):
        n, top_G, sum_G, y_Gxd = carry
        following = table_ref[jnp.minimum(j + 1, last)]  # its keys need not wait for their number
        scores_GxP = product(q_Gxd, keys_ref[n].astype(q_Gxd.dtype)) * (d**-0.5 * math.log2(math.e))
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
    if count == 1:
        y_Gxd /= jnp.maximum(sum_G, 1e-30)[:, None]
    keep(y_ref, y_Gxd.astype(y_ref.dtype), mine[:, None])
    for ref, x_G in zip(sums_ref, (top_G, sum_G), strict=count > 1):
        keep(ref, x_G, mine)
