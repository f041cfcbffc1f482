"""The network against a float64 NumPy one, and its ways of computing against each other."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import Mesh
from levels import slow
from rounding import EPS, assert_near, reference
from tables import cases

from dapo_jax import build, config, parallel, plan
from dapo_jax.model import head, int8_keys, ops, qwen2, rope, softmax_triton
from dapo_jax.pods import topology

TINY = qwen2.Shape(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=4, rope_theta=1e4, rms_eps=1e-6, tie_embeddings=False, init_std=0.5,
    scan_layers=False, remat="none",
)  # fmt: skip
QWEN3 = TINY._replace(qkv_bias=False, qk_norm=True)
# Of the two frequencies of a head of 4 the second turns less than once in 64 tokens.
YARN = QWEN3._replace(yarn=rope.Yarn(4.0, 64, 1.25))
FAMILIES = {"qwen2": TINY, "qwen3": QWEN3, "yarn": YARN}
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] * 9 + [2] * 4])
POSITIONS = np.array([[*range(5), *range(6), 0, 0], [*range(9), *range(4)]])
RULES = config.base().sharding.train.to_dict()
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, SEGMENTS.shape)


def mesh_of(sizes):
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), parallel.AXES)


@functools.cache
def params(shape=TINY):
    """Random weights; biases and norms too, which `init` leaves at 0 and 1."""
    rng = np.random.default_rng(1)
    noise = lambda w: w + np.float32(0.2) * rng.normal(size=w.shape).astype(np.float32)
    return jax.tree.map(noise, jax.jit(qwen2.init, static_argnums=0)(shape, jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=0)
def hidden(shape, params):
    return qwen2.bind(shape, params).hidden(TOKENS, POSITIONS, SEGMENTS)


@functools.partial(jax.jit, static_argnames="shape")
def call(params, tokens, shape=TINY):
    return qwen2.bind(shape, params)(tokens)


def yarn_factors(c):
    """The paper's formula, arXiv 2309.00071, section 3.2: ramp over turns rounded to dimensions."""
    if not c.yarn:
        return 1.0
    dimension = lambda turns: (
        c.head_dim / 2 * np.log(c.yarn.original / (2 * np.pi * turns)) / np.log(c.rope_theta)
    )
    low = max(np.floor(dimension(c.yarn.beta_fast)), 0)
    high = min(np.ceil(dimension(c.yarn.beta_slow)), c.head_dim - 1)
    slow = np.clip((np.arange(c.head_dim // 2) - low) / (high - low), 0, 1)
    return 1 - slow + slow / c.yarn.factor


def oracle_hidden(c, params, tokens, xp=np, held=lambda x: x):
    """Final hidden states [..., T, D] of sequences that begin at cell 0, in the straightest way.
    held: what a cache makes of keys and of values [..., T, K, d]."""
    T, half = tokens.shape[-1], c.head_dim // 2
    angle_Tx1xh = xp.arange(T)[:, None, None] * (
        xp.power(c.rope_theta, -xp.arange(half) / half) * yarn_factors(c)
    )
    turn = xp.exp(1j * angle_Tx1xh) * (c.yarn.attention_factor if c.yarn else 1)
    norm = lambda x, scale: x / xp.sqrt((x * x).mean(-1, keepdims=True) + c.rms_eps) * scale

    def rotate(x):  # [..., T, heads, d]: pairs (i, i + d/2) as complex numbers
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return xp.concatenate([z.real, z.imag], -1)

    x, serves = params["embed"][tokens], np.arange(c.num_heads) // (c.num_heads // c.num_kv_heads)
    for i in range(c.num_layers):
        w = {name: stacked[i] for name, stacked in params["blocks"].items()}
        h = norm(x, w["attn_norm"])
        q, k, v = (xp.tensordot(h, w[n], 1) + w.get(f"{n}_bias", 0) for n in "qkv")
        if c.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        k, v = held(rotate(k)), held(v)
        scores = xp.einsum("...Thd,...Shd->...hTS", rotate(q), k[..., serves, :])
        scores = xp.where(np.tri(T, dtype=bool), scores / c.head_dim**0.5, -1e30)
        weights = xp.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        y = xp.einsum("...hTS,...Shd->...Thd", weights, v[..., serves, :])
        x = x + xp.tensordot(y, w["o"], 2)
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + xp.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x, params["final_norm"])


def oracle_logits(c, params, tokens, xp=np, **held):
    """The same with the head: logits [..., T, V]; by NumPy in float64."""
    if xp is np:
        params = jax.tree.map(np.float64, params)
    head = params["embed"].T if c.tie_embeddings else params["lm_head"]
    return oracle_hidden(c, params, tokens, xp, **held) @ head


# The packed sequences, each in a row of its own, and behind them the two rows as they are.
PACKED = [(row, SEGMENTS[row] == segment) for row in (0, 1) for segment in (1, 2)]
APART = np.zeros((6, SEGMENTS.shape[1]), int)
for _i, (_row, _cells) in enumerate(PACKED):
    APART[_i, : _cells.sum()] = TOKENS[_row, _cells]
APART[4:] = TOKENS


@functools.cache
def logits_of(shape):
    """(float64 logits of `APART`, the bound of float32)."""
    return reference(functools.partial(oracle_logits, shape, xp=jnp), params(shape), APART)


@pytest.mark.parametrize("shape", [*FAMILIES.values(), TINY._replace(tie_embeddings=True)])
def test_packed_rows_are_the_oracle_on_each_sequence(shape):
    model, (want, far) = qwen2.bind(shape, params(shape)), logits_of(shape)
    logits = np.asarray(hidden(shape, params(shape)) @ model.head())
    for (row, cells), alone in zip(PACKED, want[:4], strict=True):
        assert_near(logits[row, cells], (alone[: cells.sum()], far))
    whole = call(params(shape), TOKENS, shape)
    assert whole.dtype == jnp.float32
    assert_near(whole, (want[4:], far))


def test_yarn_frequencies_of_a_published_model():
    """Qwen3-8B, factor 4 of 32,768 tokens: frequencies on either side of both ends of the ramp, as
    transformers 5.12.1 computes them in float32."""
    yarn = rope.Yarn(4.0, 32768, 1.0 + 0.1 * np.log(4.0))
    rate = 1e6 ** (-np.arange(64) / 64) * rope.yarn_scale(128, 1e6, yarn)
    published = [0.006978306, 0.0053753215, 4.4456985e-05, 3.5825316e-05]
    np.testing.assert_allclose(rate[[23, 24, 40, 41]], published, rtol=16 * EPS)  # theirs: a power


WAYS = {
    "plain": {},
    "scanned": dict(scan_layers=True),
    "chunked": dict(attention_chunk=4),
    "dots": dict(remat="dots"),
    "full": dict(remat="full"),
    "scanned, both": dict(scan_layers=True, remat="dots_attention"),
    "splash, both": dict(scan_layers=True, remat="dots_attention", attention="splash"),
    "scanned, full, chunked": dict(scan_layers=True, remat="full", attention_chunk=4),
}


def sines(hidden):
    """(a loss that leaves padding out, as every loss does, what it is of)."""

    def loss(p):
        x = hidden(p)
        return jnp.sin(x).sum(), x

    return jax.grad(loss, has_aux=True)


@functools.cache
def packed_gradient():
    """Reference of what each way of computing has to give: packed cells as [27, D], gradient."""
    row, cell = np.nonzero(np.arange(13) < [[cells.sum()] for _, cells in PACKED])
    alone = lambda p: oracle_hidden(TINY, p, APART[:4], jnp)[row, cell]
    return reference(sines(alone), params())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_computing_gives_the_oracles_gradient(way):
    real = np.nonzero(SEGMENTS)
    got = sines(lambda p: hidden(TINY._replace(**WAYS[way]), p)[real])(params())
    assert_near(got, packed_gradient())
    for path, g in jax.tree.leaves_with_path(got[0]):  # hidden states do not reach the head
        assert np.abs(g).max() > 1e-3 or "lm_head" in jax.tree_util.keystr(path), path


def test_the_backward_pass_computes_again_what_remat_says():
    """By the FLOPs of products and of splash's kernels in both passes."""
    shape = TINY._replace(scan_layers=True, attention="splash")
    loss = lambda p, remat: hidden.__wrapped__(shape._replace(remat=remat), p).sum()
    traced = lambda remat: jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params(), remat)
    work = lambda remat: topology.matmul_flops(traced(remat).jaxpr)
    once = work("none")
    attention, products = work("dots") - once, work("attention") - once
    assert attention > 0 and products > 0 and work("full") == once + attention + products
    assert work("dots_attention") == once


@pytest.mark.parametrize("shape", [TINY, QWEN3], ids=["bias", "norm"])
def test_even_keys_are_the_same_model(shape):
    """Bit for bit, also where a bias or a scale is far out; and then no component of a key is."""
    name, own = ("k_norm", {"q_norm"}) if shape.qk_norm else ("k_bias", {"q", "k", "q_bias"})
    p = params(shape)
    far = p["blocks"][name] * np.float32(20)
    p = p | {"blocks": p["blocks"] | {name: far.at[0, ..., 1].set(600)}}
    even = jax.jit(int8_keys.even_keys)(p)
    np.testing.assert_array_equal(call(p, TOKENS, shape), call(even, TOKENS, shape))
    changed = {k for k, w in even["blocks"].items() if not np.array_equal(w, p["blocks"][k])}
    assert changed | {"q_bias"} & own == {name} | own
    size = [np.hypot(*np.split(b["blocks"][name], 2, -1)).max() for b in (p, even)]
    assert size[0] >= 600 and size[1] < (2 if shape.qk_norm else 2**0.5)


@pytest.mark.parametrize("sequence", [slow(""), slow("tensor")], ids=["heads", "joined heads"])
def test_a_mesh_computes_the_same(sequence, capfd):
    """Qwen3 with heads split, and with tokens split between the products too. The partitioner
    gathers no whole embedding or activation."""
    shape, sizes = YARN._replace(scan_layers=True), (1, 2, 2)
    mesh, rules = mesh_of(sizes), RULES | {"sequence": sequence}
    layout = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
    tokens = TOKENS[:, :12]

    def logits(p):
        with parallel.mesh_scope(mesh, rules):
            return qwen2.bind(shape, p)(tokens)

    want = reference(sines(lambda p: oracle_logits(shape, p, tokens, jnp)), params(shape))
    assert_near(jax.jit(sines(logits))(jax.device_put(params(shape), layout)), want)
    assert "Involuntary" not in capfd.readouterr().err


def on_gpu(monkeypatch):
    """What is traced from here on is traced as for a GPU."""
    monkeypatch.setattr(parallel, "platform", lambda: "gpu")


def test_gradients_of_like_tokens_add_up_in_one_order_on_a_gpu(monkeypatch):
    """To the same sums; a row nobody looked up has none."""
    rng = np.random.default_rng(0)
    table, grad = rng.normal(size=(9, 4)), rng.normal(size=(3, 50, 4))
    ids = jnp.asarray(rng.integers(0, 8, (3, 50)))
    gradient = jax.grad(lambda t: (ops.lookup(t, ids) * grad).sum())
    want = gradient(jnp.float32(table))
    on_gpu(monkeypatch)
    terms = np.bincount(ids.ravel()).max()  # each rounds a sum of at most so many times the largest
    most = 2 * terms * EPS * terms * np.abs(grad).max()
    np.testing.assert_allclose(gradient(jnp.float32(table)), want, rtol=0, atol=most)
    assert not np.any(want[8]) and np.abs(want).max() > 5
    text = jax.jit(gradient).trace(jnp.float32(table)).lower().as_text()
    assert "stablehlo.scatter" in text and "unique_indices = true" in text


def test_the_heads_gradient_multiplies_in_the_compute_dtype_on_a_gpu(monkeypatch):
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 5, 8), (8, 30)))
    gradient = jax.grad(lambda x, h: jnp.sin(ops.logits(x, h)).sum(), (0, 1))
    want, products = gradient(x, head), []
    on_gpu(monkeypatch)
    assert ops.logits(x, head).dtype == jnp.float32
    for got, right in zip(gradient(x, head), want, strict=True):
        assert got.dtype == right.dtype == jnp.bfloat16
        right = np.float32(right)  # of up to 30 terms, each of three roundings to bfloat16
        np.testing.assert_allclose(np.float32(got), right, rtol=0, atol=3 * 2**-9 * 30)
    for eqn in jax.make_jaxpr(gradient)(x, head).eqns:
        products += [eqn] if eqn.primitive.name == "dot_general" else []
    assert {v.aval.dtype for eqn in products for v in eqn.invars} == {jnp.dtype("bfloat16")}


def token_stats(logits, ids, xp=jnp):
    """Log-probs of `ids` and entropies."""
    logp = (jax.nn if xp is jnp else scipy.special).log_softmax(logits, axis=-1)
    return (logp * np.eye(logits.shape[-1])[ids]).sum(-1), -(xp.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("vocab", [96, 4200])
def test_a_gpu_finds_the_maxima_and_sums_of_the_heads_logits_once(vocab, monkeypatch):
    """By a kernel, interpreted here, of a vocabulary of one block and of two. Elsewhere XLA finds
    them, in two passes, and the backward pass again. The same gradients."""
    rng = np.random.default_rng(0)
    x, table = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((2, 24, 16), (16, vocab)))
    targets = rng.integers(0, vocab, (2, 24))
    loss = lambda logp, entropy: (jnp.exp(logp) - 0.1 * entropy).sum()
    gradient = lambda stats: jax.value_and_grad(lambda *args: loss(*stats(*args)), (0, 1))
    want = reference(gradient(lambda x, t: token_stats(x @ t / 0.9, targets)), x, table)

    def passes():
        program = gradient(lambda x, t: head.head_stats(x, t, jnp.asarray(targets), 0.9, 8))
        lowered = jax.jit(program).trace(x, table).lower()
        assert_near(lowered.compile()(x, table), want)
        return len(re.findall(rf"stablehlo.reduce\(.*tensor<2x8x{vocab}xf32>", lowered.as_text()))

    elsewhere, _ = passes(), on_gpu(monkeypatch)
    monkeypatch.setattr(softmax_triton, "how", lambda: dict(interpret=True))
    assert passes() == 0 < elsewhere


@pytest.mark.parametrize("case", cases("published_models"), ids=lambda case: case["model"])
def test_published_models(case):
    shape = plan.published(case["model"])
    assert qwen2.param_count(shape) == case["parameters"]
    assert shape.qk_norm == case["qk_norm"] != shape.qkv_bias
    assert shape.rope_theta == case["rope_theta"]


def test_other_models_are_not_taken_for_a_published_one():
    others = "Qwen3-4B-Instruct-2507", "Qwen3-30B-A3B", "Qwen2.5-Coder-7B"
    assert not any(map(plan.published, ("7B", *(f"Qwen/{name}" for name in others))))


def test_init_does_not_depend_on_the_mesh():
    tiny, made = TINY._replace(num_layers=1), []
    for mesh in map(mesh_of, ((1, 1, 1), (1, 4, 2))):
        layout = parallel.shardings(qwen2.metadata(tiny, "axes"), mesh, RULES)
        with parallel.mesh_scope(mesh, RULES):
            init = jax.jit(lambda key: qwen2.init(tiny, key), out_shardings=layout)
            lowered = init.lower(jax.random.key(3))
        made.append(lowered.compile()(jax.random.key(3)))
        # Flat where one device draws all of a weight; else in its shape, which devices can split.
        L, H, d, D = made[-1]["blocks"]["o"].shape
        assert (f"<{L}x{H}x{d}x{D}xui32>" in lowered.as_text()) == (len(mesh.devices.flat) > 1)
    assert len(made[1]["embed"].sharding.device_set) == 8
    assert not made[1]["embed"].is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(made))


def test_init_has_the_declared_scales():
    shape = TINY._replace(vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2)
    p = jax.jit(qwen2.init, static_argnums=0)(shape, jax.random.key(0))
    assert np.std(p["embed"]) == pytest.approx(shape.init_std, rel=0.02)
    for name, fan_in in (("q", 256), ("gate", 256), ("down", 512), ("o", 16)):
        assert np.std(p["blocks"][name]) == pytest.approx(fan_in**-0.5, rel=0.05), name
    assert np.all(p["blocks"]["q_bias"] == 0) and np.all(p["blocks"]["attn_norm"] == 1)
    assert not np.allclose(p["blocks"]["q"][0], p["blocks"]["q"][1])  # layers differ


@pytest.mark.parametrize("tied", [True, False])
def test_sampler_and_trainer_take_a_float32_head(tied):
    """Its weights are the master's, its products are not rounded, and nothing else changes type."""
    c = config.base()
    c.model.dtype, c.model.float32_head, c.model.tie_embeddings = "bfloat16", True, tied
    machine = build.assemble(c, mesh_of((1, 1, 1)), qwen2.shape_from_config(c), (0,))
    calls = build.calls(c, machine)
    cast = calls["decode weights"]
    weights = jax.tree.leaves_with_path(jax.eval_shape(cast.program, *cast.arguments))
    wide = [path[0].key for path, w in weights if w.dtype == jnp.float32]
    assert wide == ["embed" if tied else "lm_head"]
    V, D = c.model.vocab_size, c.model.hidden_size
    for name in ("decode_full", "old log-probs", "update"):
        text = calls[name].program.lower(*calls[name].arguments).as_text()
        product = rf"dot_general.*HIGHEST.*\(tensor<[\dx]*{D}xf32>, tensor<{D}x{V}xf32>\)"
        assert re.search(product, text), name
