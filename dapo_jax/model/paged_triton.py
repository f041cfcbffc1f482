"""Attention of one new token a row over its pages, for NVIDIA GPUs: a Pallas kernel by Triton.

One program a row, key/value head and share of the row's live pages goes through that share with an
online softmax; where there are several shares, XLA joins them. Pages are those of XLA's readers;
scales multiply scores and weights. Page numbers are not checked.

Dims: S rows, R pages of a row's table, C shares, K key/value heads, G query heads a key/value head,
padded to 16, N pages, P tokens of a page, d head_dim.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dapo_jax import parallel

_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN
_HEADS = 16  # the fewest rows of a tensor core's product
_PROGRAMS = 264  # two for each of an H100's 132 multiprocessors; one number for all cards
_SHARE = 4  # pages, of the longest row, that are worth a program


def fits(page_tokens: int, head_dim: int) -> bool:
    """Triton's blocks are powers of two, a tensor core's of 16 at least."""
    power_of_two = lambda n: n & (n - 1) == 0
    return all(n >= 16 and power_of_two(n) for n in (page_tokens, head_dim))


def shares(rows: int, kv_heads: int, row_pages: int) -> int:
    """Programs that share out the pages of a row and head of a device: 1 where rows and heads fill
    the GPU, or where rows are short. By sizes of the program alone, so that bits stay the same."""
    return max(min(_PROGRAMS // (rows * kv_heads), row_pages // _SHARE), 1)


def attend(q_SxHxd, pages, first, table_SxR, length_S, count: int = 0) -> jax.Array:
    """[S, H, d], float32. pages: keys [K, N, d, P], values [K, N, P, d] and perhaps scales float32
    [K, N, 2, P]; first: page 0 of the layer; length_S: int32, tokens a row sees, 0 = idle. count:
    of programs that share a row; 0 = `shares`. Off GPUs it is interpreted, for tests."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import triton

    keys, values, *scales = pages
    (K, N, d, P), (S, H, _), R = keys.shape, q_SxHxd.shape, table_SxR.shape[1]
    G, C = H // K, count or shares(S, K, R)
    q = jnp.pad(q_SxHxd.reshape(S, K, G, d), ((0, 0), (0, 0), (0, -G % _HEADS), (0, 0)))
    pool = lambda *size: pl.BlockSpec((None, N, *size), lambda s, k, c: (k, 0, *[0] * len(size)))
    size = q.shape[2:]
    outs = [size] if C == 1 else [size, size[:1], size[:1]]
    share = lambda size: pl.BlockSpec(
        (None, None, None, *size), lambda s, k, c: (c, s, k, *[0] * len(size))
    )
    y_CxSxKxGxd, *sums = pl.pallas_call(
        functools.partial(_attend_share, count=C, quantized=bool(scales)),
        grid=(S, K, C),
        in_specs=[
            pl.BlockSpec((None, None, *size), lambda s, k, c: (s, k, 0, 0)),
            pool(d, P),
            pool(P, d),
            pl.BlockSpec((None, R), lambda s, k, c: (s, 0)),
            pl.BlockSpec((1,), lambda s, k, c: (s,)),
            *(pool(2, P) for _ in scales),
        ],
        out_specs=[share(size) for size in outs],
        out_shape=[jax.ShapeDtypeStruct((C, S, K, *size), jnp.float32) for size in outs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=parallel.platform() != "gpu",
        name="paged_attention",
    )(q, keys, values, table_SxR + first, length_S, *scales)
    y_SxKxGxd = _joined(y_CxSxKxGxd, *sums) if sums else y_CxSxKxGxd[0]
    return y_SxKxGxd[:, :, :G].reshape(S, H, d)


def _joined(y_CxSxKxGxd, top_CxSxKxG, sum_CxSxKxG):
    """The attention of whole rows. A share without pages has the least top, and weighs nothing."""
    weight_CxSxKxG = jnp.exp2(top_CxSxKxG - top_CxSxKxG.max(0))
    sum_SxKxG = (weight_CxSxKxG * sum_CxSxKxG).sum(0)
    y_SxKxGxd = (weight_CxSxKxG[..., None] * y_CxSxKxGxd).sum(0)
    return y_SxKxGxd / jnp.maximum(sum_SxKxG, 1e-30)[..., None]


def _attend_share(q_ref, keys_ref, values_ref, table_ref, length_ref, *rest, count, quantized):
    """count 1: writes the row's attention; else that of a share, not yet divided by the sum of its
    weights, and beside it its largest score and that sum."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    scales_ref, (y_ref, *sums_ref) = rest[:quantized], rest[quantized:]
    q_Gxd, length = q_ref[...], length_ref[0]
    (G, d), P = q_Gxd.shape, keys_ref.shape[2]
    # bfloat16 products are exact; float32 ones would otherwise be TF32's.
    exact = jax.lax.Precision.HIGHEST if q_Gxd.dtype == jnp.float32 else None
    product = functools.partial(triton.dot, precision=exact)

    def page(j, carry):
        top_G, sum_G, y_Gxd = carry
        n = table_ref[j]
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
        return new_top_G, sum_G, y_Gxd * fade_G[:, None] + more_Gxd

    start = jnp.full(G, _MASKED), jnp.zeros(G), jnp.zeros((G, d))
    end = pl.cdiv(length, P)
    if count == 1:
        _, sum_G, y_Gxd = jax.lax.fori_loop(0, end, page, start)
        y_ref[...] = y_Gxd / jnp.maximum(sum_G, 1e-30)[:, None]
        return
    share = pl.cdiv(end, count)  # of the live pages: the programs of a row have as much to do
    first = pl.program_id(2) * share
    span = first, jnp.minimum(first + share, end)
    top_G, sum_G, y_ref[...] = jax.lax.fori_loop(*span, page, start)
    sums_ref[0][...], sums_ref[1][...] = top_G, sum_G
