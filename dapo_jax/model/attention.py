"""Attention of the trainer (packed rows) and of the decoder (one query, a cache).

Dims: B rows, T tokens of a row, C cached tokens, H query heads, K key/value heads, d head_dim.
Heads come before tokens: on CPU such products are several times faster.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row of padding must not turn into NaN
_F32 = dict(preferred_element_type=jnp.float32)
# So many low bits of a segment's number tell the sequences of a row apart. The bits above number a
# prompt that several of them share; the prompt's own cells have 0 in the low bits.
SHARED = 16


def packed(q_BxHxTxd, k_BxKxTxd, v_BxKxTxd, segments_BxT, chunk: int, shared=False) -> jax.Array:
    """Causal attention within segments, the sequences of a row; segment 0 is padding. [B, H, T, d].
    Queries go in chunks, so that scores take chunk x T and not T x T; softmax is in float32."""
    (_, H, _, d), K = q_BxHxTxd.shape, k_BxKxTxd.shape[1]
    # Each key/value head serves H/K neighbouring query heads.
    k_BxHxTxd, v_BxHxTxd = (jnp.repeat(x, H // K, axis=1) for x in (k_BxKxTxd, v_BxKxTxd))

    def attend(q_BxHxcxd, mask_Bx1xcxT):
        scores = jnp.einsum("BHcd,BHTd->BHcT", q_BxHxcxd, k_BxHxTxd, **_F32)
        weights = jax.nn.softmax(jnp.where(mask_Bx1xcxT, scores * d**-0.5, _MASKED), axis=-1)
        return jnp.einsum("BHcT,BHTd->BHcd", weights.astype(v_BxHxTxd.dtype), v_BxHxTxd)

    return in_query_chunks(attend, q_BxHxTxd, segments_BxT, chunk, shared)


def in_query_chunks(
    attend: Callable, q_BxHxTxd, segments_BxT, chunk: int, shared: bool = False, prefixes=False
) -> jax.Array:
    """`attend(q_BxHxcxd, mask_Bx1xcxT) -> y_BxHxcxd` on `chunk` queries at a time; by the bool mask
    a query sees its own segment's tokens up to itself, and where `shared` its prompt's. prefixes:
    each chunk is a call of its own, with a mask of the keys up to its end."""
    T, d = q_BxHxTxd.shape[2:]
    index_T = jnp.arange(T)

    def masked(q_BxHxcxd, index_c, segments_Bxc, index_T=index_T, segments_BxT=segments_BxT):
        same_BxcxT = segments_Bxc[:, :, None] == segments_BxT[:, None, :]
        if shared:
            prompt_Bxc = segments_Bxc & -(1 << SHARED)  # none: 0, as padding, which is behind
            same_BxcxT |= prompt_Bxc[:, :, None] == segments_BxT[:, None, :]
        causal_cxT = index_c[:, None] >= index_T[None, :]
        return attend(q_BxHxcxd, (same_BxcxT & causal_cxT)[:, None])

    if chunk >= T:
        return masked(q_BxHxTxd, index_T, segments_BxT)
    if prefixes:
        step, parts = jax.checkpoint(masked), []
        for start in range(0, T, chunk):
            part, seen = slice(start, start + chunk), slice(start + chunk)
            given = q_BxHxTxd[:, :, part], index_T[part], segments_BxT[:, part]
            parts.append(step(*given, index_T[seen], segments_BxT[:, seen]))
        return jnp.concatenate(parts, axis=2)

    pad = -T % chunk

    def split(x, axis):  # [..., T, ...] -> [steps, ..., chunk, ...]
        x = jnp.pad(x, [(0, pad * (i == axis)) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :]), axis, 0)

    # Remat: the backward pass makes one chunk's scores again instead of keeping all of them.
    step = jax.checkpoint(lambda args: masked(*args))
    out = jax.lax.map(step, (split(q_BxHxTxd, 2), split(index_T, 0), split(segments_BxT, 1)))
    out = jnp.moveaxis(out, 0, 2)  # [B, H, steps, chunk, d]
    return out.reshape(*out.shape[:2], T + pad, d)[:, :, :T]


def causal(q_BxHxTxd, k_BxKxCxd, v_BxKxCxd, start, chunk: int) -> jax.Array:
    """Queries at positions start to start + T over keys at 0 to C. Returns [B, H, T, d]."""
    B, H, T, d = q_BxHxTxd.shape
    K, C = k_BxKxCxd.shape[1:3]
    steps = T // chunk if T % chunk == 0 else 1
    q = q_BxHxTxd.reshape(B, K, H // K, steps, T // steps, d)
    position = (start + jnp.arange(T)).reshape(steps, T // steps)

    def attend(args):
        q_BxKxGxcxd, position_c = args
        scores = jnp.einsum("BKGcd,BKCd->BKGcC", q_BxKxGxcxd, k_BxKxCxd, **_F32)
        seen_cxC = jnp.arange(C) <= position_c[:, None]
        weights = jax.nn.softmax(jnp.where(seen_cxC, scores * d**-0.5, _MASKED), axis=-1)
        return jnp.einsum("BKGcC,BKCd->BKGcd", weights.astype(v_BxKxCxd.dtype), v_BxKxCxd)

    if steps == 1:
        return attend((q[:, :, :, 0], position[0])).reshape(B, H, T, d)
    out = jax.lax.map(attend, (jnp.moveaxis(q, 3, 0), position))
    return jnp.moveaxis(out, 0, 3).reshape(B, H, T, d)
