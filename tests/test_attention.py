"""Attention against a dense float64 oracle, as near as float32 can be (rounding.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_near, reference

from dapo_jax.model import attention

B, H, K, T, D = 2, 6, 2, 13, 4
# Two sequences and padding; one sequence of one token, one long, no padding.
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] + [2] * 12], np.int32)


def inputs(size=(B, H, K, T, D), seed=0):
    (batch, heads, kv_heads, *rest), rng = size, np.random.default_rng(seed)
    normal = lambda n: rng.normal(size=(batch, n, *rest)).astype(np.float32)
    return normal(heads), normal(kv_heads), normal(kv_heads)


def same_segment(segments):
    """Mask [B, T, T]: a token sees its own segment's tokens up to itself."""
    return (segments[:, :, None] == segments[:, None]) & np.tri(segments.shape[1], dtype=bool)


def oracle(q_BxHxTxd, k_BxKxSxd, v_BxKxSxd, mask_BxTxS):
    """All scores at once; neighbouring query heads share a key/value head."""
    k, v = (jnp.repeat(x, q_BxHxTxd.shape[1] // x.shape[1], 1) for x in (k_BxKxSxd, v_BxKxSxd))
    scores = jnp.einsum("BHtd,BHsd->BHts", q_BxHxTxd, k) / q_BxHxTxd.shape[-1] ** 0.5
    scores = jnp.where(mask_BxTxS[:, None], scores, -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores).max(-1, keepdims=True))
    return jnp.einsum("BHts,BHsd->BHtd", weights / weights.sum(-1, keepdims=True), v)


def value_and_gradient(attend):
    def loss(args):
        y = attend(*args)
        return jnp.sin(y).sum(), y

    return jax.grad(loss, has_aux=True)


@functools.cache
def expected():
    return reference(value_and_gradient(lambda *a: oracle(*a, same_segment(SEGMENTS))), inputs())


@pytest.mark.parametrize("chunk", [64, T, 12, 5, 4, 1])
def test_packed_is_causal_attention_within_segments(chunk):
    assert_near(
        value_and_gradient(lambda *a: attention.packed(*a, SEGMENTS, chunk))(inputs()), expected()
    )


def test_padding_alone_stays_finite():
    grad, out = value_and_gradient(lambda *a: attention.packed(*a, 0 * SEGMENTS, 5))(inputs())
    assert all(np.isfinite(x).all() for x in (out, *grad))


@pytest.mark.parametrize("chunk", [64, 3, 2])
def test_causal_continues_where_the_keys_stand(chunk):
    q, k, v = inputs()
    seen = np.broadcast_to(np.tri(T, dtype=bool)[4:10], (B, 6, T))
    want = reference(lambda *a: oracle(*a, seen), q[:, :, 4:10], k, v)
    assert_near(attention.causal(q[:, :, 4:10], k, v, 4, chunk), want)
