"""What only a GPU can show; skipped without one.

    export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m pytest -n 0 tests/test_gpu.py

Of the other tests those run there whose mesh is one device, but for those that ask for float32
products of a GPU's own accord, which are TF32's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from test_attention import value_and_gradient
from test_attention_kernels import SEGMENTS, expected, inputs
from test_draw_triton import assert_draws
from test_engine import assert_same_bits, make_engine, samples_of
from test_triton import case_of_triton
from test_update import relative_gap as gap

from dapo_jax import config, parallel, plan
from dapo_jax.dapo import objective, packing, update
from dapo_jax.model import (
    attention,
    attention_kernels,
    learner,
    packed_triton,
    paged_triton,
    paged_xla,
    qwen2,
)
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
# Of Qwen2.5-0.5B all but the depth, and a vocabulary of fewer rows.
SHAPE = plan.published("Qwen/Qwen2.5-0.5B")._replace(num_layers=3, vocab_size=16_384, init_std=0.05)
ROW = 320  # tokens: three pages
RULES = config.base().sharding
LR = 1e-3


def mesh(kind: str = "gpu") -> Mesh:
    return Mesh(np.array(jax.devices(kind)[:1]).reshape(1, 1, 1), parallel.AXES)


@functools.cache
def params():
    """On the host; biases and norms too, which `init` leaves at 0 and 1."""
    with jax.default_device(jax.devices("cpu")[0]):
        made = jax.device_get(qwen2.init(SHAPE, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda w: w + np.float32(0.02) * rng.standard_normal(w.shape, "f"), made)


@pytest.mark.parametrize("chunk", [512, 128, 100])
@pytest.mark.parametrize("d", [64, 128])
def test_cudnn_and_triton_and_their_gradients(d, chunk):
    """Against float64, and no further from it than the plain kernel in bfloat16."""
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs(d))
    want, _ = expected(tuple(np.asarray(x, np.float32) for x in low))
    run = lambda f: jax.device_get(value_and_gradient(jax.jit(f))(low))
    ways = [lambda *a: attention_kernels.cudnn(*a, SEGMENTS, chunk)]
    ways += [lambda *a: packed_triton.attend(*a, SEGMENTS, "")]
    real = (SEGMENTS > 0)[:, None, :, None]
    plain = run(lambda *a: attention.packed(*a, SEGMENTS, chunk))
    for got in map(run, ways):
        assert got[1].dtype == jnp.bfloat16
        for ours, theirs, right in zip(*map(jax.tree.leaves, (got, plain, want)), strict=True):
            assert gap(ours, right) <= 2e-2
            assert gap(ours * real, right * real) <= 1.5 * gap(theirs * real, right * real) < 1e-2


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("page", "d"), [(128, 64), (128, 128), (64, 64), (16, 16), (32, 128)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("bfloat16", 2e-2)])
def test_paged_kernel_against_the_plain_reader(dtype, tolerance, page, d, quantized):
    """In float32 of the same numbers; a row by one program or several."""
    g, q, pool, rows = case_of_triton(page, d, quantized, dtype)
    by_shares = jax.jit(paged_triton.attend, static_argnums=5)
    whole = [x if x.dtype == jnp.int8 else x.astype(jnp.float32) for x in pool]
    with jax.default_matmul_precision("highest"):
        read = jax.jit(functools.partial(paged_xla.read_pages, g))
        want = read(q.astype(jnp.float32), whole, 1, rows, paged_xla.plan_of(rows, page))
    for count in (1, 3, 8):
        got = by_shares(q, pool, g.pages, rows, None, count)
        np.testing.assert_allclose(got, want, atol=tolerance)
    assert np.abs(np.delete(want, 3, 0)).max() > 0.1


@pytest.mark.parametrize("vocab", [1000, 16_384, 151_936])
def test_the_kernel_that_draws_against_float64(vocab):
    assert_draws(vocab, 0.9)


def logits(tokens):
    with parallel.mesh_scope(mesh(), RULES.train, "float32"):
        weights = jax.device_put(params(), jax.devices("gpu")[0])
        return jax.device_get(jax.jit(lambda p: qwen2.bind(SHAPE, p)(tokens))(weights))


@functools.cache
def engine(dtype="float32", **how) -> Engine:
    sizes = dict(slots=16, chunk=32, prompt_tokens=64, response_tokens=ROW - 64) | how
    stops = range(0, SHAPE.vocab_size, 150)  # a response has 150 tokens, more or less
    return make_engine(shape=SHAPE, stop_ids=stops, dtype=dtype, **sizes)


def requests():
    return samples_of((1, 2, 17, 40, 63, 64), shape=SHAPE)


def sample(**how):
    made = engine(**how)
    assert made.geometry.reader == ("rows" if how.get("page_tokens") == ROW else "triton")
    return made.generate(made.decode_params(params()), requests(), Draw(seed=5, temperature=0.9))[0]


def assert_alike(got, want):
    """The same tokens, up to one whose uniform number lies so near to the border between it and its
    neighbour that the rounding of products of other shapes decides: 1 of 1,000 tokens or so, where
    16,384 borders are off by 2^-24 or so each."""
    parted = 0
    for a, b in zip(got, want, strict=True):
        n = min(len(a.tokens), len(b.tokens))
        apart = np.nonzero(a.tokens[:n] != b.tokens[:n])[0]
        assert len(apart) or len(a.tokens) == len(b.tokens)
        if len(apart):
            parted += 1
            assert abs(int(a.tokens[apart[0]]) - int(b.tokens[apart[0]])) == 1
    assert parted <= len(want) // 3


def test_samples_are_of_the_whole_forward_pass_for_any_slots_chunk_and_pages():
    """Log-probs and entropies of float32, read from pages and from whole rows; tokens alike."""
    want = sample()
    assert {r.truncated for r in want} == {True, False}
    small = dict(page_tokens=64, cache_fraction=0.4)
    for how in ({}, dict(page_tokens=ROW), small, dict(slots=3), dict(slots=32, chunk=7)):
        got = sample(**how)
        assert_alike(got, want)
        rows = np.zeros((len(got), ROW), np.int32)
        for row, q, r in zip(rows, requests(), got, strict=True):
            row[: len(q.prompt) + len(r.tokens)] = [*q.prompt, *r.tokens]
        for q, r, at in zip(requests(), got, logits(rows), strict=True):
            n = len(r.tokens)
            at = at[len(q.prompt) - 1 :][:n] / np.float64(0.9)
            at -= at.max(-1, keepdims=True)
            at -= np.log(np.exp(at).sum(-1, keepdims=True))
            np.testing.assert_allclose(r.logps, at[np.arange(n), r.tokens], atol=1e-4)
            np.testing.assert_allclose(r.entropies, -(np.exp(at) * at).sum(-1), atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_bits(dtype):
    assert_same_bits(sample(dtype=dtype), sample(dtype=dtype))


def items(n=24):
    rng = np.random.default_rng(1)
    length, advantage = rng.integers(8, ROW - 64, n), rng.normal(size=n)
    draw = lambda n: rng.integers(0, 500, n)  # the same rows of the embedding over and over
    weight = 1 / length.sum()
    return [
        packing.Item(draw(rng.integers(4, 64)), draw(n), np.full(n, -9.0, "f"), float(a), weight)
        for n, a in zip(length, advantage, strict=True)
    ]


ADAM = learner.optimizer(0.9, 0.95, 1e-8, 0.1, 1.0)
GRADIENT = optax.trace(decay=0.0)  # its state is the gradient, so that `update` hands it out


@functools.cache
def trainer(kind, dtype, tx=ADAM):
    return update.Trainer(SHAPE, learner.Setup(mesh(kind), RULES.train.to_dict(), tx, dtype))


def arguments(made, alone=False):
    layout = packing.Layout(row_tokens=ROW, micro_rows=4, max_items=24)
    rows, used, _ = packing.pack(items(), layout)
    if alone:  # a row for each sequence
        one = layout._replace(micro_rows=1, max_items=1)
        each = [packing.pack([i], one)[0] for i in items()]
        rows, used = jax.tree.map(lambda *x: np.concatenate(x, 1), *each), 1
    rows = parallel.to_device(rows, made.row_sharding)
    loss = objective.coefficients(config.base().loss)
    old = made.log_probs(made_params(made), rows, np.int32(used), np.float32(1))
    knobs = update.Knobs(np.float32(LR), np.float32(1), loss)
    return update.Batch(rows, old, old, np.int32(used)), knobs


def made_params(made):
    return parallel.to_device(params(), made.param_shardings)


def gradient(kind, dtype="float32", **how):
    made = trainer(kind, dtype, GRADIENT)
    state = made_params(made), made.init_opt_state(made_params(made))
    return jax.device_get(made.update(*state, *arguments(made, **how))[1].trace)


def test_the_gradient_is_the_cpus_in_every_layout():
    want = gradient("cpu")
    assert gap(gradient("gpu"), want) < 2e-5
    assert gap(gradient("gpu", alone=True), want) < 2e-5
    low = gradient("gpu", "bfloat16")
    assert gap(low, want) < 5e-2
    assert gap(gradient("gpu", "bfloat16", alone=True), low) < 5e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_give_the_same_bits_every_time(dtype):
    """Over three of them: like tokens' gradients are added up in one order."""
    made = trainer("gpu", dtype)

    def run():
        state = made_params(made), made.init_opt_state(made_params(made))
        for _ in range(3):
            *state, log = made.update(*state, *arguments(made))
        return jax.device_get((state, log))

    first = run()
    assert not first[1]["skipped"]
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, run(), first)
