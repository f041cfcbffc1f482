"""VAPO's losses: the value model's by golden numbers, made in float64 by formulas written out, and
the language-model loss on right responses. GAE: test_vapo.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import algorithm, config
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.rollout.engine import Response
from dapo_jax.variants import choose, positive_lm
from dapo_jax.variants.vapo import critic

# --- The value model's loss ----------------------------------------------------------------------

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


# --- The language-model loss on right responses --------------------------------------------------

MU = 0.1


def test_a_score_alone_is_refused():
    def weights(*grades):
        group = Group(0, [1], (), Grades(*grades))
        return positive_lm.weights(MU, [group], np.array([[4, 2]]))

    score_G = np.array([0.2, -0.9])
    with pytest.raises(config.ConfigError, match=re.escape("config.loss.positive_coef: 0.1 needs")):
        weights(score_G)
    # The judge's verdict, whatever the score.
    assert (weights(score_G, np.array([False, True])) > 0).tolist() == [[False, True]]
    assert not weights(score_G, np.zeros(2, bool)).any()  # no right response: no loss


def test_minibatches_carry_the_verdicts():
    """The judge gives them, not the shaped reward; the shuffle keeps them with their responses."""
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
