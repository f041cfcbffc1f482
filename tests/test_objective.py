"""The clipped objective (paper Eq. 8), token by token, and the weights that make it a mean."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from dapo_jax import config
from dapo_jax.dapo import objective

NORMALIZERS = ["batch_tokens", "group_tokens", "chunk_tokens", "sequence", "constant"]

# Two responses, of 2 and 3 tokens, with every case: clipped high, free below, free, dual, low.
LOG_RATIO = np.array([0.3, -0.3, 0.1, np.log(12), -0.5], np.float32)
ADVANTAGE = np.array([1.5, 1.5, -0.5, -0.5, -0.5], np.float32)
PER_TOKEN = [-1.92, -1.111227, 0.552585, 5.0, 0.4]
OLD = np.array([-1.0, -2.5, -0.1, -7.0, -3.0], np.float32)


def make(**changes) -> objective.Coefficients:
    c = config.base()
    c.loss.update(changes)
    return objective.coefficients(c.loss)


def golden(c):
    return objective.ppo_clip(OLD + LOG_RATIO, OLD, ADVANTAGE, c)


def test_each_case_of_the_clip():
    term = golden(make(dual_clip=10.0))
    np.testing.assert_allclose(term.loss, PER_TOKEN, atol=2e-6)
    np.testing.assert_allclose(term.ratio, np.exp(LOG_RATIO), rtol=1e-6)
    assert term.clipped_high.tolist() == [True, False, False, False, False]
    assert term.clipped_low.tolist() == [False, False, False, False, True]
    assert term.dual_clipped.tolist() == [False, False, False, True, False]
    off = golden(make(dual_clip=0.0))  # a bad token pays its whole ratio
    np.testing.assert_allclose(off.loss, [*PER_TOKEN[:3], 6.0, PER_TOKEN[4]], atol=2e-6)
    assert not off.dual_clipped.any()


def test_gradient_is_zero_exactly_where_a_bound_is_reported():
    """And -A x ratio elsewhere: the flags say what the clip did, not what it might have done."""
    c = make(dual_clip=3.0)
    grid = np.meshgrid(np.linspace(-3.97, 4.03, 41), [-2.5, -1.0, -0.01, 0.01, 1.0, 3.0])
    log_ratio, advantage = (x.ravel().astype(np.float32) for x in grid)
    old = np.zeros_like(log_ratio)
    grad = jax.grad(lambda x: objective.ppo_clip(x, old, advantage, c).loss.sum())(log_ratio)
    term = objective.ppo_clip(log_ratio, old, advantage, c)
    bound = term.clipped_low | term.clipped_high | term.dual_clipped
    assert term.clipped_low.any() and term.clipped_high.any() and term.dual_clipped.any()
    expected = np.where(bound, 0.0, -advantage * np.exp(log_ratio))
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dual", [0.0, 10.0])
def test_a_token_without_advantage_is_zero_loss_and_not_clipped(dual):
    """Also where its ratio lies beyond the bounds: there is no gradient that they could stop."""

    def loss(x):
        term = objective.ppo_clip(x, np.zeros(3), np.zeros(3), make(dual_clip=dual))
        return term.loss.sum(), term

    (value, term), grad = jax.value_and_grad(loss, has_aux=True)(jnp.array([0.69, 0.7, -0.69]))
    assert value == 0 and not grad.any()
    assert not (term.clipped_low | term.clipped_high | term.dual_clipped).any()


@pytest.mark.parametrize("gap", [50.0, 1e4, -1e4])
def test_log_ratio_guard(gap):
    term = objective.ppo_clip(jnp.float32(gap), jnp.float32(0), jnp.float32(-1), make())
    assert term.ratio == pytest.approx(np.exp(np.clip(gap, -20, 20)), rel=1e-5)
    assert np.isfinite(term.loss)
    near = objective.ppo_clip(
        jnp.float32(3), jnp.float32(0), jnp.float32(-1), make(log_ratio_max=2.0)
    )
    assert near.ratio == pytest.approx(np.exp(2), rel=1e-6)


def test_k3_against_float64():
    logp, ref = -np.random.default_rng(0).exponential(2.0, (2, 500)).astype(np.float32)
    gap = ref.astype(np.float64) - logp
    got = np.asarray(objective.k3(logp, ref))
    np.testing.assert_allclose(got, np.exp(gap) - 1 - gap, rtol=2e-5, atol=2e-6)
    assert (got > -1e-6).all() and objective.k3(jnp.float32(-3.0), jnp.float32(-3.0)) == 0
    far = objective.k3(np.float32([-1e4, 0]), np.float32([0, -1e4]))  # guarded
    np.testing.assert_allclose(far, [np.exp(20) - 21, 19], rtol=1e-6)


def test_coefficients_from_config():
    off = make(dual_clip=0.0)
    assert off.dual_clip == off.entropy_enough == np.inf
    on = make(dual_clip=10.0, entropy_coef=0.25, entropy_enough=0.5)
    assert (on.dual_clip, on.entropy_coef, on.entropy_enough) == (10.0, 0.25, 0.5)


def weights_oracle(tokens, groups, normalizer, chunk, most):
    """Written as nested means over lists of kept responses."""
    kept = [q for q, n in enumerate(tokens) if n]
    if normalizer == "constant":  # Dr. GRPO's: the mean over responses of sums over `most`
        return [1 / most / len(kept) if n else 0.0 for n in tokens]
    if normalizer == "batch_tokens":
        parts, share = [kept], lambda part: 1.0
    elif normalizer == "sequence":
        parts, share = [[q] for q in kept], lambda part: 1 / len(kept)
    elif normalizer == "group_tokens":
        of = defaultdict(list)
        for q in kept:
            of[groups[q]].append(q)
        parts, share = list(of.values()), lambda part: 1 / len(of)
    else:
        parts = [kept[i : i + chunk] for i in range(0, len(kept), chunk)]
        share = lambda part: len(part) / len(kept)
    out = [0.0] * len(tokens)
    for part in parts:
        for q in part:
            out[q] = share(part) / sum(tokens[p] for p in part)
    return out


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@given(
    batch=st.lists(st.tuples(st.integers(0, 40), st.integers(3, 6)), min_size=1, max_size=24),
    chunk=st.integers(1, 9),
    most=st.integers(40, 50),
)
@example(batch=[(0, 3), (4, 3), (0, 4), (2, 4), (6, 5), (0, 6)], chunk=2, most=40)
def test_weights_against_nested_means(normalizer, batch, chunk, most):
    """0 tokens stand for a filtered response: it counts in no denominator."""
    tokens, groups = (list(x) for x in zip(*batch, strict=True))
    got = objective.token_weights(np.array(tokens), np.array(groups), normalizer, chunk, most)
    expected = weights_oracle(tokens, groups, normalizer, chunk, most)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    if normalizer != "constant":
        assert np.dot(got, tokens) == pytest.approx(1.0 if any(tokens) else 0.0)
