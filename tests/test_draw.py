"""Draws against exact distributions, and the nucleus against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from rounding import EPS, assert_near, reference

from dapo_jax.rollout import draw

LOGITS = np.array([1.5, -0.3, 0.0, 2.1, 1.5, -2.0, 0.7, 1.1], np.float32)
V = len(LOGITS)
draw_jit = jax.jit(draw.draw, static_argnames="mode")
apart_jit = jax.jit(draw.draw_apart, static_argnames="mode")
nucleus_jit = jax.jit(draw.nucleus)


def softmax(logits, temperature=1.0):
    x = np.asarray(logits, np.float64) / temperature
    w = np.exp(x - x.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def nucleus_oracle(weights, top_p):
    """Sort, then take whole groups of equal weights until their share is enough."""
    weights = np.asarray(weights, np.float64)
    mask, need = np.zeros(len(weights), bool), top_p * weights.sum()
    for value in sorted(set(weights.tolist()), reverse=True):
        mask |= weights == value
        if weights[mask].sum() >= need:
            break
    return mask


@pytest.fixture(scope="module")
def uniforms():
    """200,000 of them: 50 problems x 16 samples x 250 tokens."""
    stream, sample, token = (x.ravel() for x in np.mgrid[:50, :16, :250].astype(np.int32))

    @jax.jit
    def make(stream, sample, token):
        return draw.uniform(draw.row_keys(jax.random.key(7), stream, sample), token)

    return np.asarray(make(stream, sample, token))


def chi_square(tokens, p):
    expected = p * len(tokens)
    counts = np.bincount(tokens, minlength=V)
    assert not counts[p == 0].any()
    live = p > 0
    return np.sum((counts[live] - expected[live]) ** 2 / expected[live])


LIMIT = 35.0  # chi-square, 7 degrees of freedom: exceeded once in 90,000 times


def many(uniforms, temperature, top_p, mode):
    rows = np.broadcast_to(LOGITS, (len(uniforms), V))
    return np.asarray(draw_jit(rows, uniforms, temperature, top_p, mode=mode).token_S)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_full_draws_follow_the_softmax(uniforms, temperature):
    tokens = many(uniforms, temperature, 1.0, "full")
    assert chi_square(tokens, softmax(LOGITS, temperature)) < LIMIT
    assert chi_square(tokens, softmax(LOGITS, temperature * 1.05)) > LIMIT  # it can tell


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.9])
def test_nucleus_draws_follow_the_renormalized_nucleus(uniforms, top_p):
    p = softmax(LOGITS, 0.8)
    mask = nucleus_oracle(p, top_p)
    assert 0 < mask.sum() < V
    tokens = many(uniforms, 0.8, top_p, "top_p")
    assert chi_square(tokens, np.where(mask, p, 0) / p[mask].sum()) < LIMIT


def test_uniforms_belong_to_their_counter():
    """The same number in whatever row, batch or order it is asked for."""
    counters = [(s, g, t) for s in (0, 1, 2**31 - 1) for g in (0, 1, 5) for t in (0, 1, 9)]

    def make(seed, rows):
        stream, sample, token = np.array(rows, np.int32).T
        keys = draw.row_keys(jax.random.key(seed), stream, sample)
        return np.asarray(draw.uniform(keys, token)).tolist()

    together = dict(zip(counters, make(3, counters), strict=True))
    order = np.random.default_rng(0).permutation(len(counters))
    shuffled = [counters[i] for i in order]
    assert make(3, shuffled) == [together[k] for k in shuffled]
    assert make(3, counters[4:5]) == [together[counters[4]]]
    assert len(set(together.values())) == len(counters)
    assert not set(make(4, counters)) & set(together.values())


# Sums of such integers and eighths of them are exact in float32, of whatever power of two they are
# multiples; so ties and boundaries are too.
@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 6) | st.integers(0, 2**17), min_size=12, max_size=12).filter(any),
    st.integers(1, 8),
    st.integers(-100, 80),
)
def test_nucleus_is_the_sorted_one(weights, eighths, power):
    weights = np.ldexp(np.float32(weights), power)
    wanted = nucleus_oracle(weights, eighths / 8)
    for rows in (1, 2):  # a row alone has fewer halvings
        got = nucleus_jit(np.tile(weights, (rows, 1)), eighths / 8)
        np.testing.assert_array_equal(got, [wanted] * rows)


def test_a_row_alone_has_the_nucleus_that_it_has_among_others():
    """Also where the sums of a large vocabulary round, which their bound must leave room for."""
    logits_SxV = np.random.default_rng(0).standard_normal((4, 50_000))
    logits_SxV *= np.array([0.0, 0.01, 0.3, 3.0])[:, None]
    weights_SxV = np.exp(logits_SxV - logits_SxV.max(-1, keepdims=True)).astype(np.float32)
    neighbours_V = np.zeros(50_000, np.float32)  # each of more halvings decides
    neighbours_V[:1000] = 1 - np.arange(1000) * 2.0**-24
    weights_SxV = np.concatenate([weights_SxV, neighbours_V[None]])
    for top_p in (1e-6, 0.3, 0.7, 0.99, 0.9999, 1 - 2**-24, 1.0):
        alone_SxV = [nucleus_jit(w_V[None], np.float32(top_p))[0] for w_V in weights_SxV]
        np.testing.assert_array_equal(alone_SxV, nucleus_jit(weights_SxV, np.float32(top_p)))


def test_greedy_takes_the_first_of_the_most_likely_and_records_temperature_1():
    """Also of two whose weights are equal in float32, and at the end of a padded vocabulary."""
    logits = np.array([[0.0, 2.0, 2.0], [3.0, -1.0, 0.5], [0.0, -3e-8, 3e-8]], np.float32)
    out = draw_jit(logits, np.full(3, 0.99, np.float32), 5.0, 0.1, mode="greedy")
    assert out.token_S.tolist() == [1, 0, 2]
    np.testing.assert_allclose(
        out.logp_S, np.log(softmax(logits)[[0, 1, 2], [1, 0, 2]]), rtol=0, atol=8 * EPS
    )
    wide = np.random.default_rng(0).integers(-9, 9, (40, 8191)).astype(np.float32)  # a prime
    wide[0] = np.arange(8191)
    out = draw_jit(wide, np.zeros(40, np.float32), 1.0, 1.0, mode="greedy")
    np.testing.assert_array_equal(out.token_S, wide.argmax(-1))


@pytest.mark.parametrize("mode", ["full", "top_p", "greedy"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_records_are_of_the_full_distribution_at_temperature(mode, temperature):
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(64, 50)) * 6).astype(np.float32)
    u = rng.random(64).astype(np.float32)
    top_p = np.where(np.arange(64) % 3, 0.6, 1.0).astype(np.float32)
    out = draw_jit(logits, u, temperature, top_p, mode=mode)
    assert out.token_S.dtype == jnp.int32 and out.logp_S.dtype == jnp.float32
    apart = apart_jit(logits, u, temperature, top_p, mode=mode)
    np.testing.assert_array_equal(apart.token_S, out.token_S)
    temperature = 1.0 if mode == "greedy" else temperature

    def records(logits):
        logp = jax.nn.log_softmax(logits / temperature)
        return logp[np.arange(64), out.token_S], -(jnp.exp(logp) * logp).sum(-1)

    exact = reference(records, logits)
    for drawn in (out, apart):
        assert_near((drawn.logp_S, drawn.entropy_S), exact)


LAST = np.float32(1 - 2**-23)  # the largest that `uniform` can give


def test_a_cumulative_sum_that_is_not_monotone_draws_no_token_of_weight_zero(monkeypatch):
    """Parallel sums are wrong in the last bit here and there; this one is wrong in the second
    decimal, at every token of weight 0 and at the end."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(500, 32)).astype(np.float32)
    logits[:, ::2] = -np.inf
    exact = jnp.cumsum

    def rough(x, axis):
        error = rng.uniform(-0.02, 0.02, x.shape) * np.asarray(x.sum(-1, keepdims=True))
        return exact(x, axis) + jnp.where(x == 0, error, 0)

    monkeypatch.setattr(jnp, "cumsum", rough)
    u = rng.random(500).astype(np.float32)
    u[:50], u[50:100] = 0.0, LAST
    out = draw.draw(logits, u, 1.0, 1.0, "full")
    assert np.isfinite(np.asarray(out.logp_S)).all()
    assert np.float32(draw._BELOW_ONE) == np.nextafter(np.float32(1), np.float32(0))


def test_a_large_vocabulary_is_drawn_as_a_float64_sum_would():
    rng = np.random.default_rng(3)
    weight = rng.exponential(size=20_000)
    weight[rng.random(weight.size) < 0.5] = 0
    logits = np.log(np.maximum(weight, 1e-300)).astype(np.float32)
    u = np.concatenate([rng.random(200), [0, LAST]]).astype(np.float32)
    rows = np.broadcast_to(logits, (len(u), len(logits)))
    token = np.asarray(draw_jit(rows, u, 1.0, 1.0, mode="full").token_S)
    cdf = np.cumsum(weight) / weight.sum()
    assert (weight[token] > 0).all()
    far = sum(draw.blocks(weight.size)) * EPS  # of two sums, each at most 1
    assert (u < cdf[token] + far).all()
    assert (u > cdf[token] - weight[token] / weight.sum() - far).all()


def test_blocks_near_the_square_root():
    """Sums of a draw are by block, so that other blocks would be other bits."""
    assert [draw.blocks(v) for v in (48, 50257, 151936, 152064)] == [
        (8, 6), (128, 393), (128, 1187), (384, 396),
    ]  # fmt: skip
