"""DPPO, and objectives that look at their whole mini-batch: golden numbers, the gradient against
float64 in every layout, and runs."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_objectives
import test_update
from levels import compiled_soon
from rounding import assert_near, reference
from test_config import changed
from test_objectives import ADVANTAGE, NEW, OVER, PACKED, rows, tokens
from test_train import arrays, assert_same_bits, run, small, without_clocks
from test_update import (
    SHAPE,
    TEMPERATURE,
    dense,
    make_batch,
    make_programs,
    mesh_of,
    oracle_stats,
    params_of,
)

from benchmarks import arms
from dapo_jax import algorithm, config, parallel
from dapo_jax.dapo import objective, packing
from dapo_jax.dapo.state import Counters, State
from dapo_jax.lab import redraw
from dapo_jax.log import tags
from dapo_jax.rollout.engine import UNWATCHED
from dapo_jax.variants import choose, objectives, over_batch
from dapo_jax.variants.settings import Tokens

SETTINGS = Tokens(0.3, -0.2, 0.4, 0.3, 0.7, 0.25)
OLD = [-0.6, -1.0, -0.1, -2.1, -0.7, -0.8, -0.75, -0.5, -1.0, -0.2]
ENTROPY = [0.5, 0.1, 0.9, 0.9, 0.3, 0.05, 0.4, 0.6, 0.2, 0.8]
# Low where a token may not leave: covariance too high (2) or too low (3), clipped by PPO (9)
LOTS = [0.6, 0.9, 0.1, 0.05, 0.2, 0.5, 0.3, 0.8, 0.7, 0.15]
C = objective.coefficients(config.base().loss)


def by_hand(name, s=SETTINGS, logp=NEW, old=OLD, A=ADVANTAGE, entropy=ENTROPY, lots=LOTS):
    """(tokens that are chosen, in order; effective sample size), in float64, one by one."""
    logp, old = np.float64(logp), np.float64(old)
    cov = [(x - np.mean(logp)) * (a - np.mean(A)) for x, a in zip(logp, A, strict=True)]
    ratio, N = np.exp(logp - old), len(logp)
    if name == "clip_cov":
        free = [
            i for i in range(N)
            if s.clip_cov_low < cov[i] < s.clip_cov_high
            and not (A[i] > 0 and ratio[i] > 1 + C.clip_high)
            and not (A[i] < 0 and ratio[i] < 1 - C.clip_low)
        ]  # fmt: skip
        found = sorted(free, key=lambda i: lots[i])[: max(int(s.clip_cov_share * N), 1)]
    elif name == "kl_cov":
        found = sorted(range(N), key=lambda i: -cov[i])[: max(int(s.kl_cov_share * N), 1)]
    elif name == "high_entropy":
        found = sorted(range(N), key=lambda i: -entropy[i])[: -int(-s.entropy_share * N // 1)]
    else:
        found = []
    return sorted(found), ratio.sum() ** 2 / (N * (ratio**2).sum())


def token_losses(name, xp, logp, old, A, chosen, e, beta=SETTINGS.kl_cov_coef):
    """What a token adds to the loss beside its weight; of arrays of `xp`. chosen, e: numbers."""
    ratio = xp.exp(logp - old)
    ppo = xp.maximum(-A * ratio, -A * xp.clip(ratio, 1 - C.clip_low, 1 + C.clip_high))
    if name == "clip_cov":
        return xp.where(chosen, 0, ppo)
    if name == "high_entropy":
        return xp.where(chosen, ppo, 0)
    if name == "kl_cov":
        return -A * ratio + xp.where(chosen, beta * xp.abs(logp - old), 0)
    fixed = np.minimum(ratio, e) if xp is np else jax.lax.stop_gradient(xp.minimum(ratio, e))
    return -fixed * A * logp + (1 - e) * (xp.exp(old - logp) - 1 - (old - logp))


GOLDEN = {  # chosen tokens, loss by the token mean
    "clip_cov": ([0, 4, 6], -0.19803513125686845),
    "kl_cov": ([0, 2, 7], -0.2399762605122679),
    "high_entropy": ([2, 3, 9], -0.1705170912115183),
    "ess": ([], 0.33083840752112514),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_choices_losses_and_gradients(name):
    """Choice and loss by float64, and the gradient of each token by central differences, with what
    is chosen held."""
    want, loss = GOLDEN[name]
    method = over_batch.METHODS[name]
    value = rows(ENTROPY if method.by_entropy else NEW)
    count = jnp.int32(method.count(SETTINGS, 10))
    weight = rows(np.full(10, 0.1))
    seen = over_batch.Seen(
        PACKED.trained_AxRxT, value, rows(OLD), rows(ADVANTAGE), weight, rows(LOTS), count, True, C
    )
    if name.endswith("_cov"):
        cov = (NEW - np.mean(NEW)) * (ADVANTAGE - np.mean(ADVANTAGE))
        np.testing.assert_allclose(tokens(over_batch.covariance(seen)), cov, rtol=1e-5)
    got = method.change(seen, SETTINGS)
    chosen, by_float64 = by_hand(name)
    assert chosen == want
    if name == "ess":
        assert float(got.metrics["tokens/ess"]) == pytest.approx(by_float64, rel=1e-6)
        assert by_float64 == pytest.approx(0.9431437634268454, rel=1e-9)
    else:
        assert float(got.metrics["tokens/chosen_frac"]) == pytest.approx(len(want) / 10)
    advantage = rows(ADVANTAGE) if got.advantage is None else got.advantage
    c, of = got.loss or C, objectives.OBJECTIVES[name].token_loss

    def total(logp):
        logp = jnp.where(PACKED.trained_AxRxT, logp, 0.0)
        term = of(logp, rows(OLD), advantage, c, OVER).loss
        pull = 0.0 if got.term is None else method.term.loss(logp, rows(OLD), got.term)
        return (weight * (term + c.kl_coef * objective.k3(logp, rows(OLD)))).sum() + pull

    got_loss, grad = jax.value_and_grad(total)(rows(NEW))
    at = np.isin(np.arange(10), chosen)
    fixed = np.minimum(np.exp(np.subtract(NEW, OLD)), by_float64)

    def exact(logp):
        if name == "ess":  # its weights are held
            k3 = np.exp(np.subtract(OLD, logp)) - 1 - np.subtract(OLD, logp)
            return np.mean(-fixed * ADVANTAGE * logp + (1 - by_float64) * k3)
        return np.mean(token_losses(name, np, logp, np.array(OLD), ADVANTAGE, at, by_float64))

    assert exact(np.array(NEW)) == pytest.approx(loss, rel=1e-9)
    assert float(got_loss) == pytest.approx(loss, rel=2e-6)
    steps = 1e-6 * np.eye(10)
    slope = [(exact(NEW + h) - exact(NEW - h)) / 2e-6 for h in steps]
    if name == "kl_cov":  # where old and new are one |x| has no gradient
        slope = np.where(np.equal(NEW, OLD), -ADVANTAGE / 10, slope)
    np.testing.assert_allclose(tokens(grad), slope, rtol=5e-6, atol=2e-8)


def test_ties_are_chosen_together_and_one_token_at_least():
    inside = jnp.array([True, True, True, True, False])
    x = jnp.array([2.0, 1.0, 1.0, 3.0, 0.0])
    for count, want in ((1, [1, 2]), (2, [1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])):
        assert np.flatnonzero(over_batch.smallest(x, inside, jnp.int32(count))).tolist() == want
    assert not over_batch.smallest(x, jnp.zeros(5, bool), jnp.int32(2)).any()
    counts = {name: [m.count(Tokens(), N) for N in (1, 1000, 9999)] for name, m in METHODS}
    assert counts["clip_cov"] == [1, 1, 1] and counts["kl_cov"] == [1, 2, 19]
    assert counts["high_entropy"] == [1, 200, 2000]


METHODS = over_batch.METHODS.items()


def test_no_pull_while_the_policy_is_the_old_one():
    """There |log ratio| is 0, and its sign is rounding's."""
    args = PACKED.trained_AxRxT, rows(NEW), rows(NEW), rows(ADVANTAGE), rows(np.ones(10)), None, 3
    found = over_batch.kl_cov(over_batch.Seen(*args, False, C), SETTINGS)
    assert not found.term.any() and float(found.metrics["tokens/chosen_frac"]) == pytest.approx(0.3)


DPPO = {  # clip_low, clip_high, cap -> loss by the token mean, tokens out, tokens over the cap
    ("dppo_tv", 0.2, 0.1, 0.0): (0.15271732861911078, [3, 9], []),
    ("dppo_kl", 0.1, 0.05, 1.3): (0.16317896674011462, [3, 9], [5]),
}


@pytest.mark.parametrize(("name", "low", "high", "cap"), DPPO)
def test_golden_divergence_proximal(name, low, high, cap):
    """Out where a token's probability has moved too far with its advantage; the gradient of the
    others is min(ratio, cap) A."""
    loss, out, over = DPPO[name, low, high, cap]
    bounds = dict(clip_low=low, clip_high=high, dual_clip=cap)
    got, grad, _ = test_objectives.evaluate(name, "batch_tokens", **bounds)
    p, q = np.exp(NEW), np.exp(test_objectives.OLD)
    moved = p - q
    if name == "dppo_kl":
        moved = np.sign(p - q) * (q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)))
    gone = np.where(ADVANTAGE > 0, moved > high, moved < -low)
    weight = np.where(gone, 0, np.minimum(p / q, cap or np.inf))
    assert np.flatnonzero(gone).tolist() == out
    assert np.mean(-weight * ADVANTAGE * NEW) == pytest.approx(loss, rel=1e-9)
    assert got == pytest.approx(loss, rel=2e-6)
    np.testing.assert_allclose(grad, -weight * ADVANTAGE / 10, rtol=2e-6, atol=1e-9)
    c = objective.coefficients(changed(**{f"loss__{k}": x for k, x in bounds.items()}).loss)
    given = rows(NEW), rows(test_objectives.OLD), rows(ADVANTAGE), c, OVER
    below, above, capped = objectives.OBJECTIVES[name].token_loss(*given)[2:]
    said = [np.flatnonzero(tokens(x)).tolist() for x in (below, above, capped)]
    assert said == [[9], [3], over]


# --- in every layout ---


Machine = collections.namedtuple("Machine", "trainer layout watch")
WIDE = Tokens(0.2, -0.5, 1.5, 0.2, 0.7, 0.25)


@pytest.fixture(scope="module")
def params():
    return params_of(SHAPE)


@pytest.fixture(scope="module")
def batch(params):
    """Twelve responses; ratios apart from 1 and from the clip's bounds."""
    return make_batch(params, [-0.4, -0.1, 0.1, 0.4])


@pytest.fixture(scope="module")
def lots(batch):
    rng = np.random.default_rng(1)
    return [rng.random(len(o), np.float32) for o in batch.old]


def by_cells(params, batch, lots, name):
    """(which cells are trained, and chosen in float64, [Q, T]; effective sample size)."""
    trained = dense(batch.items, [np.ones(len(o)) for o in batch.old]) > 0
    logp, entropy = (x[trained] for x in oracle_stats(params, batch.items, TEMPERATURE, np))
    A = np.concatenate([np.full(len(o), i.advantage) for o, i in zip(*batch[1::-1], strict=True)])
    which, e = by_hand(
        name, WIDE, logp, np.concatenate(batch.old), A, entropy, np.concatenate(lots)
    )
    chosen = np.zeros(trained.shape, bool)
    chosen[trained] = np.isin(np.arange(len(logp)), which)
    return trained, chosen, e


def learned(name, params, batch, lots, monkeypatch, mesh, layout, order, update=None):
    """(what a whole `learn` gave, the batch's items in the order that they had there)."""
    lot = {id(i.response): x for i, x in zip(batch.items, lots, strict=True)}
    add = lambda item, rng: item._replace(term_weights=(*item.term_weights, lot[id(item.response)]))
    monkeypatch.setattr(over_batch, "with_lots", add)
    c = changed(loss__objective=name, loss__old_logprobs="reuse")
    c.tokens = WIDE
    method = choose.of(c)
    none = (0.0,) * len(method.terms)
    items = [
        i._replace(sampled_logps=o, term_weights=none)
        for i, o in zip(batch.items, batch.old, strict=True)
    ][::order]
    terms = tuple(term for term, _ in method.terms)
    made = make_programs(mesh=mesh_of(**mesh), choice=choose.objective(c), terms=terms)
    made.update = update or made.update
    machine = Machine(made, packing.Layout(*layout), UNWATCHED)
    state = State(*test_update.start(made, params), counters=Counters())
    knobs = test_update.knobs(objective.coefficients(c.loss))
    return method.learn(method, machine, state, [items], knobs), items


LAYOUTS = [  # mesh; TOKENS of a row, rows a pass, most sequences; order of the items
    ({}, (24, 2, 12), 1),
    ({}, (40, 4, 12), -1),
    (dict(data=2, fsdp=2, tensor=2), (24, 8, 12), 1),
]


@pytest.mark.parametrize(("mesh", "layout", "order"), LAYOUTS, ids=str)
@pytest.mark.parametrize("name", over_batch.METHODS)
@compiled_soon()
def test_the_layout_does_not_matter(name, mesh, layout, order, params, batch, lots, monkeypatch):
    """Each token of an update has the advantage and the weights that float64 gives it."""
    trained, chosen, e = by_cells(params, batch, lots, name)
    seen = []

    def update(params, opt_state, given, knobs):
        seen.append(jax.device_get((given, knobs)))
        return params, opt_state, {"skipped": False}

    how = dict(mesh=mesh, layout=layout, order=order, update=update)
    (_, _, metrics), items = learned(name, params, batch, lots, monkeypatch, **how)
    ((given, knobs),) = seen
    places = packing.pack(items, packing.Layout(*layout))[2]
    told = lambda cells: dense(batch.items, [cells[place] for place in places][::order])
    A, weight = (
        dense(batch.items, [np.full(len(i.response), getattr(i, of)) for i in batch.items])
        for of in ("advantage", "weight")
    )
    keeps = {"clip_cov": ~chosen, "high_entropy": chosen}.get(name, True)
    np.testing.assert_array_equal(told(given.rows.advantage_AxRxT), np.float32(A * keeps))
    if name == "kl_cov":
        (cells,) = given.terms
        np.testing.assert_allclose(told(cells), 0.7 * weight * chosen, rtol=1e-6)
    else:
        assert given.terms == ()
    if name == "ess":
        loss = knobs.loss
        assert metrics["tokens/ess"] == pytest.approx(e, rel=1e-5) and e < 0.97
        assert (loss.clip_low, 1 + loss.clip_high) == pytest.approx((1, e), rel=1e-5)
        assert loss.kl_coef == pytest.approx(1 - e, rel=1e-3)
    else:
        assert 2 < chosen.sum() < 0.5 * trained.sum()
        assert metrics["tokens/chosen_frac"] == pytest.approx(chosen.sum() / trained.sum())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["kl_cov", "ess"])
@compiled_soon()
def test_gradient_of_the_policy_against_float64(name, params, batch, lots, monkeypatch):
    trained, chosen, _ = by_cells(params, batch, lots, name)
    old = dense(batch.items, batch.old)
    A, weight = (
        dense(batch.items, [np.full(len(i.response), getattr(i, of)) for i in batch.items])
        for of in ("advantage", "weight")
    )

    def loss(p):
        logp = jnp.where(trained, oracle_stats(p, batch.items, TEMPERATURE)[0], 0.0)
        ratio = jnp.where(trained, jnp.exp(logp - old), 0.0)
        e = jax.lax.stop_gradient(ratio.sum() ** 2 / (trained.sum() * (ratio**2).sum()))
        return (weight * token_losses(name, jnp, logp, old, A, chosen, e)).sum()

    want = reference(jax.grad(loss), params)
    (state, _, _), _ = learned(name, params, batch, lots, monkeypatch, *LAYOUTS[0])
    assert_near(parallel.to_host(state.opt_state.trace), want)


# --- runs ---

nightly = lambda name: pytest.param(name, marks=pytest.mark.nightly)
REST = ("kl_cov", "dppo_tv", "dppo_kl", "high_entropy", "ess")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_cov", *map(nightly, REST)])
def test_two_steps_train_and_a_resumed_run_is_the_same(name, tmp_path):
    c = lambda steps: small(steps, loss__objective=name, loss__old_logprobs="recompute")
    for folder, parts in (("whole", (2,)), ("resumed", (1, 2))):
        for steps in parts:
            run(c(steps), tmp_path / folder)
    whole, resumed = (without_clocks(tmp_path / x) for x in ("whole", "resumed"))
    assert_same_bits(arrays(tmp_path / "whole", 2), arrays(tmp_path / "resumed", 2))
    for record, again in zip(whole[1:], resumed[1:], strict=True):
        shared = {k: v for k, v in record.items() if not k.startswith("eval/")}
        assert shared.items() <= again.items() and np.isfinite(record["policy/loss"])
        found = {t for t in record if tags.TAGS.get(t, tags.TAGS["alarms"]).when in WHEN}
        assert found == TAGS.get(name, set())


WHEN = {"chosen", "cov", "ess"}
CHOSEN = {"tokens/chosen_frac"}
TAGS = {"clip_cov": CHOSEN, "kl_cov": CHOSEN | {"policy/cov_kl"}, "high_entropy": CHOSEN}
TAGS["ess"] = {"tokens/ess"}


@pytest.mark.parametrize("name", over_batch.METHODS)
def test_each_is_an_entry_with_its_own_settings(name):
    c = changed(loss__objective=name)
    for field, value in (("clip_cov", 0.1), ("kl_cov", 0.1), ("entropy", 0.4)):
        if name.endswith(field):
            c.update({f"tokens.{field}_share": value})
    config.validate(c, 1)
    with pytest.raises(ValueError, match="cannot be compared token by token"):
        redraw.by_token(c)
    assert choose.of(config.base()).learn is algorithm.learn


def test_losses_are_compared_with_nothing_else_changed(tmp_path):
    arms_of = arms.STUDIES["recipes_losses"].arms
    plain, *others = (arms.recipe_fields(arm, tmp_path) for arm in arms_of)
    moved = [{key for key in plain if plain[key] != other[key]} for other in others]
    assert len(others) == 6 and all("loss.objective" in keys for keys in moved)
    bounds = {"loss.clip_low", "loss.clip_high", "loss.dual_clip"}
    assert set().union(*moved) == {"loss.objective"} | bounds
