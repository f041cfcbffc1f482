"""The bandit: its base, its curves, and (slow) two rollouts of the real loop."""

import jax
import numpy as np
import pytest
from test_qwen2 import mesh_of

from dapo_jax import build
from dapo_jax.lab.experiments import bandit
from dapo_jax.model import qwen2
from dapo_jax.rollout.draw import Draw


@pytest.fixture(scope="module")
def machine():
    c = bandit.settings()
    return c, build.assemble(c, mesh_of((1, 1, 1)), qwen2.shape_from_config(c), {bandit.STOP})


def test_the_base_is_taught_what_prompts_share_in_the_rare_token_alone():
    p_PxV = np.zeros((64, 48))
    for item in bandit.taught(3):
        p_PxV[bandit.prompts().index(item.prompt), item.response[0]] += 64 * item.weight
    np.testing.assert_allclose(p_PxV.sum(1), 1)
    np.testing.assert_allclose(p_PxV[:, bandit.RARE], bandit.RARE_START)
    assert not p_PxV[:, : bandit.RARE].any()  # neither a stop token nor a prompt's
    assert len({tuple(np.flatnonzero(row)) for row in p_PxV}) > 60  # wrong answers differ


def test_probabilities_are_those_the_trainer_scores(machine):
    c, m = machine
    params = build.initial_params(c, m)
    p_PxV = np.asarray(bandit.exact(m)(params))
    np.testing.assert_allclose(p_PxV.sum(1), 1, rtol=1e-5)
    weights, asked = m.engine.decode_params(params), list(enumerate(bandit.prompts()))
    groups, _ = m.sample_groups(weights, asked, 16, Draw(seed=0, max_tokens=1))
    for p_V, group in zip(p_PxV, groups, strict=True):
        for r in group.responses:
            np.testing.assert_allclose(np.exp(r.logps[0]), p_V[r.tokens[0]], rtol=1e-4)


def test_rollouts_to_a_half_are_read_off_straight_lines():
    assert bandit.crossing([0.6, 0.7]) == 0
    assert bandit.crossing([0.1, 0.2, 0.3]) == 2  # never: a lower bound
    assert bandit.crossing([0.1, 0.3, 0.7, 0.9]) == pytest.approx(1.5)


@pytest.mark.slow
def test_a_rare_shared_move_grows(machine):
    c, m = machine
    params = jax.tree.map(lambda w: w.copy(), build.initial_params(c, m))
    rare = bandit.learn(c, m, params, rollouts=2)
    assert len(rare) == 3 and rare[0] < rare[-1]
