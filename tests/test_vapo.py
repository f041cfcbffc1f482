"""VAPO: golden numbers of its two losses; the value model's gradient and estimates against NumPy,
whatever the layout or the mesh; a step with one; where it comes from; what a run of both models
keeps, and what DAPO pays for it."""

import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_update
from flax.traverse_util import flatten_dict
from levels import slow
from rounding import assert_near, reference
from test_qwen2 import oracle_logits
from test_train import arrays, assert_same_bits, run, small, without_clocks
from test_update import RULES, SHAPE, mesh_of, params_of, spread, unpack

from dapo_jax import algorithm, build, config, parallel
from dapo_jax.config import validation
from dapo_jax.dapo import packing
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.state import Counters, State
from dapo_jax.log import guards, metrics, tags
from dapo_jax.model import hf, learner, qwen2
from dapo_jax.rollout.engine import UNWATCHED, Response
from dapo_jax.variants import choose, positive_lm
from dapo_jax.variants.vapo import critic, update

SHAPE = SHAPE._replace(value_head=True)
in_every_layout = pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((), dict(row_tokens=24, micro_rows=2, max_items=12)),
        # Few sequences a row, much empty.
        slow((), dict(row_tokens=15, micro_rows=1, max_items=30)),
        slow((), dict(row_tokens=40, micro_rows=4, max_items=12)),
        ((2, 2, 2), dict(row_tokens=24, micro_rows=8, max_items=12)),
    ],
    ids=str,
)


VALUES = jnp.array([0.2, 0.4, 0.1, 0.5, 0.7, 0.3, -0.2, -0.6])
NEW_VALUES = jnp.array([0.9, 0.35, -0.5, 0.5, 1.4, -0.5, -0.25, -0.9])
RETURNS = jnp.array([1.0] * 5 + [-1.0] * 3)


@pytest.mark.parametrize(
    ("clip", "mean", "share"),
    [(np.inf, 0.2446875, 0.0), (0.2, 0.3284375, 0.375), (0.5, 0.2740625, 0.25)],
)
def test_golden_value_loss(clip, mean, share):
    loss, clipped = critic.value_loss(NEW_VALUES, VALUES, RETURNS, clip)
    assert float(loss.mean()) == pytest.approx(mean, rel=1e-6)
    assert float(clipped.mean()) == share
    # A token whose bound was the larger gives no gradient; the others V - R.
    total = lambda v: critic.value_loss(v, VALUES, RETURNS, clip)[0].sum()
    want = np.where(clipped, 0.0, NEW_VALUES - RETURNS)
    np.testing.assert_allclose(jax.grad(total)(NEW_VALUES), want, rtol=1e-6)


MU = 0.1


def test_a_score_alone_is_refused():
    def weights(*grades, tokens=(4, 2)):
        group = Group(0, [1], (), Grades(*grades))
        return positive_lm.weights(MU, [group], np.array([tokens]))

    score_G = np.array([0.2, -0.9])
    with pytest.raises(config.ConfigError, match=re.escape("config.loss.positive_coef: 0.1 needs")):
        weights(score_G)
    # The judge's verdict, whatever the score.
    assert (weights(score_G, np.array([False, True])) > 0).tolist() == [[False, True]]
    assert not weights(score_G, np.zeros(2, bool)).any()  # no right response: no loss
    assert weights(score_G, np.array([True, False]), tokens=(1, 2)).tolist() == [[MU, 0.0]]


def test_minibatches_carry_the_verdicts():
    """They are the judge's, not the shaped reward's, and follow each mini-batch's shuffle."""
    c = config.base()
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 2, 2
    c.loss.positive_coef, c.loss.overlong_filter = MU, "loss"
    rng, row = np.random.default_rng(0), lambda n: np.zeros(n, np.float32)
    # Of lengths 1 to 8; the seventh is cut off
    responses = [Response(np.full(n, n), row(n), row(n), n == 7) for n in range(1, 9)]
    graded = lambda i: Grades(rng.normal(size=2), np.array([True, i == 3]))
    groups = [Group(i, [1], responses[2 * i : 2 * i + 2], graded(i)) for i in range(4)]
    method = choose.of(c)
    for items in algorithm.make_minibatches(method, groups, 0):
        right = [len(i.response) if len(i.response) in (1, 3, 5, 8) else 0 for i in items]
        want = [MU / sum(right) * (n > 0) for n in right]
        assert [i.term_weights for i in items] == [[pytest.approx(w)] for w in want]


def make_critic(mesh=None):
    """Its optimizer's state is the gradient, so that `update` hands it out."""
    setup = learner.Setup(mesh or mesh_of(), RULES, optax.trace(decay=0.0), "float32")
    return critic.Critic(SHAPE, setup)


@pytest.fixture(scope="module")
def params():
    return params_of(SHAPE)


@pytest.fixture(scope="module")
def items():
    """Twelve responses, their rewards as advantages; every third was cut off."""
    rng = np.random.default_rng(2)
    lengths = [rng.integers(low=1, high=(7, 10)) for _ in range(12)]
    share = 1 / sum(n for _, n in lengths)
    draw = lambda n: rng.integers(32, size=n)
    sign = lambda: float(rng.choice([-1, 1]))
    return [
        packing.Item(draw(p).tolist(), draw(n), np.zeros(n, "f"), sign(), share, i % 3 == 0)
        for i, (p, n) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def old(items):
    rng = np.random.default_rng(4)
    return [rng.normal(size=len(i.response)).astype(np.float32) for i in items]


def oracle_values(params, items):
    """[Q, T], by the dense model: the head is one more row of its vocabulary."""
    wider = params | {"embed": jnp.concatenate([params["embed"], params["score"].T])}
    tokens = test_update.oracle_tokens(items)[:, :-1]
    return oracle_logits(SHAPE, wider, tokens, jnp)[..., -1]


def packed(of, items, old, layout):
    rows, used, places = packing.pack(items, packing.Layout(**layout))
    for field in rows[5:]:  # what lies beyond the micro-batches in use is never looked at
        field[used:] = 0 if field.dtype == bool else np.nan
    put = lambda x: parallel.to_device(x, of.row_sharding)
    returns = spread([np.full(len(i.response), i.advantage, "f") for i in items], places, rows)
    values = spread(old, places, rows)
    return critic.Batch(put(rows), put(values), put(returns), np.int32(used)), places


@pytest.fixture(scope="module")
def expected(params, items, old):
    """`reference` of (gradient of the value loss with a clip of .5, values)."""
    dense = lambda values: test_update.dense(items, values)
    trained = dense([np.ones(len(i.response)) for i in items])
    reward = dense([np.full(len(i.response), i.advantage) for i in items])
    before = dense(old)

    def loss(p):
        v = oracle_values(p, items)
        near = before + jnp.clip(v - before, -0.5, 0.5)
        worse = jnp.maximum((v - reward) ** 2, (near - reward) ** 2)
        return 0.5 * (trained * worse).sum() / trained.sum(), trained * v

    return reference(jax.grad(loss, has_aux=True), params)


@in_every_layout
def test_gradient_and_values_are_those_of_any_layout(params, items, old, expected, sizes, layout):
    of = make_critic(mesh_of(*sizes))
    batch, places = packed(of, items, old, layout)
    state = parallel.to_device(params, of.param_shardings)
    knobs = critic.Knobs(np.float32(0.1), np.float32(0.5))
    values = jax.device_get(of.values(state, batch.rows, batch.micro_batches))
    _, opt_state, log = parallel.to_host(of.update(state, of.init_opt_state(state), batch, knobs))
    assert not log["skipped"] and log["tokens"] == sum(len(i.response) for i in items)
    assert 0 < log["clipped"] < log["tokens"]
    assert_near((opt_state.trace, test_update.dense(items, unpack(values, places))), expected)


def by_hand(step, skipped=(False, True), old_logprobs="reuse", reference=None, **fields):
    """Two mini-batches of eight responses of 1 to 4 tokens, half of them truncated. The values of
    the batches are 1 and 2, of the first parameters; their advantages lie 10 above, the returns 20.
    (what `learn` returns, the rows that were read, batches of values, batches of the policy)."""
    c = small(9, critic__enabled=True, critic__pretrain_steps=2, loss__old_logprobs=old_logprobs)
    c.critic.update(fields)
    read, valued, learned = [], [], []

    def values(params, rows, micro_batches):
        read.append(rows)
        return np.full(rows.tokens_AxRxT.shape, params + len(read), np.float32)

    def update_values(params, opt_state, batch, knobs):
        valued.append(batch)
        log = dict(tokens=1, value_loss=0, clipped=0, grad_norm=0, skipped=skipped[len(valued) - 1])
        return params + 1, opt_state, log

    def update_policy(params, opt_state, batch, knobs):
        learned.append(batch)
        return params + 1, opt_state, dict(skipped=skipped[len(learned) - 1])

    told = dict(tokens=np.zeros(4))
    estimate = lambda rows, old, numbers: critic.Estimates(old + 10, old + 20, told)
    machine = SimpleNamespace(
        layout=packing.Layout(24, 2, 8), watch=UNWATCHED,
        trainer=SimpleNamespace(row_sharding=make_critic().row_sharding, update=update_policy),
        others={"critic": SimpleNamespace(values=values, estimate=estimate, update=update_values)},
    )  # fmt: skip
    responses = [
        Response(np.full(n, n), np.zeros(n, "f"), np.zeros(n, "f"), n % 2 == 0) for n in range(1, 5)
    ]
    groups = [Group(i, [1], responses, Grades(np.ones(4), np.ones(4, bool))) for i in range(4)]
    method, memory = choose.of(c), {"critic": {"params": 0, "opt_state": ()}}
    counters = Counters(step, others_skipped_in_row=2, skipped_in_row=7)
    state = State(0, (), reference, memory=memory, counters=counters)
    given = algorithm.make_minibatches(method, groups, step)
    knobs = algorithm.update_knobs(method, step)
    return method.learn(method, machine, state, given, knobs), read, valued, learned


def test_a_step_by_hand():
    """Values are those before the first update: they make the advantages, and bound the clip."""
    (state, logs, _), _, valued, learned = by_hand(step=2)
    whole = lambda x, value: (x == value).all()
    for n, (of_values, of_policy) in enumerate(zip(valued, learned, strict=True), 1):
        assert whole(of_values.old_values_AxRxT, n) and whole(of_values.returns_AxRxT, n + 20)
        assert whole(of_policy.rows.advantage_AxRxT, n + 10)
    assert (len(valued), len(learned), len(logs)) == (2, 2, 2)
    assert (state.params, state.memory["critic"]["params"], state.counters.updates) == (2, 2, 2)


@pytest.mark.parametrize(
    ("skipped", "in_row"),
    [((True, True), (4, 9)), ((True, False), (0, 0)), ((False, True), (1, 1))],
)
def test_skipped_updates_in_a_row_by_hand(skipped, in_row):
    counters = by_hand(2, skipped)[0][0].counters
    assert (counters.others_skipped_in_row, counters.skipped_in_row) == in_row


def test_either_model_alone_stops_the_run():
    c = small(1, optim__max_skipped=3)
    stop = lambda **in_row: guards.why_stop(c, Counters(**in_row), {})
    assert not stop(skipped_in_row=2, others_skipped_in_row=2)
    assert "3 updates in a row were not finite" in stop(skipped_in_row=3)
    assert "4 updates of a model beside the policy in a row" in stop(others_skipped_in_row=4)


def test_in_pre_training_only_the_value_model_learns_by_hand():
    """And nobody makes log-probs, which the policy here has none of."""
    (state, logs, _), _, valued, learned = by_hand(step=1, old_logprobs="recompute")
    assert (len(valued), learned, logs, state.params) == (2, [], [], 0)
    assert state.counters.skipped_in_row == 7
    for of_policy in (dict(old_logprobs="recompute"), dict(reference={})):
        with pytest.raises(AttributeError, match="log_probs"):
            by_hand(step=2, **of_policy)


def test_only_a_run_that_bootstraps_has_the_cell():
    learned = lambda **fields: by_hand(2, **fields)[3]
    cells = lambda **fields: sum((b.rows.segments_AxRxT > 0).sum() for b in learned(**fields))
    assert cells(bootstrap_truncated=True) == cells() + 8 == cells(enabled=False) + 8


def test_thirds_by_length():
    """1, ..., 12 tokens: short is at most 4, long more than 8; what is left out does not count."""
    item = lambda n, weight=1.0: packing.Item([1], np.zeros(n), np.zeros(n), 0.0, weight)
    minibatches = [[item(n) for n in range(1, 8)], [item(n) for n in range(8, 13)] + [item(99, 0)]]
    h = update.horizon(config.base().critic, minibatches, 0)
    assert (h.short, h.long) == (4, 8)
    h = update.horizon(config.base().critic, [], 0)
    assert (h.short, h.long) == (0, 0)


def test_targets_in_pre_training_are_monte_carlo():
    """VAPO section 4.1, without decoupled GAE too; the policy's lambda is its own."""
    c = config.base().critic
    c.pretrain_steps, c.lambda_value, c.lambda_policy = 2, 0.5, 0.75
    told = [update.horizon(c, [], step) for step in range(3)]
    assert [h.lambda_value for h in told] == [1, 1, 0.5]
    assert {float(h.lambda_policy) for h in told} == {0.75}


def logged(*sums):
    """What a step logs of values whose updates had these sums."""
    told = dict(tokens=4, value_loss=1, clipped=2, grad_norm=0, skipped=0)
    return update.metrics([told | {"estimates": of} for of in sums])


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
@in_every_layout
def test_estimates_are_gae_of_each_response(items, sizes, layout, alpha, bootstrap):
    """Against sums of discounted differences, response by response; the sums too. bootstrap: in
    place of its reward a truncated response has the value of the cell that reads its last token."""
    of = make_critic(mesh_of(*sizes))
    rows, _, places = packing.pack(items, packing.Layout(**layout), open_ends=bootstrap)
    assert not (rows.weight_AxRxT + rows.advantage_AxRxT)[~rows.trained_AxRxT].any()
    values = np.random.default_rng(4).normal(size=rows.tokens_AxRxT.shape).astype(np.float32)
    c = config.base()
    c.critic.gamma, c.critic.lambda_value, c.critic.length_alpha = 0.99, 0.9, alpha
    numbers = update.horizon(c.critic, [items], c.critic.pretrain_steps)
    put = lambda x: parallel.to_device(x, of.row_sharding)
    got = jax.device_get(of.estimate(put(rows), put(values), numbers))
    assert not (got.advantage_AxRxT + got.returns_AxRxT)[~rows.trained_AxRxT].any()
    advantages, returns = (unpack(x, places) for x in got[:2])
    olds = unpack(values, places)
    for item, p, v, A, G in zip(items, places, olds, advantages, returns, strict=True):
        n, goes_on, behind = len(v), bootstrap and item.truncated, 0.0
        if goes_on:
            cell, first = (*p[:2], p[2].stop), (*p[:2], p[2].start)
            behind = values[cell]
            assert (rows.tokens_AxRxT[cell], rows.targets_AxRxT[cell]) == (item.response[-1], 0)
            assert rows.positions_AxRxT[cell] == len(item.prompt) + n - 1
            assert rows.segments_AxRxT[cell] == rows.segments_AxRxT[first]
        delta = 0.99 * np.append(v[1:], behind) - v
        delta[-1] += 0.0 if goes_on else item.advantage
        lam = max(0.0, 1 - 1 / (alpha * n)) if alpha else 0.95
        ahead = np.maximum(np.arange(n)[None] - np.arange(n)[:, None], 0)  # [t, k]: k - t
        power = lambda rate, ahead=ahead: np.triu(rate**ahead)
        np.testing.assert_allclose(A, power(0.99 * lam) @ delta, atol=1e-5)
        np.testing.assert_allclose(G, power(0.99 * 0.9) @ delta + v, atol=1e-5)
    lengths = [len(i.response) for i in items]
    of_all, *thirds = got.sums["tokens"]
    assert of_all == sum(lengths) and thirds == [
        sum(n for n in lengths if low < n <= high)
        for low, high in itertools.pairwise((0, numbers.short, numbers.long, 99))
    ]
    log = logged(got.sums)
    G, error = np.concatenate(returns), np.concatenate(returns) - np.concatenate(olds)
    assert log["critic/explained_variance"] == pytest.approx(1 - error.var() / G.var(), abs=1e-4)
    assert {tags.family(tag) for tag in log} == {t for t in tags.TAGS if t.startswith("critic/")}
    assert log["critic/advantage_std"] == pytest.approx(np.concatenate(advantages).std(), rel=1e-4)


def test_estimates_of_several_mini_batches_are_of_all_their_tokens():
    """Two responses, a mini-batch each. Where all returns are alike, up to the rounding of float32
    sums, there is nothing to explain."""
    values = [0.9, 0.35, -0.5, 0.5, 1.4], [-0.5, -0.25, -0.9]

    def sums(values, reward):
        numbers = {"return": np.full(len(values), reward), "error": reward - np.array(values)}
        numbers["advantage"] = numbers["error"]
        out = {"tokens": len(values), "lam": 0.0}
        for name, x in numbers.items():
            out |= {name: x.sum(), f"{name}_square": (x * x).sum()}
        return {name: np.array([x, 0, 0, 0]) for name, x in out.items()}

    tag = "critic/explained_variance"
    log = logged(*map(sums, values, (1.0, -1.0)))
    assert log[tag] == pytest.approx(0.4946666666666667)
    assert (log["critic/value_loss"], log["critic/clipped_frac"]) == (0.25, 0.5)
    for alike in ((1.0, 1.0), (0.0, 0.0), (0.1, 0.1001)):
        assert tag not in logged(*map(sums, values, alike))


def machine_of(c):
    return build.build_machine(c, 48, (0, 1), None)


@pytest.mark.parametrize("kind", ["reward model", "language model", "policy"])
def test_it_starts_from_a_model(kind, tmp_path):
    c = small(1, critic__enabled=True, model__tie_embeddings=False)
    m = machine_of(c)
    policy = build.initial_params(c, m)
    if kind == "policy":
        given = policy
    else:
        shape = m.others["critic"].shape._replace(value_head=kind == "reward model", num_layers=1)
        given = qwen2.init(shape, jax.random.key(5))
        if kind == "reward model":
            given["score"] += 0.5
        hf.save(tmp_path / "model", shape, given, "float32")
        c.critic.init_from = str(tmp_path / "model")
        m = machine_of(c)
        assert m.others["critic"].shape.num_layers == 1 and m.trainer.shape.num_layers == 2
        assert not build.build_machine(c, 48, (0, 1), None, others=False).others
    got = jax.device_get(critic.initial_params(c, m.others["critic"], policy))
    assert got.keys() == {"embed", "blocks", "final_norm", "score"}
    for name in ("embed", "blocks", "final_norm"):
        assert_same_bits(got[name], jax.device_get(given[name]))
    assert (got["score"] == (0.5 if kind == "reward model" else 0.0)).all()
    if kind == "policy":  # a copy: the first update is made in its place
        jax.tree.map(lambda x: x.delete(), m.others["critic"].of_model(policy))
        assert not any(x.is_deleted() for x in jax.tree.leaves(policy))


def test_a_model_of_other_tokens_is_refused(tmp_path):
    c = small(1, critic__enabled=True)
    shape = machine_of(c).others["critic"].shape._replace(vocab_size=24)
    hf.save(tmp_path / "model", shape, qwen2.init(shape, jax.random.key(5)), "float32")
    c.critic.init_from = str(tmp_path / "model")
    with pytest.raises(ValueError, match="24 embedding rows, the policy 48"):
        machine_of(c)
    c.critic.init_from = "./nowhere"
    with pytest.raises(config.ConfigError, match="^config.critic.init_from: ./nowhere: no such fi"):
        config.validate(c, 8, files=True)


@pytest.mark.slow
def test_dapo_s_programs_are_the_same():
    """By their text: a value model adds two, and none of DAPO's knows of it; the loss on right
    responses changes the update's alone."""

    def texts(**changes):
        c = small(1, **changes)
        calls = build.calls(c, machine_of(c))
        return {k: x.program.lower(*x.arguments).as_text() for k, x in calls.items()}

    off, on = texts(), texts(critic__enabled=True)
    assert on.keys() - off.keys() == {"values", "update of values"}
    assert {k: on[k] for k in off} == off
    term = texts(loss__positive_coef=0.1)
    assert {k for k in off if off[k] != term[k]} == {"update"} and term.keys() == off.keys()


def test_the_policy_s_rate_begins_behind_pre_training():
    c = small(9, optim__lr=1.0, optim__warmup_steps=2, critic__pretrain_steps=3)
    rates = lambda: [choose.of(c).learning_rate(step) for step in range(6)]
    assert rates() == [0.5, 1, 1, 1, 1, 1]
    c.critic.enabled = True
    assert rates() == [0, 0, 0, 0.5, 1, 1] and validation.warnings(c) == []
    c.steps = 3
    assert "critic.pretrain_steps=3 of steps=3" in validation.warnings(c)[0]
    c.critic.lr, c.critic.warmup_steps = 1.0, 2
    assert [update.value_knobs(c.critic, step).lr for step in range(3)] == [0.5, 1, 1]


def valued(steps, **fields):
    own = dict(critic__enabled=True, critic__pretrain_steps=2, critic__lr=1e-3)
    own |= dict(critic__length_alpha=0.4, checkpoint__keep=9)
    return small(steps, **own | fields)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    run(valued(4), workdir := tmp_path_factory.mktemp("vapo") / "run")
    return workdir


@pytest.mark.slow
def test_both_models_resume_bit_for_bit(whole_run, tmp_path):
    for steps in (1, 3, 4):  # within pre-training, behind it
        run(valued(steps), tmp_path)
    assert_same_bits(arrays(tmp_path, 4), arrays(whole_run, 4))
    of = lambda workdir: [
        {k: v for k, v in r.items() if not k.startswith("eval/")} for r in without_clocks(workdir)
    ]
    mine, theirs = of(tmp_path), of(whole_run)
    assert [{k: m[k] for k in t} for m, t in zip(mine, theirs, strict=True)] == theirs


@pytest.mark.slow
def test_a_run_without_a_value_model_is_no_start_for_one(whole_run, tmp_path):
    c = valued(5, init_from=f"{whole_run}@3", init_state="all")
    run(c, tmp_path / "branch")
    assert_same_bits(arrays(tmp_path / "branch", 4)["critic"], arrays(whole_run, 4)["critic"])
    c.critic.enabled = False
    with pytest.raises(ValueError, match="critic.*absent"):
        run(c, tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"loss.kl_coef": 0.1, "optim.offload": True, "critic.bootstrap_truncated": True,
         "rollout.max_response_tokens": 6, "reward.overlong_penalty": 0.0},
        {"model.lora.rank": 2, "model.dtype": "bfloat16", "critic.clip": 0.2,
         "loss.objective": "cispo", "loss.normalizer": "sequence", "loss.old_logprobs": "reuse"},
        {"rollout.staleness": 1, "loss.importance_cap": 5.0, "rollout.chunk": 4},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_a_step_of_both_models_under_each_option(change, tmp_path):
    c = valued(2, critic__pretrain_steps=1)
    c.update(change)
    run(c, tmp_path)
    last = metrics.read(tmp_path / "metrics.jsonl")[-1]
    assert last["optim/updates"] >= 1 and last["optim/skipped"] == last["critic/skipped"] == 0
    assert np.isfinite(last["optim/grad_norm"]) and np.isfinite(last["critic/grad_norm"])
    kinds = {str(x.dtype) for x in flatten_dict(arrays(tmp_path, 2)["critic"]["params"]).values()}
    assert kinds == {"float32"}


def test_values_that_explain_nothing_are_an_alarm():
    c = valued(9)
    log = {"critic/explained_variance": 0.01, "policy/loss": 0.1}
    alarms = lambda **more: guards.alarms(c, log | more, guards.History([], []))
    assert "explained variance of the returns 0.01 is below 0.1" in alarms()[0]
    assert alarms(**{"reward/accuracy": 0.95}) == []  # little is left to explain
    del log["policy/loss"]  # in pre-training
    assert alarms() == []
    # Without group statistics, groups of one are no collapse either.
    assert "mixed groups 0 is below 0.01" in alarms(**{"sampling/accept_frac": 0.0})[0]
    c.rollout.group_size = 1
    assert alarms(**{"sampling/accept_frac": 0.0}) == []
