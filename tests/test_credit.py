"""The mechanism experiments with a value model: values by position against least squares by hand, a
reward model that is trained where it reads the last token alone, runs of the real loop at a small
size, and the reward's share at the first token, which GAE itself is asked for."""

import jax
import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.dapo import packing
from dapo_jax.lab.experiments import bases, credit, mechanisms, pool
from dapo_jax.lab.experiments.techniques import length_adaptive, value_pretraining
from dapo_jax.variants.vapo import gae


def test_by_position_by_hand():
    values = [np.zeros(2), np.array([0.5, 0.5, 0.5, 0.5])]
    returns = [np.ones(2), -np.ones(4)]
    advantages = [np.array([0.0, 1.0]), np.array([0.0, 1.0, 2.0, 3.0])]
    told = credit.by_position(values, returns, advantages)
    assert told["slope"] == pytest.approx(10)
    # Positions 0 0 1 1 2 3: the first third ends with 0, the second with 1.
    assert told["first"] == {"explained": 1 - 1.5625, "error": 0.25, "advantage": 0.0}
    assert told["middle"]["advantage"] == 1 and told["last"]["advantage"] == 2.5
    assert told["last"]["error"] == 1.5


@pytest.mark.parametrize("length", [1, 3, 31])
@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_the_reward_s_share_at_the_first_token_is_gae_s(length, alpha):
    """With values of 0 it is lambda^(l - 1): what the mechanism is about, in closed form."""
    lam = gae.length_adaptive_lambda(length, alpha) if alpha else 0.95
    reward = np.zeros((1, length), np.float32)
    reward[0, -1] = 1.0
    cells = np.ones((1, length), bool), np.ones((1, length), np.int32)
    got = gae.gae(np.zeros((1, length), np.float32), reward, *cells, 1.0, lam)
    np.testing.assert_allclose(
        got[0, 0], length_adaptive.reward_share(length, alpha), rtol=1e-5, atol=1e-9
    )
    if length > 1:  # one lambda for all forgets with length, the other does not
        assert float(got[0, 0]) == pytest.approx(
            {(3, 0.0): 0.9025, (31, 0.0): 0.2146, (3, 1.5): 0.6049, (31, 1.5): 0.5209}[
                (length, alpha)
            ],
            abs=1e-4,
        )


def test_arms_differ_in_one_switch(tmp_path):
    def fields(arms, name):
        return config.leaves(credit.settings(tmp_path, 0, arms[name]))

    def differ(arms, a, b):
        a, b = fields(arms, a), fields(arms, b)
        return {k for k in a if a[k] != b[k]}

    values, lambdas = value_pretraining.ARMS, length_adaptive.ARMS
    longer = {"critic.pretrain_steps", "steps"}  # as many steps of the policy
    assert differ(values, "reward_model", "reward_model_pretrained") == longer
    assert differ(values, "reward_model", "fixed") == {"critic.init_from"}
    for after, before in length_adaptive.PAIRS.values():
        assert differ(lambdas, after, before) == {"critic.length_alpha"}
    for arms in (values, lambdas):
        for name in arms:
            c = credit.settings(tmp_path, 0, arms[name])
            config.validate(c, 1)
            assert c.steps - c.critic.pretrain_steps == credit.STEPS


def test_a_reward_model_reads_the_last_token_and_nothing_else():
    item = packing.Item([5, 6, 7], np.array([8, 9]), np.zeros(2, "f"), -1.0, 0.1)
    rows, _, (place,) = packing.pack(credit.at_end([item]), row_tokens=6, micro_rows=1, max_items=1)
    (trained,) = np.argwhere(rows.trained_AxRxT[0, 0])
    assert trained == [4] and rows.tokens_AxRxT[0, 0, 4] == 9 and place.cells == slice(4, 5)
    assert rows.tokens_AxRxT[0, 0].tolist() == [5, 6, 7, 8, 9, 0]
    assert rows.advantage_AxRxT[0, 0, 4] == -1 and rows.weight_AxRxT.sum() == 1


@pytest.mark.slow
def test_end_to_end(tmp_path, monkeypatch):
    """Both experiments, tiny, in this process: a base, its reward model, arms, report. What is
    looked at before the policy's first update is what that update's own step draws."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    tiny = {name: habit._replace(steps=60) for name, habit in bases.HABITS.items()}
    monkeypatch.setattr(bases, "HABITS", tiny)
    monkeypatch.setattr(bases, "TEST_PROBLEMS", 4)
    monkeypatch.setattr(credit, "REWARD_MODEL_ROLLOUTS", 3)
    whole, by_position = credit.settings, credit.by_position

    def short(*arguments):
        c = whole(*arguments)
        c.critic.pretrain_steps = min(c.critic.pretrain_steps, 2)
        c.steps, c.rollout.groups = credit.STEPS + c.critic.pretrain_steps, 8
        c.rollout.max_response_tokens = c.eval.max_response_tokens = 16
        return c

    def look(values, returns, advantages):
        told = by_position(values, returns, advantages)
        return told | {"length": float(np.mean([len(v) for v in values]))}

    monkeypatch.setattr(credit, "STEPS", 4)
    monkeypatch.setattr(credit, "settings", short)
    monkeypatch.setattr(credit, "by_position", look)
    names = "value_pretraining,length_adaptive"
    argv = [f"--out={tmp_path}", "--seeds=2", "--jobs=1", f"--only={names}"]
    mechanisms.main(argv)
    text = (tmp_path / "mechanisms.md").read_text()
    assert "## Value pre-training: " in text and "## Length-adaptive GAE: " in text
    made = [t for t in mechanisms.tasks(names.split(","), {0: 0, 1: 1}) if t.work is credit.play]
    runs = [r for t in made for r in pool._read(tmp_path, t)["runs"].values()]
    assert len(runs) == 12
    for run in runs:
        assert run["before"]["length"] == run["series"]["response/length_mean"][0]
    plain = [pool._read(tmp_path, t)["runs"] for t in made if t.folder.startswith("credit_fixed_0")]
    for run in (r for of in plain for r in of.values()):  # from a head of zeros
        assert run["before"]["first"]["explained"] == 0
    monkeypatch.setattr(pool, "_work", None)  # nothing is made again
    mechanisms.main(argv)
