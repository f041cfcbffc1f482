"""Attention of one new token a row over its pages, for NVIDIA GPUs: a Pallas kernel by Triton.

One program a row and key/value head goes through the row's live pages with an online softmax. Pages
are those of XLA's readers; scales multiply scores and weights. Page numbers are not checked.

Dims: S rows, R pages of a row's table, K key/value heads, G query heads a key/value head, padded to
16, N pages, P tokens of a page, d head_dim.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dapo_jax import parallel

_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN
_HEADS = 16  # the fewest rows of a tensor core's product


def fits(page_tokens: int, head_dim: int) -> bool:
    """Triton's blocks are powers of two, a tensor core's of 16 at least."""
    power_of_two = lambda n: n & (n - 1) == 0
    return all(n >= 16 and power_of_two(n) for n in (page_tokens, head_dim))


def attend(q_SxHxd, pages, first, table_SxR, length_S) -> jax.Array:
    """[S, H, d], float32. pages: keys [K, N, d, P], values [K, N, P, d] and perhaps scales float32
    [K, N, 2, P]; first: page 0 of the layer; length_S: int32, tokens a row sees, 0 = idle. Off
    GPUs it is interpreted, for tests."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import triton

    keys, values, *scales = pages
    (K, N, d, P), (S, H, _), R = keys.shape, q_SxHxd.shape, table_SxR.shape[1]
    G = H // K
    q = jnp.pad(q_SxHxd.reshape(S, K, G, d), ((0, 0), (0, 0), (0, -G % _HEADS), (0, 0)))
    pool = lambda *size: pl.BlockSpec((None, N, *size), lambda s, k: (k, 0, *[0] * len(size)))
    block = pl.BlockSpec((None, None, *q.shape[2:]), lambda s, k: (s, k, 0, 0))
    y_SxKxGxd = pl.pallas_call(
        _attend_row,
        grid=(S, K),
        in_specs=[
            block,
            pool(d, P),
            pool(P, d),
            pl.BlockSpec((None, R), lambda s, k: (s, 0)),
            pl.BlockSpec((1,), lambda s, k: (s,)),
            *(pool(2, P) for _ in scales),
        ],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=parallel.platform() != "gpu",
        name="paged_attention",
    )(q, keys, values, table_SxR + first, length_S, *scales)
    return y_SxKxGxd[:, :, :G].reshape(S, H, d)


def _attend_row(q_ref, keys_ref, values_ref, table_ref, length_ref, *rest):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *scales_ref, y_ref = rest
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
    _, sum_G, y_Gxd = jax.lax.fori_loop(0, pl.cdiv(length, P), page, start)
    y_ref[...] = y_Gxd / jnp.maximum(sum_G, 1e-30)[:, None]
