"""The kernel that draws on GPUs, interpreted, and joined weights, on a CPU (see test_gpu.py)."""

import jax
import numpy as np
import pytest
import typed
from test_engine import SHAPE, make_engine, requests  # noqa: F401 (a fixture)

from dapo_jax.model import joined, qwen2
from dapo_jax.rollout import draw, draw_triton, sampler
from dapo_jax.rollout.draw import Draw

EPS, LAST = 2.0**-24, np.float32(draw._BELOW_ONE)
by_kernel = jax.jit(draw_triton.by_kernel, compiler_options=typed.OPTIONS)


@pytest.mark.parametrize(("vocab", "temperature"), [(100, 1.0), (4096, 0.6), (9001, 1.7)])
def test_the_kernel_draws_as_a_float64_sum_would(vocab, temperature):
    """Vocabularies of less than a block, one and three."""
    assert_draws(vocab, temperature)


def assert_draws(vocab, temperature):
    """Half of the tokens cannot come. A token's interval of the running sum holds the uniform
    number, to the rounding of two sums, each at most 1."""
    rng = np.random.default_rng(3)
    logits = (3 * rng.normal(size=(200, vocab))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.5] = -np.inf
    u = np.concatenate([rng.random(196), [0, 0, LAST, LAST]]).astype(np.float32)
    token, logp, entropy, _ = map(np.asarray, by_kernel(logits, u, np.float32(temperature)))
    x = logits.astype(np.float64) / np.float32(temperature)
    weight = np.exp(x - x.max(-1, keepdims=True))
    p = weight / weight.sum(-1, keepdims=True)
    cdf, row = np.cumsum(p, -1), np.arange(len(u))
    assert (p[row, token] > 0).all()
    far = (vocab / 4096 + 4096) * EPS
    assert (u < cdf[row, token] + far).all() and (u > (cdf - p)[row, token] - far).all()
    live = np.where(p > 0, p, 1)
    np.testing.assert_allclose(logp, np.log(p[row, token]), atol=64 * EPS * 12, rtol=0)
    np.testing.assert_allclose(entropy, -(live * np.log(live)).sum(-1), atol=64 * EPS * 12, rtol=0)


def test_a_row_of_one_token_that_can_come():
    logits = np.full((2, 5000), -np.inf, np.float32)
    logits[:, 4500] = 3.0
    drawn = by_kernel(logits, np.array([0.0, LAST], np.float32), np.float32(1))
    assert drawn.token_S.tolist() == [4500, 4500]
    assert drawn.logp_S.tolist() == drawn.entropy_S.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_joined_weights_are_the_same_model(qk_norm, requests, monkeypatch):  # noqa: F811
    """Qwen2.5, whose q, k and v have biases, and Qwen3, whose have norms: samples with the weights
    of like input side by side, and with them apart."""
    shape = SHAPE._replace(scan_layers=False, qk_norm=qk_norm, qkv_bias=not qk_norm)
    params = qwen2.init(shape, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda w: w + 0.1 * rng.standard_normal(w.shape).astype("f"), params)

    def sampled():
        sampler.programs.cache_clear()
        made = make_engine(shape=shape)
        weights = made.decode_params(params)
        names = set(weights["blocks"][0])
        return names, made.generate(weights, requests, Draw(seed=3))[0]

    names, want = sampled()
    assert {"q", "gate"} < names
    monkeypatch.setattr(joined, "pays", lambda mesh, layer: True)
    joined_names, got = sampled()
    sampler.programs.cache_clear()
    assert "joined" in joined_names and not {"q", "k", "v", "gate", "up"} & joined_names
    for a, b in zip(got, want, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logps, b.logps, atol=2**-15)
