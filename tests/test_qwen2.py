"""The network against a float64 NumPy one, and its ways of computing against each other."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dapo_jax import build, config, parallel, plan
from dapo_jax.model import paged, qwen2

TINY = qwen2.Shape(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope_theta=1e4,
    rms_eps=1e-6,
    tie_embeddings=False,
    init_std=0.5,
    scan_layers=False,
    remat="none",
)
QWEN3 = TINY._replace(qkv_bias=False, qk_norm=True)
# Of the two frequencies of a head of 4 the second turns less than once in 64 tokens.
YARN = QWEN3._replace(yarn=qwen2.Yarn(4.0, 64, 1.25))
FAMILIES = {"qwen2": TINY, "qwen3": QWEN3, "yarn": YARN}
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0] * 2, [1] * 9 + [2] * 4])
POSITIONS = np.array([[*range(5), *range(6), 0, 0], [*range(9), *range(4)]])
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, SEGMENTS.shape)


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


def yarn_angle_rates(c):
    """The paper's formula, arXiv 2309.00071, section 3.2: ramp over turns rounded to dimensions."""
    rate = c.rope_theta ** (-np.arange(c.head_dim // 2) / (c.head_dim // 2))
    if not c.yarn:
        return rate
    dimension = lambda turns: (
        c.head_dim / 2 * np.log(c.yarn.original / (2 * np.pi * turns)) / np.log(c.rope_theta)
    )
    low = max(np.floor(dimension(c.yarn.beta_fast)), 0)
    high = min(np.ceil(dimension(c.yarn.beta_slow)), c.head_dim - 1)
    fast = 1 - np.clip((np.arange(c.head_dim // 2) - low) / (high - low), 0, 1)
    return rate * fast + rate / c.yarn.factor * (1 - fast)


def oracle_logits(c, params, tokens):
    """One sequence, float64, one head at a time: float64 [T, V]."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    T, half = len(tokens), c.head_dim // 2
    angle = np.arange(T)[:, None] * yarn_angle_rates(c)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_eps) * scale

    def rotate(x):  # pairs (i, i + d/2) as complex numbers
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1) * (c.yarn.attention_factor if c.yarn else 1)

    x = p["embed"][tokens]
    for i in range(c.num_layers):
        w = {name: stacked[i] for name, stacked in p["blocks"].items()}
        h = norm(x, w["attn_norm"])
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            q, k, v = (h @ w[n][:, i] for n, i in (("q", head), ("k", kv), ("v", kv)))
            if c.qkv_bias:
                q, k, v = q + w["q_bias"][head], k + w["k_bias"][kv], v + w["v_bias"][kv]
            if c.qk_norm:
                q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
            q, k = rotate(q), rotate(k)
            scores = np.where(np.tri(T, dtype=bool), q @ k.T / np.sqrt(c.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            x = x + weights / weights.sum(-1, keepdims=True) @ v @ w["o"][head]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    head = p["embed"].T if c.tie_embeddings else p["lm_head"]
    return norm(x, p["final_norm"]) @ head


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_packed_rows_are_the_oracle_on_each_sequence(tied, family):
    shape = FAMILIES[family]._replace(tie_embeddings=tied)
    model = qwen2.bind(shape, params(shape))
    logits = np.asarray(hidden(shape, params(shape)) @ model.head())
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        cells = SEGMENTS[row] == segment
        want = oracle_logits(shape, params(shape), TOKENS[row, cells])
        assert want.std() > 0.5
        np.testing.assert_allclose(logits[row, cells], want, atol=3e-5)


def test_call_is_the_oracle():
    logits = call(params(), TOKENS)
    assert logits.dtype == jnp.float32
    want = np.stack([oracle_logits(TINY, params(), row) for row in TOKENS])
    np.testing.assert_allclose(logits, want, atol=3e-5)


PUBLISHED_YARN = {
    0: 1.0,
    23: 0.006978306,
    24: 0.0053753215,
    32: 0.00060294115,
    39: 6.4903943e-05,
    40: 4.4456985e-05,
    41: 3.5825316e-05,
    63: 3.1023444e-07,
}


def test_yarn_frequencies_of_a_published_model():
    """Qwen3-8B, factor 4 of 32,768 tokens: the first and the last frequency of each stretch, as
    transformers 5.12.1 computes them in float32."""
    yarn = qwen2.Yarn(4.0, 32768, 1.0 + 0.1 * np.log(4.0))
    shape = plan.qwen3("8B")._replace(yarn=yarn)
    scale = qwen2.yarn_scale(128, 1e6, yarn)
    rate = 1e6 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(rate * scale, yarn_angle_rates(shape), rtol=1e-6)
    for i, want in PUBLISHED_YARN.items():
        np.testing.assert_allclose(rate[i] * scale[i], want, rtol=1e-6)
    cos, sin = qwen2.rope_angles(jnp.full((1, 1), 3), 128, 1e6, yarn)
    np.testing.assert_allclose(np.hypot(cos, sin), yarn.attention_factor, rtol=1e-6)


WAYS = {
    "scanned": dict(scan_layers=True),
    "chunked": dict(attention_chunk=4),
    "scanned, chunked": dict(scan_layers=True, attention_chunk=5),
    "dots": dict(remat="dots"),
    "full": dict(remat="full"),
    "scanned, dots": dict(scan_layers=True, remat="dots"),
    "scanned, full, chunked": dict(scan_layers=True, remat="full", attention_chunk=4),
}


@functools.cache
def value_and_gradient(shape):
    """Of a loss that leaves padding out, as every loss does."""
    real = (SEGMENTS > 0)[..., None]

    def loss(p):
        x = hidden(shape, p)
        return jnp.sum(jnp.where(real, jnp.sin(x), 0.0)), x

    gradient, x = jax.jit(jax.grad(loss, has_aux=True))(params())
    return np.where(real, x, 0), gradient


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_computing_gives_the_same(way):
    want, want_gradient = value_and_gradient(TINY)
    got, gradient = value_and_gradient(TINY._replace(**WAYS[way]))
    np.testing.assert_allclose(got, want, atol=1e-5)
    for path, g in jax.tree.leaves_with_path(want_gradient):
        if "lm_head" in jax.tree_util.keystr(path):  # hidden states do not reach it
            continue
        assert np.abs(g).max() > 1e-3, path
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), gradient, want_gradient)


def test_even_keys_are_the_same_model():
    """Bit for bit, also where a bias is far out; and then no component of a key is."""
    p = params()
    rng = np.random.default_rng(0)
    blocks = p["blocks"] | {"k_bias": 20 * rng.normal(size=p["blocks"]["k_bias"].shape)}
    blocks["k_bias"][0, :, 1] = 600
    p = p | {"blocks": {name: jnp.asarray(x, "float32") for name, x in blocks.items()}}
    even = jax.jit(qwen2.even_keys)(p)
    np.testing.assert_array_equal(call(p, TOKENS), call(even, TOKENS))
    h = TINY.head_dim // 2
    pairs = [
        np.hypot(b[..., :h], b[..., h:]) for b in (p["blocks"]["k_bias"], even["blocks"]["k_bias"])
    ]
    assert pairs[0].max() > 600 and pairs[1].max() <= 2**0.5
    assert {"q", "k", "q_bias", "k_bias"} == {
        name for name in blocks if not np.array_equal(even["blocks"][name], p["blocks"][name])
    } | {"q_bias"}


def test_even_keys_where_a_norm_follows():
    p = params(QWEN3)
    far = p["blocks"]["k_norm"].at[0, 1].set(600)
    p = p | {"blocks": p["blocks"] | {"k_norm": far}}
    even = jax.jit(qwen2.even_keys)(p)
    np.testing.assert_array_equal(call(p, TOKENS, QWEN3), call(even, TOKENS, QWEN3))
    changed = {k for k, w in even["blocks"].items() if not np.array_equal(w, p["blocks"][k])}
    assert changed == {"q_norm", "k_norm"} and np.abs(even["blocks"]["k_norm"]).max() < 2


@pytest.mark.parametrize("sequence", ["", "tensor"], ids=["heads", "joined heads"])
def test_a_mesh_computes_the_same(sequence):
    """Qwen3 with heads split, and with tokens split between the products too."""
    shape, sizes = YARN._replace(scan_layers=True), (1, 2, 2)
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), parallel.AXES)
    rules = config.base().sharding.train.to_dict() | {"sequence": sequence}
    layout = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
    tokens = TOKENS[:, :12]

    def loss(p):
        with parallel.mesh_scope(mesh, rules):
            x = qwen2.bind(shape, p)(tokens)
        return jnp.sin(x).sum(), x

    whole = jax.grad(lambda p: jnp.sin(call(p, tokens, shape)).sum())(params(shape))
    grad, x = jax.jit(jax.grad(loss, has_aux=True))(jax.device_put(params(shape), layout))
    np.testing.assert_allclose(x, call(params(shape), tokens, shape), atol=1e-5)
    # No further apart than the gradients of weights that are rounded once more: that is what
    # float32 leaves open on any CPU, and more of it where a sum cancels.
    gap = lambda a, b: max(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.abs(x - y).max(), a, b)))

    def rounded(seed):
        sign = lambda w: np.random.default_rng(seed).choice([-1, 1], w.shape)
        return jax.tree.map(lambda w: w * (1 + 2**-24 * sign(w)), params(shape))

    plain = jax.grad(lambda p: jnp.sin(call(p, tokens, shape)).sum())
    bound = max(gap(whole, plain(rounded(seed))) for seed in range(4))
    assert bound < 1e-4 * max(float(jnp.abs(g).max()) for g in jax.tree.leaves(whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound), grad, whole)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("page_tokens", "prefill_tokens", "family"),
    [(16, 8, TINY), (8, 8, TINY), (8, 16, TINY), (24, 8, TINY), (8, 8, YARN)],
    ids=["16-8", "8-8", "8-16", "24-8", "8-8 qwen3 with yarn"],
)
def test_prefill_and_decode_give_the_logits_of_the_whole(page_tokens, prefill_tokens, scan, family):
    """Prompts of different lengths, right-padded, in one chunk or several; every slot at its own
    position, over pages that are full of others' leavings."""
    shape, weights = family._replace(scan_layers=scan), params(family)
    lengths = np.array([3, 11])  # tokens of the two prompts
    want = np.asarray(call(weights, TOKENS, family))
    prompts = np.zeros((2, 16), np.int32)
    for row, tokens, n in zip(prompts, TOKENS, lengths, strict=True):
        row[: n - 1] = tokens[: n - 1]
    sizes = dict(slots=2, shards=1, row_tokens=24, page_tokens=page_tokens, fraction=1.0)
    g = paged.geometry(shape, "cpu", **sizes)
    assert g.reader == ("rows" if page_tokens == 24 else "pages")
    table = np.arange(g.pages, dtype=np.int32).reshape(2, -1)[:, : g.row_pages]
    pool = jax.tree.map(lambda x: jnp.full(x.shape, 9.0), paged.new_pool(g, "float32"))

    sampled = weights if shape.scan_layers else qwen2.unstacked(weights)

    @jax.jit
    def prefill(p, pool, chunk):
        model, layers = qwen2.bind_layers(shape, p)
        positions = chunk.start + np.broadcast_to(np.arange(prefill_tokens), (2, prefill_tokens))
        attend = paged.prefill_attend(g, chunk, 4, 11)
        return model.cached(chunk.tokens_BxT, positions, pool, attend, layers)[1]

    @jax.jit
    def decode(p, tokens, positions, pool):
        model, layers = qwen2.bind_layers(shape, p)
        attend = paged.decode_attend(
            g, paged.CacheRows(jnp.asarray(table), positions, positions >= 0)
        )
        x, pool = model.cached(tokens[:, None], positions[:, None], pool, attend, layers)
        return x[:, 0] @ model.head(), pool

    for start in range(0, 11, prefill_tokens):
        tokens = prompts[:, start : start + prefill_tokens]
        chunk = paged.Prompts(tokens, table, lengths - 1, np.int32(start))
        pool = prefill(sampled, pool, jax.tree.map(jnp.asarray, chunk))
    for step in range(2):
        positions = lengths - 1 + step
        logits, pool = decode(sampled, TOKENS[[0, 1], positions], positions, pool)
        np.testing.assert_allclose(logits, want[[0, 1], positions], atol=3e-5)


def on_gpu(monkeypatch):
    """What is traced from here on is traced as for a GPU."""
    monkeypatch.setattr(parallel, "platform", lambda: "gpu")


def test_gradients_of_like_tokens_add_up_in_one_order_on_a_gpu(monkeypatch):
    """To the same sums; a row nobody looked up has none."""
    rng = np.random.default_rng(0)
    table, grad = rng.normal(size=(9, 4)), rng.normal(size=(3, 50, 4))
    ids = jnp.asarray(rng.integers(0, 8, (3, 50)))
    gradient = jax.grad(lambda t: (qwen2.lookup(t, ids) * grad).sum())
    want = gradient(jnp.float32(table))
    on_gpu(monkeypatch)
    np.testing.assert_allclose(gradient(jnp.float32(table)), want, atol=1e-5)
    assert not np.any(want[8]) and np.abs(want).max() > 5
    text = jax.jit(gradient).trace(jnp.float32(table)).lower().as_text()
    assert "stablehlo.scatter" in text and "unique_indices = true" in text


def test_the_heads_gradient_multiplies_in_the_compute_dtype_on_a_gpu(monkeypatch):
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 5, 8), (8, 30)))
    gradient = jax.grad(lambda x, h: jnp.sin(qwen2.logits(x, h)).sum(), (0, 1))
    want, products = gradient(x, head), []
    on_gpu(monkeypatch)
    assert qwen2.logits(x, head).dtype == jnp.float32
    for got, right in zip(gradient(x, head), want, strict=True):
        assert got.dtype == right.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(got), np.float32(right), rtol=0.02, atol=0.1)
    for eqn in jax.make_jaxpr(gradient)(x, head).eqns:
        products += [eqn] if eqn.primitive.name == "dot_general" else []
    assert {v.aval.dtype for eqn in products for v in eqn.invars} == {jnp.dtype("bfloat16")}


def test_every_weight_declares_axes_and_name():
    known = set(config.base().sharding.train)
    for tied, family in itertools.product((False, True), FAMILIES.values()):
        shape = family._replace(tie_embeddings=tied)
        weights = jax.tree.leaves_with_path(qwen2.abstract(shape))
        names = []
        for path, weight in weights:
            axes, hf, in_axes = (
                functools.reduce(lambda t, k: t[k.key], path, qwen2.metadata(shape, name))
                for name in ("axes", "hf", "in_axes")
            )
            assert weight.dtype == jnp.float32
            assert len(axes) == weight.ndim and set(axes) <= known, path
            assert ("{}" in hf) == ("layers" in axes) == (axes[0] == "layers"), path
            assert re.fullmatch(r"(model\.|lm_head)[a-z_.{}]*(weight|bias)", hf), hf
            # A linear layer keeps at least one dimension for its outputs.
            assert 0 <= in_axes < weight.ndim - ("layers" in axes) or in_axes == 0, path
            names.append(hf)
        assert len(set(names)) == len(names) == len(weights)
        assert ("lm_head.weight" in names) == (not tied)
        block = 9 + 3 * shape.qkv_bias + 2 * shape.qk_norm
        assert len(names) == block + 2 + (not tied)  # embedding and norm, the head


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-Math-7B-Instruct", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 14_770_033_664),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32_763_876_352),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B-Base", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_published_models_have_the_published_parameter_counts(name, count):
    shape = plan.published(name)
    assert qwen2.param_count(shape) == count
    assert shape.qk_norm == ("Qwen3" in name) != shape.qkv_bias
    small = "Math" in name or ("Distill" in name and name.endswith(("-1.5B", "-7B")))
    assert shape.rope_theta == (1e4 if small else 1e6)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-Coder-7B", "7B"]
)
def test_other_models_are_not_taken_for_a_published_one(name):
    assert plan.published(name) is None


def test_init_does_not_depend_on_the_mesh():
    rules, tiny, made = config.base().sharding.train, TINY._replace(num_layers=1), []
    for shape in ((1, 1, 1), (1, 4, 2)):
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = Mesh(devices, parallel.AXES)
        layout = parallel.shardings(qwen2.metadata(tiny, "axes"), mesh, rules)
        with parallel.mesh_scope(mesh, rules):
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


def test_bfloat16_copy_computes_near_the_master_weights():
    master = hidden(TINY, params())
    copy = hidden(TINY, qwen2.cast(params(), jnp.bfloat16))
    assert copy.dtype == jnp.bfloat16
    real = SEGMENTS > 0
    assert 1e-4 < np.abs(np.asarray(copy, np.float32) - master)[real].mean() < 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_head_under_a_bfloat16_model(tied):
    """Its weights are the master's, its products are not rounded, and nothing else changes type."""
    shape = TINY._replace(tie_embeddings=tied, float32_head=True)
    master = params(shape)
    copy = qwen2.cast(master, jnp.bfloat16, shape)
    name = "embed" if tied else "lm_head"
    wide = {k for k, w in copy.items() if k != "blocks" and w.dtype == jnp.float32}
    assert wide == {name} and {w.dtype for w in copy["blocks"].values()} == {jnp.bfloat16.dtype}
    x = hidden(shape, copy)
    assert x.dtype == jnp.bfloat16
    weights = np.float64(master[name].T if tied else master[name])
    exact = np.float64(x) @ weights
    error = lambda head: np.abs(np.asarray(qwen2.logits(x, head)) - exact).max()
    head = qwen2.bind(shape, copy).head()
    assert error(head) < 1e-5 < 1e-3 < error(head.astype(jnp.bfloat16))


def test_sampler_and_trainer_take_a_float32_head():
    c = config.base()
    c.model.dtype, c.model.float32_head = "bfloat16", True
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), parallel.AXES)
    calls = build.calls(c, build.assemble(c, mesh, qwen2.shape_from_config(c), (0,)))
    cast = calls["decode weights"]
    assert jax.eval_shape(cast.program, *cast.arguments)["embed"].dtype == jnp.float32
    V, D = c.model.vocab_size, c.model.hidden_size
    for name in ("decode_full", "old log-probs", "update"):
        text = calls[name].program.lower(*calls[name].arguments).as_text()
        product = rf"dot_general.*HIGHEST.*\(tensor<[\dx]*{D}xf32>, tensor<{D}x{V}xf32>\)"
        assert re.search(product, text), name


def test_config_fields_become_the_shape():
    c = config.base()
    c.model.num_layers, c.model.rope_theta, c.model.remat = 7, 5e5, "dots"
    shape = qwen2.shape_from_config(c)
    others = {"yarn": None, "shared_prompts": False, "lora": None, "value_head": False}
    assert shape._asdict() == others | {
        k: getattr(c.model, k) for k in qwen2.Shape._fields if k not in others
    }


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 1)], ids=str)
def test_lookup_on_meshes(sizes, capfd):
    """Rows and their gradient as on one device, nothing gathered whole by the partitioner."""
    rng = np.random.default_rng(0)
    embed = rng.normal(size=(32, 8)).astype(np.float32)
    tokens = rng.integers(32, size=(4, 6)).astype(np.int32)
    weight = rng.normal(size=(4, 6, 8)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), parallel.AXES)
    rules = config.base().sharding.train.to_dict()

    def loss(embed):
        with parallel.mesh_scope(mesh, rules):
            x = qwen2.lookup(embed, tokens)
        return (x * weight).sum(), x

    layout = jax.sharding.NamedSharding(mesh, parallel.spec(("vocab", "embed"), rules))
    grad, x = jax.jit(jax.grad(loss, has_aux=True))(jax.device_put(embed, layout))
    np.testing.assert_array_equal(x, embed[tokens])
    want = np.zeros_like(embed)
    np.add.at(want, tokens, weight)
    np.testing.assert_allclose(grad, want, atol=1e-6)
    assert "Involuntary" not in capfd.readouterr().err
