"""VAPO's formulas: golden numbers, made in float64 by formulas written out, and oracles in NumPy
that go token by token; and the language-model loss on right responses in the policy's update."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dapo_jax import algorithm, config
from dapo_jax.dapo import packing
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.rollout.engine import Response
from dapo_jax.variants import choose, positive_lm
from dapo_jax.variants.vapo import critic, gae

# Two responses of 5 and 3 tokens, rewards 1 and -1.
LENGTHS, REWARD = (5, 3), (1.0, -1.0)
VALUES = [0.2, 0.4, 0.1, 0.5, 0.7, 0.3, -0.2, -0.6]
TD = [0.2, -0.3, 0.4, 0.2, 0.3, -0.5, -0.4, -0.4]
ADAPTIVE = [0.24608, 0.0768, 0.628, 0.38, 0.3, -0.6777777777777778, -0.5333333333333333, -0.4]
PLAIN = [0.691826875, 0.5177125, 0.86075, 0.485, 0.3, -1.241, -0.78, -0.4]
GOLDEN_GAE = {  # gamma, lambda of each response, (its reward, value behind its end), advantages
    "lambda 1": (1.0, (1.0, 1.0), (1.0, 0.0), [0.8, 0.6, 0.9, 0.5, 0.3, -1.3, -0.8, -0.4]),
    "lambda .95": (1.0, (0.95, 0.95), (1.0, 0.0), PLAIN),
    "lambda 0": (1.0, (0.0, 0.0), (1.0, 0.0), TD),
    "alpha .5": (1.0, (0.6, 1 / 3), (1.0, 0.0), ADAPTIVE),
    "alpha .05": (1.0, (0.0, 0.0), (1.0, 0.0), TD),
    "gamma .99": (
        0.99, (0.95, 0.95), (1.0, 0.0),
        [0.6575849852001436, 0.4907867979, 0.841878575, 0.47515, 0.3, -1.2223731, -0.7702, -0.4],
    ),
    # Without a reward and with the last value carried on, the last delta is 0.
    "truncated": (
        1.0, (0.95, 0.95), (0.0, 0.7), [0.447475, 0.2605, 0.59, 0.2, 0.0, -1.241, -0.78, -0.4],
    ),
}  # fmt: skip


class Rows:
    """Per-token values of responses in packed cells: prompts before them, padding behind."""

    def __init__(self, layout, shape):
        """layout: of each response (row, segment, its cells, in the order of its tokens)."""
        self.layout, self.shape = layout, shape
        self.trained, self.segments = np.zeros(shape, bool), np.zeros(shape, np.int32)
        for row, segment, cells in layout:
            self.segments[row, min(cells) - 1 : max(cells) + 1] = segment
            self.trained[row, cells] = True

    def put(self, per_response, fill=7.0):
        """Values of the tokens into their cells; what nothing may read elsewhere."""
        out = np.full(self.shape, fill, np.float32)
        for (row, _, cells), values in zip(self.layout, per_response, strict=True):
            out[row, cells] = values
        return out

    def take(self, cells_RxT):
        return [np.asarray(cells_RxT)[row, cells] for row, _, cells in self.layout]

    def gae(self, values, rewards, gamma, lam, last, fn=gae.gae):
        at_end = [[0.0] * (len(v) - 1) + [r] for v, r in zip(values, rewards, strict=True)]
        each = lambda xs: self.put([[x] * len(v) for x, v in zip(xs, values, strict=True)])
        out = fn(
            self.put(values), self.put(at_end), self.trained, self.segments, gamma,
            each(lam), each(last),
        )  # fmt: skip
        assert out.dtype == jnp.float32 and not np.asarray(out)[~self.trained].any()
        return self.take(out)


# The second response behind the first, in a row of its own, with masked tokens within, and beside
# prompts of other lengths.
LAYOUTS = {
    "one row": Rows([(0, 1, np.r_[2:7]), (0, 2, np.r_[9:12])], (1, 14)),
    "other order": Rows([(0, 2, np.r_[6:11]), (0, 1, np.r_[1:4])], (2, 11)),
    "own rows": Rows([(1, 1, np.r_[1:6]), (0, 1, np.r_[9:12])], (2, 12)),
    "masked tokens": Rows([(0, 1, np.r_[2, 3, 5, 6, 9]), (0, 2, np.r_[11, 13, 14])], (1, 16)),
    "same number, padding between": Rows([(0, 1, np.r_[2:7]), (1, 1, np.r_[1:4])], (2, 7)),
}


def split(flat):
    return np.split(np.array(flat), np.cumsum(LENGTHS)[:-1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GOLDEN_GAE)
def test_golden_advantages_in_every_layout(case, layout):
    gamma, lam, (reward, last), want = GOLDEN_GAE[case]
    got = LAYOUTS[layout].gae(split(VALUES), (reward, REWARD[1]), gamma, lam, (last, 0.0))
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-6, atol=1e-7)


def test_golden_returns():
    """Lambda 1 and gamma 1: each token's target is the reward. Else it leans on the values."""
    coupled = [0.891826875, 0.9177125, 0.96075, 0.985, 1.0, -0.941, -0.98, -1.0]
    for lam, want in ((1.0, np.repeat(REWARD, LENGTHS)), (0.95, coupled)):
        got = LAYOUTS["one row"].gae(split(VALUES), REWARD, 1.0, (lam, lam), (0, 0), gae.returns)
        np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-6)


def oracle(values, reward, gamma, lam, last):
    """Each advantage as its sum of discounted deltas, float64."""
    values = np.array(values, np.float64)
    rewards = np.r_[np.zeros(len(values) - 1), reward]
    delta = rewards + gamma * np.r_[values[1:], last] - values
    n = len(values)
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


number = st.floats(-2, 2, width=32)
share = st.floats(0, 1, width=32)
response = st.tuples(st.lists(number, min_size=1, max_size=9), number, share, number)


@settings(max_examples=60, deadline=None)
@given(st.lists(response, min_size=1, max_size=5), share, st.randoms(use_true_random=False))
def test_any_rows_are_the_sums_of_discounted_deltas(responses, gamma, random):
    """Random responses in random places of [3, 60] cells, against float64."""
    free, layout, numbers = [0, 0, 0], [], [0, 0, 0]
    for values, *_ in responses:
        row = random.randrange(3)
        span = range(free[row] + random.randint(1, 3), 60)
        cells = sorted(random.sample(span[: len(values) + 2], len(values)))
        numbers[row] += 1
        layout.append((row, numbers[row], np.array(cells)))
        free[row] = cells[-1] + 1
    values, rewards, lam, last = zip(*responses, strict=True)
    got = Rows(layout, (3, 60)).gae(values, rewards, gamma, lam, last)
    for mine, (v, r, x, after) in zip(got, responses, strict=True):
        np.testing.assert_allclose(mine, oracle(v, r, gamma, x, after), rtol=2e-5, atol=2e-5)


def test_micro_batches_are_rows():
    rows = LAYOUTS["own rows"]
    args = rows.put(split(VALUES)), rows.put(split(VALUES)), rows.trained, rows.segments
    whole = gae.gae(*args, 0.9, 0.5)
    np.testing.assert_array_equal(gae.gae(*(x[:, None] for x in args), 0.9, 0.5)[:, 0], whole)


@pytest.mark.parametrize(
    ("alpha", "want"),
    [
        (0.05, [0, 0, 0, 0.04761904761904767, 0.8, 0.98, 0.9990234375]),
        (0.4, [0, 0.75, 0.875, 0.8809523809523809, 0.975, 0.9975, 0.9998779296875]),
        (1.5, [1 / 3, 14 / 15, 29 / 30, 0.9682539682539683, 149 / 150, 0.9993333333333333,
               0.9999674479166667]),
    ],
)  # fmt: skip
def test_golden_length_adaptive_lambda(alpha, want):
    got = gae.length_adaptive_lambda(np.array([1, 10, 20, 21, 100, 1000, 20480]), alpha)
    np.testing.assert_allclose(got, want, rtol=3e-7, atol=1e-7)
    assert float(gae.length_adaptive_lambda(0, alpha)) == 0  # no division by zero


# --- The value model's loss ----------------------------------------------------------------------

NEW_VALUES = jnp.array([0.9, 0.35, -0.5, 0.5, 1.4, -0.5, -0.25, -0.9])
RETURNS = jnp.array([1.0] * 5 + [-1.0] * 3)


@pytest.mark.parametrize(
    ("clip", "mean", "share"),
    [(np.inf, 0.2446875, 0.0), (0.2, 0.3284375, 0.375), (0.5, 0.2740625, 0.25)],
)
def test_golden_value_loss(clip, mean, share):
    old = jnp.array(VALUES)
    out = critic.value_loss(NEW_VALUES, old, RETURNS, clip)
    assert float(out.loss.mean()) == pytest.approx(mean, rel=1e-6)
    assert float(out.clipped.mean()) == share
    # A token whose bound was the larger gives no gradient; the others V - R.
    total = lambda v: critic.value_loss(v, old, RETURNS, clip).loss.sum()
    want = np.where(out.clipped, 0.0, NEW_VALUES - RETURNS)
    np.testing.assert_allclose(jax.grad(total)(NEW_VALUES), want, rtol=1e-6)


# --- The language-model loss on right responses --------------------------------------------------

MU, RIGHT = 0.1, (True, False, True, False)
LOGP = [[-0.5, -1.2, -0.1, -2.0], [-0.7, -0.3], [-1.0, -0.4, -0.9], [-0.6]]


def judged(logp, right) -> Group:
    """One problem's responses, and what the judge says."""
    responses = [Response(np.full(len(x), 3), np.float32(x), np.zeros(len(x)), False) for x in logp]
    return Group(0, [1, 2], responses, Grades(np.zeros(len(logp)), np.array(right, bool)))


def term_weights(groups, trained=None):
    tokens_MxG = np.array([[len(r.tokens) for r in g.responses] for g in groups])
    return positive_lm.weights(MU, groups, tokens_MxG if trained is None else tokens_MxG * trained)


@pytest.mark.parametrize("layout", [(8, 1), (16, 2), (24, 4)])
def test_golden_positive_loss(layout):
    """mu NLL, .1 x .871..., in every packing; a filtered response counts in no divisor."""
    group = judged([*LOGP, [-9.0]], [*RIGHT, True])
    (weight_G,) = term_weights([group], trained=np.array([1, 1, 1, 1, 0]))
    items = [
        packing.Item([1, 2], r.tokens, r.logps, 0.5, 0.1 * (n < 4), False, (w,))
        for n, (r, w) in enumerate(zip(group.responses, weight_G, strict=True))
    ]
    row_tokens, micro_rows = layout
    rows, _, places = packing.pack(
        items, packing.Layout(row_tokens=row_tokens, micro_rows=micro_rows, max_items=4)
    )
    weight = packing.spread(weight_G, places, rows.tokens_AxRxT.shape)
    assert weight.dtype == np.float32 and not weight[~rows.trained_AxRxT].any()
    assert -(weight * rows.sampled_logp_AxRxT).sum() == pytest.approx(MU * 0.8714285714285713)
    for span, right in zip(places, RIGHT, strict=False):  # the gradient by log-probs
        here = weight[span.micro, span.row, span.cells]
        np.testing.assert_allclose(here, 0.014285714285714287 * right, rtol=1e-6)


def test_a_score_alone_is_refused():
    scored = judged(LOGP[:2], [0, 1])._replace(grades=Grades(score_G=np.array([0.2, 0.9])))
    with pytest.raises(config.ConfigError, match=re.escape("config.loss.positive_coef: 0.1 needs")):
        term_weights([scored])
    # The judge's verdict, whatever the score.
    graded = Grades(score_G=np.array([0.2, -0.9]), right_G=np.array([False, True]))
    weight = term_weights([scored._replace(grades=graded)])
    assert (weight > 0).tolist() == [[False, True]]
    assert not term_weights([judged(LOGP, [False] * 4)]).any()  # no right response: no loss


def test_minibatches_carry_the_verdicts():
    """Of the judge, not of the shaped reward, through the shuffle into each mini-batch."""
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
        right = [len(i.response) in (1, 3, 5, 8) for i in items]
        assert [i.term_weights[0] > 0 for i in items] == right
        rows, _, places = packing.pack(items, packing.Layout(16, 2, 4))
        weights = [i.term_weights[0] for i in items]
        weight = packing.spread(weights, places, rows.tokens_AxRxT.shape)
        at = np.isin(rows.targets_AxRxT, (1, 3, 5, 8)) & rows.trained_AxRxT
        assert at.sum() > 0 and set(weight[at]) == {np.float32(MU / at.sum())}
        assert not weight[~at].any()
