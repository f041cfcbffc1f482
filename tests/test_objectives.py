"""The field's other objectives: golden numbers, made in float64 by formulas written out, whose
gradients agree with central differences. Every layout: test_update.py."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import ROOT
from test_config import changed

from dapo_jax import build, config
from dapo_jax.checkpoint import resume
from dapo_jax.config import presets, rules, schema, validation
from dapo_jax.dapo import objective, update
from dapo_jax.dapo.advantage import group_normalize, whiten
from dapo_jax.dapo.settings import Advantage
from dapo_jax.variants import choose, objectives

# Four responses of 4, 2, 3 and 1 tokens to two prompts, packed as two to a row; the last of them in
# front of the third, and a cell of a prompt before it.
LENGTHS, PROMPTS = np.array([4, 2, 3, 1]), np.array([0, 0, 1, 1])
NEW = [-0.5, -1.2, -0.1, -2.0, -0.7, -0.3, -1.0, -0.4, -0.9, -0.6]
OLD = [-0.6, -1.0, -0.1, -4.0, -0.7, -0.8, -0.75, -0.4, -1.0, -0.2]
SAMPLED = [-0.5, -2.0, -0.2, -3.9, -0.1, -2.7, -0.8, -0.4, -0.1, -1.35]
ADVANTAGE = np.repeat([1.0, -1.0, 0.5, -0.5], LENGTHS)
CELLS = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 3), (1, 4), (1, 5), (1, 1)]
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2, 0]])


def rows(values):
    """Values of the ten tokens -> [2, 7] cells, 0 elsewhere."""
    return jnp.zeros((2, 7)).at[tuple(np.transpose(CELLS))].set(jnp.asarray(values, jnp.float32))


def tokens(cells):
    return np.asarray(cells)[tuple(np.transpose(CELLS))]


PACKED = SimpleNamespace(segments_AxRxT=SEGMENTS, trained_AxRxT=rows(np.ones(10)) > 0)
OVER = update.per_response(PACKED)


def evaluate(name, normalizer, advantage=ADVANTAGE, importance="token", **changes):
    """(loss, its gradient by the ten tokens' log-probs, importance weights of the cells)."""
    c = config.base()
    c.loss.update(dict(changes, objective=name, importance=importance))
    assert validation.check_objective(c.loss) == []
    choice, numbers = objectives.choice(c.loss), objective.coefficients(c.loss)
    weight = objective.token_weights(LENGTHS, PROMPTS, normalizer, 32, 8)
    w = choice.importance(rows(OLD), rows(SAMPLED), numbers, OVER) if choice.importance else 1.0

    def loss(logp):
        logp = jnp.where(PACKED.trained_AxRxT, logp, 0.0)
        term = choice.token_loss(logp, rows(OLD), rows(advantage), numbers, OVER)
        return (rows(np.repeat(weight, LENGTHS)) * w * term.loss).sum()

    value, grad = jax.value_and_grad(loss)(rows(NEW))
    return float(value), tokens(grad), w


GSPO_GRAD = [0, 0, 0, 0, *[0.16050317708596767] * 2, *[-0.039634559354196415] * 3, 0]
CISPO = dict(clip_low=1.0, clip_high=4.0)
GOLDEN = {
    "cispo, at most 5": (
        ("cispo", "batch_tokens", CISPO), 1.1326077272380417,
        [-0.11051709180756475, -0.0818730753077982, -0.1, -0.5, 0.1, 0.1648721270700128,
         -0.03894003915357024, -0.05, -0.055258545903782375, 0.033516002301781964],
    ),
    "cispo, .8 to 1.28": (
        ("cispo", "batch_tokens", {}), 0.3968389275865444,
        [-0.11051709180756475, -0.0818730753077982, -0.1, -0.128, 0.1, 0.128,
         -0.04, -0.05, -0.055258545903782375, 0.04],
    ),
    "gspo": (("gspo", "sequence", {}), -0.017897323890653904, GSPO_GRAD),
    "gspo, the paper's band": (
        ("gspo", "sequence", dict(clip_low=3e-4, clip_high=4e-4)), 0.07696517610934611, GSPO_GRAD,
    ),
    "gspo-token": (("gspo_token", "sequence", {}), -0.017897323890653904, GSPO_GRAD),
    "gspo-token, an advantage per token": (
        ("gspo_token", "sequence",
         dict(advantage=[1, 0.5, -0.5, 2, -1, -0.2, 0.5, 0.5, -1.5, -0.5])), 0.10248881552878836,
        [0, 0, 0.050250443671430715, 0, 0.16050317708596767, 0.03210063541719354,
         -0.039634559354196415, -0.039634559354196415, 0.11890367806258924, 0],
    ),
    "rloo": (
        ("rloo", "sequence", dict(clip_high=0.2)), 0.10459182062189983,
        [0, 0, 0, 0, *[0.41218031767503205] * 2, *[-0.10758849705313223] * 3, 0],
    ),
    "sapo": (("sapo", "batch_tokens", {}), -0.7636536016845249, None),
    "ppo, prompt mean": (("ppo", "group_tokens", {}), -0.25984659802614923, None),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_losses_and_gradients(case):
    (name, normalizer, changes), loss, grad = GOLDEN[case]
    got, got_grad, _ = evaluate(name, normalizer, **changes)
    assert got == pytest.approx(loss, rel=2e-6, abs=2e-7)
    if grad is not None:
        np.testing.assert_allclose(got_grad, grad, rtol=2e-6, atol=1e-8)


def test_golden_gradient_of_sapo():
    """4 s (1 - s) ratio A, s = sigmoid(tau (ratio - 1)); at ratio 1 that of the policy gradient. In
    float32 1 - s is off by an ulp of 1, whatever is left of it."""
    _, got, _ = evaluate("sapo", "batch_tokens")
    want = [-0.11021204907203222, -0.081204184017347, -0.1, -0.004948337119924881, 0.1,
            0.14713518315208038, -0.03846757155446478, -0.05, -0.05510602453601611,
            0.03253166832633078]  # fmt: skip
    ulp = np.finfo(np.float32).eps * 4 * np.exp(np.subtract(NEW, OLD)) * abs(ADVANTAGE) / 10
    assert (abs(got - want) <= ulp + 2e-6 * abs(np.array(want))).all()


TOKEN_WEIGHT = np.exp(np.subtract(OLD, SAMPLED))
each = lambda *values: np.repeat(values, LENGTHS)
WEIGHTS = {  # importance, cap, floor -> weights, loss by the token mean
    ("token", 2.0, 0.0): (np.minimum(TOKEN_WEIGHT, 2), -0.13886000004209578),
    ("token_mask", 5.0, 0.5): (
        np.where((TOKEN_WEIGHT >= 0.5) & (TOKEN_WEIGHT <= 5), TOKEN_WEIGHT, 0),
        -0.45861803182232014,
    ),
    ("token_mask", 5.0, 0.0): (
        np.where(TOKEN_WEIGHT <= 5, TOKEN_WEIGHT, 0), -0.48108448002818116,
    ),
    ("sequence", 2.0, 0.0): (each(2, 2, 0.4274149319487267, 2), -0.2926687085100913),
    ("sequence_mask", 3.0, 0.0): (
        each(2.4596031111569494, 0, 0.4274149319487267, 0), -1.0956255913561277,
    ),
    ("mean", 2.0, 0.0): (
        each(1.2523227161918644, 1.9155408290138962, 0.7532686564546568, 2), -0.04771105650071119,
    ),
    ("mean_mask", 2.0, 0.5): (TOKEN_WEIGHT * each(1, 1, 1, 0), 0.4949054416483884),
}  # fmt: skip


@pytest.mark.parametrize("importance, cap, floor", WEIGHTS)
def test_golden_importance_weights(importance, cap, floor):
    """Truncated or zeroed, of a token or a response; what is zeroed stays in the denominator."""
    weights, loss = WEIGHTS[importance, cap, floor]
    got, _, got_RxT = evaluate(
        "ppo", "batch_tokens",
        importance=importance, importance_cap=cap, importance_floor=floor,
    )  # fmt: skip
    np.testing.assert_allclose(tokens(got_RxT), weights, rtol=2e-6)
    assert got == pytest.approx(loss, rel=2e-6, abs=3e-7)


def test_which_ratios_are_of_whole_responses():
    found = []
    for name in objectives.OBJECTIVES:
        c = config.base().loss
        c.update(dict(objective=name))
        found += [name] * rules.one_ratio(c)
    assert found == ["gspo", "gspo_token", "rloo"]


def test_a_weight_at_its_bounds_is_kept():
    c = config.base().loss
    c.update(dict(importance="token_mask", importance_floor=1.0, importance_cap=1.0))
    weigh, numbers = objectives.choice(c).importance, objective.coefficients(c)
    assert (weigh(rows(OLD), rows(OLD), numbers, OVER) == 1).all()


def test_cispo_says_where_its_bounds_weigh():
    numbers = objective.coefficients(config.base().loss)
    term = objectives.cispo(rows(NEW), rows(OLD), rows(ADVANTAGE), numbers, OVER)
    assert tokens(term.clipped_low).nonzero()[0].tolist() == [6, 9]
    assert tokens(term.clipped_high).nonzero()[0].tolist() == [3, 5]


REWARDS = np.array([[1.0, 0, 0, 1], [1, 1, 1, 0]])
ALL = np.ones(REWARDS.shape, bool)
OTHERS = Advantage(scale="none", leave_one_out=True)


def test_without_std_by_the_batch_s_and_against_the_others():
    centred = [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]]
    none = group_normalize(REWARDS, Advantage(scale="none"), ALL)
    np.testing.assert_allclose(none, centred, rtol=1e-6)
    batch = group_normalize(REWARDS, Advantage(ddof=0, epsilon=1e-12, scale="batch"), ALL)
    np.testing.assert_allclose(batch, np.divide(centred, 0.46770717334674267), rtol=1e-6)
    batch = group_normalize(REWARDS, Advantage(ddof=1, epsilon=1e-12, scale="batch"), ALL)
    np.testing.assert_allclose(batch, np.divide(centred, 0.5), rtol=1e-6)
    others = group_normalize(REWARDS, OTHERS, ALL)
    np.testing.assert_allclose(others, np.divide([[2, -2, -2, 2], [1, 1, 1, -3]], 3), rtol=1e-6)
    counted = np.array([[True, True, False, True]])  # who is filtered is nobody's baseline
    got = group_normalize(np.array([[1.0, 0.0, 9.0, 0.0]]), OTHERS, counted)
    np.testing.assert_allclose(got, [[1.0, -0.5, 0.0, -0.5]])


def test_whitened_over_the_tokens_of_the_batch():
    rng = np.random.default_rng(0)
    A, n = rng.normal(size=(3, 4)), rng.integers(0, 9, (3, 4))
    per_token = np.repeat(A.ravel(), n.ravel())
    got = whiten(A, n, Advantage(epsilon=1e-5))
    want = (A - per_token.mean()) / (per_token.std(ddof=1) + 1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.isfinite(whiten(A, np.zeros((3, 4), int), Advantage(epsilon=1e-5))).all()


REINFORCE = -np.mean(ADVANTAGE * NEW)
OTHERS_OWN = """
import jax.numpy as jnp
from dapo_jax.dapo.objective import ppo_clip
def sums(logp, old_logp, advantage, c, per_response): return jnp.sum(logp)
def five(logp, old_logp, advantage, c): return logp
def text(logp, old_logp, advantage, c, per_response): return "x"
ours = ppo_clip
"""


@pytest.fixture
def own(tmp_path):
    """REINFORCE and the other objective of docs/own_loss.md, as a file."""
    page = (ROOT / "docs" / "own_loss.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "my_loss.py").write_text(shown + OTHERS_OWN)
    return tmp_path / "my_loss.py"


def test_the_page_s_objectives_train(own):
    """-A log pi, a mean over tokens; checks and trainer take it from its file."""
    c = changed(loss__objective=f"{own}:reinforce")
    config.validate(c, 1)
    assert evaluate(f"{own}:reinforce", "batch_tokens")[0] == pytest.approx(REINFORCE, rel=1e-6)
    _, soft, _ = evaluate(f"{own}:soft_clip", "batch_tokens", clip_low=1.0, clip_high=100.0)
    np.testing.assert_allclose(soft, -np.exp(np.subtract(NEW, OLD)) * ADVANTAGE / 10, rtol=2e-6)
    trainer = build.build_machine(c, 48, (0, 1), None).trainer
    sums = jax.eval_shape(trainer.update, *trainer.abstract(1, 8, 64))[-1]
    assert {"loss", "ratio_max"} <= sums.keys()
    assert evaluate(f"{own}:ours", "group_tokens")[0] == evaluate("ppo", "group_tokens")[0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sums", "it gives no loss per token: loss is float32(), of inputs float32(2, 3)"),
        ("five", "TypeError: five() takes 4 positional arguments but 5 were given"),
        ("text", "it gives no loss per token"),
        ("none", "has no function 'none'"),
    ],
)
def test_what_is_no_objective_is_one_line(own, name, why):
    c = changed(loss__objective=f"{own}:{name}")
    (line,) = validation.check_objective(c.loss)
    assert line.startswith("config.loss.objective: ") and why in line and "\n" not in line


def test_an_objective_is_the_same_function_until_its_file_changes(own):
    name = f"{own}:reinforce"
    c = changed(loss__objective=name)
    before, hashed = objectives.named(name), choose.files(c)
    assert objectives.named(name) == before and choose.files(config.base()) == {}
    own.write_text(own.read_text().replace("-advantage * logp", "-2 * advantage * logp"))
    assert choose.files(c) != hashed and objectives.named(name) != before
    assert evaluate(name, "batch_tokens")[0] == pytest.approx(2 * REINFORCE, rel=1e-6)
    saved = {"config": schema.leaves(c), "data": "d", "versions": {}}
    inputs = {"data": "d", "reward": "", **choose.files(c)}
    assert resume.check(saved | choose.files(c), c, inputs, False, print)
    with pytest.raises(config.ConfigError, match=r"file of config\.loss\.objective: it has other"):
        resume.check(saved | hashed, c, inputs, False, print)


def test_warnings_of_what_works_and_is_not_the_paper_s():
    c = config.base()
    assert validation.warnings(c) == []
    c.loss.objective = "gspo"
    assert "'sequence'" in validation.warnings(c)[0]
    c.loss.objective, c.loss.importance = "cispo", "icepop"
    assert "clip_low=1" in validation.warnings(c)[0]


def test_the_paper_s_program_knows_nothing_of_the_others():
    """`Trainer`'s default choice, of which the update compiles what it did before there was one."""
    for preset in (config.base, config.paper, config.verl, config.grpo):
        assert objectives.choice(preset().loss) == objective.DAPO
    weighted = objective.DAPO._replace(importance=objective.importance_weight)
    assert objectives.choice(changed(loss__importance_cap=2.0).loss) == weighted


@pytest.mark.parametrize("name", presets.RECIPES)
def test_recipes_are_valid_on_the_quickstart_and_at_their_own_size(name):
    for c in (presets.RECIPES[name](config.base()), presets.RECIPES[name](config.paper())):
        c.model.path = "some/model"
        config.validate(c, 1)
        assert validation.warnings(c) == []
    if name != "grpo":
        config.validate(presets.RECIPES[name](), 1)
