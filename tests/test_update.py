"""The gradient update against a dense float64 oracle, and every way of computing it against each
other: micro-batches, packing, order, padding, chunks, rematerialisation, meshes."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from levels import compiled_soon, slow
from rounding import assert_near, reference
from test_qwen2 import oracle_logits, token_stats

from dapo_jax import config, parallel
from dapo_jax.dapo import objective, packing, update
from dapo_jax.model import kernels, learner, one_cpu, qwen2
from dapo_jax.model.head import head_stats
from dapo_jax.pods import topology
from dapo_jax.variants import objectives, positive_lm

SHAPE = qwen2.Shape(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=4, rope_theta=100.0, rms_eps=1e-6, tie_embeddings=True, init_std=0.3,
    scan_layers=True, remat="none", attention_chunk=64, head_chunk=64,
)  # fmt: skip
TEMPERATURE = 0.7
LR = 0.5
RULES = config.base().sharding.train.to_dict()
# Every term on, far from its default. Bounds lie away from the ratios below, so that float32 and
# float64 agree on which tokens are clipped.
ALL_ON = objective.Coefficients(0.2, 0.28, 10.0, 20.0, 2.0, 0.1, 0.05, 1.5)
WEIGHTED = objective.Choice(importance=objective.importance_weight, aged=True)
PLAIN = objective.Coefficients(0.2, 0.28, np.inf, 20.0, 0.0, 0.0, 0.0, np.inf)
SHORT = dict(micro_rows=4, row_tokens=16, last_row_tokens=12)  # two micro-batches
GAPS = [-0.6, -0.1, 0.0, 0.1, 0.4, 2.6]  # logp - old: clipped low, free, ..., dual-clipped


class Batch(NamedTuple):
    items: list[packing.Item]
    old: list[np.ndarray]  # float32, per response token
    ref: list[np.ndarray]


# --- a dense float64 oracle: one sequence a row, no packing, no chunks, no code of the project ----


def dense(items, values):
    """Per-response-token lists -> [Q, T] with zeros elsewhere; cell t speaks of token t + 1."""
    T = max(len(i.prompt) + len(i.response) for i in items) - 1
    out = np.zeros((len(items), T))
    for row, item, value in zip(out, items, values, strict=True):
        at = len(item.prompt) - 1
        row[at : at + len(item.response)] = value
    return out


def oracle_tokens(items):
    T = max(len(i.prompt) + len(i.response) for i in items)
    out = np.zeros((len(items), T), int)
    for row, item in zip(out, items, strict=True):
        row[: len(item.prompt) + len(item.response)] = [*item.prompt, *item.response]
    return out


def oracle_stats(params, items, temperature, xp=jnp):
    """log-prob of each next token and entropy, [Q, T - 1]."""
    tokens = oracle_tokens(items)
    logits = oracle_logits(SHAPE, params, tokens[:, :-1], xp) / temperature
    return token_stats(logits, tokens[:, 1:], xp)


def oracle_loss(params, batch, c, objective="ppo", importance=None):
    """The objective, case by case: 'ppo' or 'gspo'; with weights by 'token' or 'sequence_mask'."""
    items = batch.items
    ones = [np.where(i.sampled_logps != np.inf, 1.0, 0.0) for i in items]  # inf: a reply
    logp, entropy = oracle_stats(params, items, TEMPERATURE)
    trained = dense(items, ones)
    old, ref = dense(items, batch.old), dense(items, batch.ref)
    sampled = dense(items, [np.where(i.sampled_logps < np.inf, i.sampled_logps, 0) for i in items])
    A = dense(items, [o * i.advantage for o, i in zip(ones, items, strict=True)])
    weight = dense(items, [o * i.weight for o, i in zip(ones, items, strict=True)])
    moved = jnp.where(trained > 0, logp - old, 0.0)
    if objective == "gspo":  # a response's tokens have one ratio
        moved = trained * moved.sum(1, keepdims=True) / trained.sum(1, keepdims=True)
    ratio = jnp.exp(moved)
    gain = jnp.where(
        A > 0,
        A * jnp.minimum(ratio, 1 + c.clip_high),
        A * jnp.minimum(jnp.maximum(ratio, 1 - c.clip_low), c.dual_clip),
    )
    gap = jnp.subtract(old, sampled)
    if importance == "token":
        w = jnp.minimum(jnp.exp(gap), c.importance_cap)
    elif importance:
        w = trained * jnp.exp(gap.sum(1, keepdims=True))
        w = jnp.where((w < c.importance_floor) | (w > c.importance_cap), 0, w)
    weight = weight * w if importance else weight
    r = jnp.where(trained > 0, ref - logp, 0.0)
    bonus = jnp.where(entropy < c.entropy_enough, entropy, c.entropy_enough)
    kl = jnp.exp(r) - 1 - r
    loss = (weight * (-gain + c.kl_coef * kl - c.entropy_coef * bonus)).sum()
    metrics = dict(
        loss=(weight * -gain).sum(),
        tokens=trained.sum(),
        entropy=(trained * entropy).sum(),
        prob=(trained * jnp.exp(logp)).sum(),
        clip_low=(trained * (A < 0) * (ratio < 1 - c.clip_low)).sum(),
        clip_high=(trained * (A > 0) * (ratio > 1 + c.clip_high)).sum(),
        dual_clip=(trained * (A < 0) * (ratio > c.dual_clip)).sum(),
        approx_kl=(trained * (old - logp)).sum(),
        ref_kl=(trained * kl).sum(),
        ratio_max=(trained * ratio).max(),
        sampler_gap=(trained * abs(logp - sampled)).max(),
    )
    if importance:
        metrics["importance"] = (trained * w).sum()
        metrics["importance_capped"] = (trained * (w >= c.importance_cap)).sum()
    if importance == "sequence_mask":
        metrics["importance_zeroed"] = (trained * (w == 0)).sum()
    elif importance:
        metrics["importance_square"] = (trained * w * w).sum()
    return loss, metrics


def truth(loss_fn, params):
    """`reference` of (gradient, metrics)."""
    return reference(jax.grad(loss_fn, has_aux=True), params)


# --- the same batch, through the project ----------------------------------------------------------


def params_of(shape):
    """Random weights with biases and norms off their initial 0 and 1."""
    tree = jax.device_get(qwen2.init(shape, jax.random.key(0)))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda w: w + rng.normal(scale=0.1, size=w.shape).astype(np.float32), tree)


@pytest.fixture(scope="module")
def params():
    return params_of(SHAPE)


@pytest.fixture(scope="module")
def batch(params):
    return make_batch(params, GAPS)


def make_batch(params, gaps):
    """Twelve responses of 1 to 9 tokens to prompts of 1 to 6."""
    rng = np.random.default_rng(2)
    lengths = [rng.integers(low=1, high=(7, 10)) for _ in range(12)]
    weights = objective.token_weights(
        np.array([n for _, n in lengths]), np.repeat(np.arange(4), 3), "group_tokens", 0
    )
    bare = [
        packing.Item(
            rng.integers(32, size=p).tolist(), rng.integers(32, size=n), None,
            float(np.float32(rng.choice([-1, 1]) * rng.uniform(0.3, 2.0))), w,
        )
        for (p, n), w in zip(lengths, weights, strict=True)
    ]  # fmt: skip
    logp, _ = oracle_stats(params, bare, TEMPERATURE, np)
    items, old, ref = [], [], []
    for item, row in zip(bare, logp, strict=True):
        n, at = len(item.response), len(item.prompt) - 1
        old.append((row[at : at + n] - rng.choice(gaps, n)).astype(np.float32))
        ref.append((row[at : at + n] - rng.uniform(-1, 1, n)).astype(np.float32))
        items.append(item._replace(sampled_logps=old[-1] - rng.choice(gaps, n).astype(np.float32)))
    return Batch(items, old, ref)


@pytest.fixture(scope="module")
def expected(params, batch):
    """Oracle gradients and metrics: 'all on' and 'supervised'."""

    def supervised(p):
        logp, _ = oracle_stats(p, batch.items, 1.0)
        weight = dense(batch.items, [np.full(len(i.response), i.weight) for i in batch.items])
        loss = -(weight * logp).sum()
        return loss, dict(loss=loss)

    all_on = truth(lambda p: oracle_loss(p, batch, ALL_ON, importance="token"), params)
    clipped = [all_on[0][1][name] for name in ("clip_low", "clip_high", "dual_clip")]
    assert min(clipped) >= 1 and all_on[0][1]["tokens"] - sum(clipped) >= 1  # every case is there
    return {"all on": all_on, "supervised": truth(supervised, params)}


def mesh_of(data=1, fsdp=1, tensor=1):
    n = data * fsdp * tensor
    if n > len(jax.devices()):
        pytest.skip(f"{n} devices are needed, there are {len(jax.devices())}")
    return Mesh(np.array(jax.devices()[:n]).reshape(data, fsdp, tensor), parallel.AXES)


def make_programs(shape=SHAPE, mesh=None, choice=WEIGHTED, terms=(), **how):
    """The optimizer's state is the gradient, so that `update` hands it out."""
    setup = learner.Setup(mesh or mesh_of(), RULES, optax.trace(decay=0.0), "float32", **how)
    return update.Trainer(shape, setup, choice, terms)


@pytest.fixture(scope="module")
def programs():
    """The plain way: one device, two rows a micro-batch. Shared, so that it compiles once."""
    return make_programs()


def spread(values, places, rows):
    """Per-response-token values -> their cells; NaN elsewhere, which nothing may read."""
    out = np.full(rows.tokens_AxRxT.shape, np.nan, np.float32)
    for value, place in zip(values, places, strict=True):
        out[place] = value
    return out


def unpack(cells, places):
    """And back: the cells of each response."""
    return [place and cells[place] for place in places]


def start(programs, params):
    """Fresh state on the mesh (`update` donates it)."""
    state = parallel.to_device(params, programs.param_shardings)
    return state, programs.init_opt_state(state)


def knobs(c) -> update.Knobs:
    loss = objective.Coefficients(*map(np.float32, c))
    return update.Knobs(np.float32(LR), np.float32(TEMPERATURE), loss)


def packed(programs, batch, **layout) -> tuple[update.Batch, list]:
    """(the batch on the devices, where each of its responses lies)."""
    layout = packing.Layout(**dict(row_tokens=24, micro_rows=2, max_items=12) | layout)
    rows, used, places = packing.pack(batch.items, layout)
    for field in rows[5:]:  # what lies beyond the micro-batches in use is never looked at
        field[used:] = np.nan
        if layout.last_row_tokens:  # of a batch that has short rows
            field[used - 1, :, layout.last_row_tokens :] = np.nan
    cells = (rows, *(spread(values, places, rows) for values in (batch.old, batch.ref)))
    weights_K = zip(*(item.term_weights for item in batch.items), strict=True)
    terms = tuple(packing.spread(w, places, rows.tokens_AxRxT.shape) for w in weights_K)
    cells, terms = parallel.to_device((cells, terms), programs.row_sharding)
    return update.Batch(*cells, np.int32(used), terms), places


def run(programs, params, batch, c, **layout):
    """(gradient, metrics) of one update; c=None is the supervised one."""
    (given, _), state = packed(programs, batch, **layout), start(programs, params)
    if c is None:
        out = programs.supervise(*state, given.rows, given.micro_batches, np.float32(LR))
    else:
        out = programs.update(*state, given, knobs(c))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))  # donated
    new_params, opt_state, metrics = parallel.to_host(out)
    assert not metrics.pop("skipped")
    norm = metrics.pop("grad_norm")
    assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(opt_state))))
    jax.tree.map(
        lambda new, old, g: np.testing.assert_allclose(new, old - LR * g, rtol=1e-6, atol=1e-7),
        new_params, params, opt_state.trace,
    )  # fmt: skip
    return opt_state.trace, metrics


def relative_gap(got, want) -> float:
    """Norm of the difference of two trees over the norm of the second."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    gap, norm = (sum((np.float64(x) ** 2).sum() for x in xs) for xs in
                 ([a - np.float64(b) for a, b in pairs], [b for _, b in pairs]))  # fmt: skip
    return math.sqrt(gap / norm)


# --- against the oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "c"), [("all on", ALL_ON), ("supervised", None)])
def test_gradient_against_dense_float64(programs, params, batch, expected, case, c):
    assert_near(run(programs, params, batch, c), expected[case])


@pytest.mark.parametrize("name", [slow("ppo"), slow("gspo")])
@compiled_soon()
def test_shared_prompts_give_the_same_gradient(params, batch, name):
    """Groups of three share a prompt, which is computed once."""
    items = [i._replace(prompt=batch.items[n // 3 * 3].prompt) for n, i in enumerate(batch.items)]
    choice = objective.DAPO._replace(token_loss=objectives.OBJECTIVES[name].token_loss)
    groups, sharing = batch._replace(items=items), SHAPE._replace(shared_prompts=True)
    want = truth(lambda p: oracle_loss(p, groups, PLAIN, name), params)
    made = make_programs(sharing, choice=choice)
    assert_near(run(made, params, groups, PLAIN, share_prompts=True), want)


@pytest.mark.slow
@compiled_soon()
def test_a_term_with_weights_of_its_own(params):
    """The log-likelihood of right responses, which add up to .1 over all tokens of theirs."""
    batch = make_batch(params, [-0.4, -0.1, 0.1, 0.4])  # sampler_gap: less than 1
    right = [i % 3 > 0 for i in range(12)]
    share = 0.1 / sum(len(i.response) * r for i, r in zip(batch.items, right, strict=True))
    items = [i._replace(term_weights=(share * r,)) for i, r in zip(batch.items, right, strict=True)]

    def both(p):
        loss, metrics = oracle_loss(p, batch, PLAIN)
        weight = dense(items, [np.full(len(i.response), i.term_weights[0]) for i in items])
        nll = -(weight * oracle_stats(p, items, TEMPERATURE)[0]).sum()
        return loss + nll, metrics | dict(positive_loss=nll)

    programs = make_programs(choice=objective.DAPO, terms=(positive_lm.NLL,))
    want = truth(both, params)
    for layout in ({}, dict(row_tokens=40, micro_rows=4)):
        assert_near(run(programs, params, Batch(items, *batch[1:]), PLAIN, **layout), want)


@pytest.fixture
def large(monkeypatch):
    """What is of large models and vocabularies on one CPU, of any."""
    monkeypatch.setattr(one_cpu, "LARGE_MODEL", 0)
    monkeypatch.setattr(one_cpu, "LARGE_VOCABULARY", 0)
    monkeypatch.setattr(one_cpu, "_COLUMNS", 7)  # four parts, and a rest


def test_kernels_of_one_cpu_are_for_what_is_large(large, monkeypatch):
    def chosen(dtype="float32", **sizes):
        made = kernels.choose(mesh_of(**sizes), SHAPE, dtype)
        return [*made[:3], made.rows_apart]

    usual, mine = [*kernels.Kernels()[:3], False], (one_cpu.accumulate, kernels.accumulate)
    of = [[one_cpu.head_stats, accumulate, one_cpu.apply, True] for accumulate in mine]
    assert [chosen(), chosen("bfloat16"), chosen(fsdp=2)] == [*of, usual]
    monkeypatch.undo()
    assert chosen() == usual


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{}, dict(head_chunk=10, remat="dots", scan_layers=False)], ids=str
)
def test_a_large_model_on_one_cpu(large, params, batch, expected, change):
    programs = make_programs(SHAPE._replace(**change), last_row_tokens=SHORT["last_row_tokens"])
    assert_near(run(programs, params, batch, ALL_ON, **SHORT), expected["all on"])


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
def test_head_stats(chunk):
    """Chunks that divide the row, that do not, and one larger than it; logits up to a hundred."""
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(2, 10, 6)), rng.normal(scale=8.0, size=(6, 20))
    x, head = x.astype(np.float32), head.astype(np.float32)
    targets = rng.integers(20, size=(2, 10)).astype(np.int32)
    got = jax.jit(head_stats, static_argnums=4)(x, head, targets, 0.5, chunk)
    want = reference(lambda x, head: token_stats(x @ head / 0.5, targets), x, head)
    assert_near((got.logp_RxT, got.entropy_RxT), want)


def test_logits_of_a_whole_row_are_not_made_again():
    """Three products for a gradient, four where a chunk is less than the row."""
    x, head, targets = jnp.ones((2, 10, 6)), jnp.ones((6, 20)), jnp.zeros((2, 10), jnp.int32)

    def flops(chunk):
        loss = lambda x, head: head_stats(x, head, targets, 0.5, chunk).logp_RxT.sum()
        return topology.matmul_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, head).jaxpr)

    assert [flops(chunk) / (2 * 2 * 10 * 6 * 20) for chunk in (64, 10, 5)] == [3, 3, 4]


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_head_stats_of_one_cpu(large, dtype, rtol):
    """As elsewhere, with their gradients; and nothing but the logits has their size."""
    rng = np.random.default_rng(0)
    N, D, V = 256, 8, 4096
    x, head = (jnp.array(rng.normal(size=s), dtype) for s in ((2, N // 2, D), (D, V)))
    targets = rng.integers(V, size=(2, N // 2)).astype(np.int32)
    of_logp, of_entropy = rng.normal(size=(2, 2, N // 2))

    def loss(stats, x, head):
        logp, entropy = stats(x, head, targets, 0.7)
        return (of_logp * logp + of_entropy * entropy).sum()

    of = lambda stats: jax.value_and_grad(functools.partial(loss, stats), (0, 1))
    elsewhere, program = (
        jax.jit(of(lambda *args, stats=stats: stats(*args, N))).lower(x, head).compile()
        for stats in (head_stats, one_cpu.head_stats)
    )
    got, want = program(x, head), elsewhere(x, head)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.dtype == b.dtype and relative_gap([a], [b]) < rtol
    used, other = (p.memory_analysis().temp_size_in_bytes for p in (program, elsewhere))
    assert used < 1.5 * (4 * N * V) < other


def test_clipping_of_a_large_model_makes_no_second_gradient():
    """What it computes: `test_optimizer_is_adamw`."""
    params = dict(w=jnp.ones((256, 256)))
    step = functools.partial(one_cpu.apply, adamw(clip_norm=0.5), lr=0.1)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, adamw().init(params), params)
    used = program.compile().memory_analysis()
    assert used.temp_size_in_bytes < params["w"].nbytes


@pytest.mark.slow
@compiled_soon()
def test_sums_over_a_response_in_every_layout(params):
    """Against float64; then in longer rows, more of them to a micro-batch, on four devices: which
    sequences share a row changes no response's sum. Every objective: test_objectives.py."""
    near_batch = make_batch(params, GAPS[:-1])  # a ratio of 13 multiplies what rounding does
    c = ALL_ON._replace(importance_cap=1.1, importance_floor=0.7, dual_clip=np.inf)
    want = truth(lambda p: oracle_loss(p, near_batch, c, "gspo", "sequence_mask"), params)
    choice = objective.Choice(objectives.gspo, objectives.sequence_mask)
    assert_near(run(make_programs(choice=choice), params, near_batch, c), want)
    wide = make_programs(mesh=mesh_of(fsdp=2, tensor=2), choice=choice)
    assert_near(run(wide, params, near_batch, c, row_tokens=40, micro_rows=4), want)
    metrics = want[0][1]
    assert 0 < metrics["importance_zeroed"] < metrics["tokens"]


# --- however it is computed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "change", "layout"),
    [
        ({}, {}, dict(order=np.random.default_rng(3).permutation(12))),
        ({}, {}, dict(micro_rows=1, row_tokens=15, max_items=30)),  # few sequences a row
        ({}, {}, dict(micro_rows=4, row_tokens=40)),  # many sequences a row
        ({}, dict(head_chunk=5, attention_chunk=7, remat="full", scan_layers=False), {}),
        (dict(fsdp=2), dict(head_chunk=10), {}),
        slow(dict(tensor=4), dict(head_chunk=10), {}),
        (dict(data=2, fsdp=2, tensor=2), dict(head_chunk=10), dict(micro_rows=4)),
        slow(dict(fsdp=8), dict(head_chunk=10), dict(micro_rows=8)),
        slow(dict(data=2, fsdp=4), dict(head_chunk=10), dict(micro_rows=8, row_tokens=60)),  # empty
    ],
    ids=str,
)
def test_the_layout_does_not_matter(programs, params, batch, expected, sizes, change, layout):
    order = layout.get("order", range(12))
    rest = {name: value for name, value in layout.items() if name != "order"}
    some = Batch(*([part[i] for i in order] for part in batch))
    made = make_programs(SHAPE._replace(**change), mesh_of(**sizes)) if change else programs
    assert_near(run(made, params, some, ALL_ON, **rest), expected["all on"])
    # The weights are really split: a device holds its share of the largest one.
    state, opt_state = start(made, params)
    shards = sizes.get("fsdp", 1) * sizes.get("tensor", 1)
    for gate in (state["blocks"]["gate"], opt_state.trace["blocks"]["gate"]):
        assert gate.addressable_shards[0].data.size * shards == gate.size


@pytest.mark.parametrize("sizes", [{}, slow(dict(fsdp=2, tensor=2))], ids=str)
def test_one_program_cuts_the_last_rows_where_they_are_short(params, batch, expected, sizes):
    made = make_programs(mesh=mesh_of(**sizes), last_row_tokens=SHORT["last_row_tokens"])
    ones = dense(batch.items, [np.ones(len(i.response)) for i in batch.items])
    want = reference(lambda p: oracle_stats(p, batch.items, TEMPERATURE)[0] * ones, params)
    for layout in (SHORT, SHORT | dict(last_row_tokens=0)):
        assert_near(run(made, params, batch, ALL_ON, **layout), expected["all on"])
        given, places = packed(made, batch, **layout)
        logp = made.log_probs(params, given.rows, given.micro_batches, TEMPERATURE)
        assert_near(dense(batch.items, unpack(np.asarray(logp), places)), want)
        assert len(logp) > given.micro_batches and not logp[given.micro_batches :].any()
    assert made.update._cache_size() == made.log_probs._cache_size() == 1


# --- optimizer, learning rate ---------------------------------------------------------------------


def adamw(**changes):
    settings = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    return learner.optimizer(**(settings | changes))


ways = pytest.mark.parametrize("apply", [kernels.apply, one_cpu.apply])


@ways
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_optimizer_is_adamw(clip_norm, apply):
    rng = np.random.default_rng(0)
    draw = lambda: dict(a=rng.normal(size=(3, 4)), b=rng.normal(size=5))
    ours = theirs = jax.tree.map(jnp.float32, draw())
    rates = [0.0, 1e-3, 2e-3, 2e-3]
    tx = adamw(clip_norm=clip_norm)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    reference = optax.chain(
        clip, optax.adamw(lambda n: jnp.array(rates)[n], 0.9, 0.95, 1e-8, weight_decay=0.1)
    )
    state, reference_state = tx.init(ours), reference.init(theirs)
    for lr in rates:
        grads = jax.tree.map(jnp.float32, draw())
        ours, state, norm, skipped = apply(tx, ours, state, grads, lr)
        step, reference_state = reference.update(grads, reference_state, theirs)
        theirs = optax.apply_updates(theirs, step)
        assert not skipped
        assert norm == pytest.approx(math.sqrt(sum((g**2).sum() for g in grads.values())), rel=1e-6)
        for k in ours:
            np.testing.assert_allclose(ours[k], theirs[k], rtol=1e-6, atol=1e-7)


@ways
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_gradient_keeps_the_old_state(bad, apply):
    """Weights, moments and Adam's count; and the next step works as if nothing had been."""
    tx = adamw()
    params, grads = dict(w=jnp.arange(4.0)), dict(w=jnp.array([0.1, -0.2, 0.3, 0.4]))
    params, state, _, _ = apply(tx, params, tx.init(params), grads, 0.1)
    broken = dict(w=grads["w"].at[1].set(bad))
    after, after_state, norm, skipped = apply(tx, params, state, broken, 0.1)
    assert skipped and not np.isfinite(norm)
    jax.tree.map(np.testing.assert_array_equal, (after, after_state), (params, state))
    moved, _, _, skipped = apply(tx, after, after_state, grads, 0.1)
    assert not skipped and (moved["w"] != params["w"]).all()


@ways
def test_parameters_that_would_not_be_finite_are_not_applied(apply):
    """The gradient is finite; what it would make of the parameters is not."""
    params, grads = dict(w=jnp.ones(3)), dict(w=jnp.full(3, 2.0))
    tx = optax.scale(1e30)
    state = tx.init(params)
    after, _, norm, skipped = apply(tx, params, state, grads, 1e30)
    assert skipped and np.isfinite(norm)
    np.testing.assert_array_equal(after["w"], params["w"])


@pytest.mark.parametrize(
    ("preset", "rising"),
    [
        (config.paper, np.arange(1, 20) / 20),  # twenty rollout steps, the first already trains
        (config.verl, np.arange(10) / 10),  # step 0 trains at 0, the eleventh at the full rate
    ],
)
def test_linear_warm_up(preset, rising):
    rate = [learner.learning_rate(preset().optim, step) for step in range(30)]
    np.testing.assert_allclose(rate[: len(rising)], 1e-6 * rising)
    assert rate[len(rising) - 1] < 1e-6 and set(rate[len(rising) :]) == {1e-6}


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("warmup", [0, 5])
def test_learning_rate_falls_by_optax_s_schedules(warmup, from_zero):
    """By rollout step, from the full rate, reached once, to `lr_end` of it; then it stays there."""
    optim = config.base().optim
    optim.lr, optim.warmup_steps, optim.warmup_from_zero = 2e-3, warmup, from_zero
    optim.decay_steps, optim.lr_end = 10, 0.1
    full = max(warmup, 1) - (not from_zero)
    rate = {}
    for optim.schedule in ("constant", "linear", "cosine"):
        rate[optim.schedule] = [learner.learning_rate(optim, step) for step in range(full + 14)]
    part = np.minimum(np.arange(14) / 10, 1)
    np.testing.assert_allclose(rate["linear"][full:], 2e-3 * (1 - 0.9 * part), rtol=1e-5)
    cosine = 2e-3 * (0.1 + 0.9 * (1 + np.cos(np.pi * part)) / 2)
    np.testing.assert_allclose(rate["cosine"][full:], cosine, rtol=1e-5)
    assert rate["constant"][full:] == [2e-3] * 14
    assert rate["linear"][:full] == rate["cosine"][:full] == rate["constant"][:full]
    assert (rate["constant"][0] == 0) == from_zero
