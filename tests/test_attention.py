"""Attention against a float64 oracle that visits one query at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.model import attention

B, H, K, T, D = 2, 6, 2, 13, 4
# Two sequences and padding; one sequence of one token, one long, no padding.
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] + [2] * 12], np.int32)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, H, T, D)).astype(np.float32)
    k, v = rng.normal(size=(2, B, K, T, D)).astype(np.float32)
    return q, k, v


def oracle(q, k, v, segments):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, h, t in np.ndindex(B, H, T):
        kv = h // (H // K)
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        weights = np.exp(k[b, kv, seen] @ q[b, h, t] / np.sqrt(D))
        out[b, h, t] = weights @ v[b, kv, seen] / weights.sum()
    return out


@pytest.mark.parametrize("chunk", [64, T, 12, 5, 1])
def test_packed_is_causal_attention_within_segments(chunk):
    q, k, v = inputs()
    got = attention.packed(q, k, v, SEGMENTS, chunk)
    np.testing.assert_allclose(got, oracle(q, k, v, SEGMENTS), atol=2e-6)


def test_a_segment_does_not_see_its_neighbours():
    q, k, v = inputs()
    before = np.asarray(attention.packed(q, k, v, SEGMENTS, 5))
    other = SEGMENTS[:, None, :, None] != 2
    q, k, v = (np.where(other, x + 100, x) for x in (q, k, v))
    after = np.asarray(attention.packed(q, k, v, SEGMENTS, 5))
    mine = np.broadcast_to(~other, before.shape)
    np.testing.assert_array_equal(before[mine], after[mine])
    assert np.abs(before - after)[~mine].max() > 1  # the change was felt where it was made


def test_chunks_have_the_gradient_of_the_whole():
    def loss(args, chunk):
        return jnp.sum(jnp.sin(attention.packed(*args, SEGMENTS, chunk)))

    whole = jax.grad(loss)(inputs(), 64)
    parts = jax.grad(loss)(inputs(), 4)
    for a, b in zip(whole, parts, strict=True):
        assert np.abs(a).max() > 0.1
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_padding_alone_stays_finite():
    q, k, v = inputs()
    out = attention.packed(q, k, v, np.zeros_like(SEGMENTS), 5)
    grad = jax.grad(lambda q: attention.packed(q, k, v, np.zeros_like(SEGMENTS), 5).sum())(q)
    assert np.isfinite(out).all() and np.isfinite(grad).all()


def test_repeat_kv_serves_neighbouring_heads():
    _, k, _ = inputs()
    repeated = np.asarray(attention.repeat_kv(k, H))
    for h in range(H):
        np.testing.assert_array_equal(repeated[:, h], k[:, h // (H // K)])


@pytest.mark.parametrize("chunk", [64, 3, 2])
def test_causal_continues_where_the_keys_stand(chunk):
    q, k, v = inputs()
    whole = oracle(q, k, v, np.ones_like(SEGMENTS))
    got = attention.causal(q[:, :, 4:10], k, v, 4, chunk)
    np.testing.assert_allclose(got, whole[:, :, 4:10], atol=2e-6)
