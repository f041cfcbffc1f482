"""The presets' updates, step for step against a NumPy re-play of a recorded batch.

The model is a table of logits, one row a token, in place of the network: everything else is what
`train` runs (rewards, advantages, mini-batches, packing, old log-probs, loss, AdamW, schedule).
The re-play is written from the equations, in float64, one response at a time.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dapo_jax import algorithm, config, parallel
from dapo_jax.config import presets as recipes
from dapo_jax.dapo import packing, update
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.state import State
from dapo_jax.log import metrics
from dapo_jax.model import learner, qwen2
from dapo_jax.model.head import HeadStats
from dapo_jax.rollout.engine import UNWATCHED, Response

V, LONGEST, BUFFER, STEPS = 7, 8, 4, 3
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
# Four groups of four: prompt, then each response with its verdict. Recorded once, by hand.
RECORD = [
    ([1, 2], [([3, 0], 1), ([4, 4, 0], 0), ([5, 6, 3, 3, 0], 0), ([2, 2, 2, 2, 2, 2, 2, 2], 0)]),
    ([6], [([1, 5, 0], 1), ([1, 0], 1), ([3, 4, 5, 6, 1, 2, 0], 1), ([0], 0)]),
    ([3, 3, 4], [([6, 6, 6, 0], 0), ([2, 0], 1), ([5, 1, 0], 0), ([4, 2, 4, 2, 4, 0], 1)]),
    ([5], [([5, 5, 5, 5, 5, 5, 5, 1], 1), ([1, 2, 3, 4, 0], 0), ([6, 0], 0), ([2, 1, 0], 0)]),
]


def presets():
    """Learning rates and temperature such that float32 shows every step, and ratios get clipped."""
    rates = {"paper": 4.0, "verl": 2.0, "grpo": 0.4, "grpo with KL": 0.4, "grpo as Dr. GRPO": 0.4}
    for name, lr in rates.items():
        c = getattr(config, name.split()[0])()
        if name == "grpo as Dr. GRPO":
            recipes.dr_grpo(c)
        c.optim.lr = lr
        c.rollout.temperature = 0.8
        c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 4, 2
        c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = LONGEST, BUFFER
        c.data.max_prompt_tokens, c.optim.micro_batch_rows = 8, 2
        c.model.dtype, c.loss.chunk_sequences = "float32", 3
        c.loss.kl_coef = 0.2 * (name == "grpo with KL")
        yield pytest.param(c, name.split()[0], id=name)


def log_softmax(row):
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def log_probs(table, prompt, tokens, temperature):
    before = [*prompt, *tokens][len(prompt) - 1 : -1]
    rows = zip(before, tokens, strict=True)
    return np.array([log_softmax(table[b] / temperature)[t] for b, t in rows])


def reward_of(tokens, correct, preset):
    r = 1.0 if correct else -1.0
    if preset != "grpo" and len(tokens) > LONGEST - BUFFER:  # Eq. 13
        r += ((LONGEST - BUFFER) - len(tokens)) / BUFFER
    return r


def advantages(responses, c, preset):
    r = np.array([reward_of(tokens, correct, preset) for tokens, correct in responses])
    divisor = r.std(ddof=1) + 1e-6 if c.advantage.scale == "group" else 1.0
    return (r - r.mean()) / divisor


def weights(lengths, c, preset):
    """What one token of each response weighs."""
    if c.loss.normalizer == "constant":  # Dr. GRPO: mean over responses of their sums over L_max
        return [1 / len(lengths) / LONGEST] * len(lengths)
    if preset == "paper":  # mean over the mini-batch's tokens
        return [1 / sum(lengths)] * len(lengths)
    if preset == "grpo":  # mean over responses of their token means
        return [1 / len(lengths) / n for n in lengths]
    out = []  # verl: token means of chunks of three responses, weighted by their responses
    for i in range(0, len(lengths), 3):
        chunk = lengths[i : i + 3]
        out += [len(chunk) / len(lengths) / sum(chunk)] * len(chunk)
    return out


def gradient(table, reference, minibatch, c, preset, seen):
    """d loss / d table. minibatch: (prompt, tokens, advantage, old log-probs) of each response."""
    T = c.rollout.temperature
    low, high = 0.2, 0.2 if preset == "grpo" else 0.28
    grad = np.zeros_like(table)
    lengths = [len(tokens) for _, tokens, _, _ in minibatch]
    for weight, (prompt, tokens, A, old) in zip(
        weights(lengths, c, preset), minibatch, strict=True
    ):
        new, ref = (log_probs(t, prompt, tokens, T) for t in (table, reference))
        path = [*prompt, *tokens]
        for i, token in enumerate(tokens):
            ratio = np.exp(new[i] - old[i])
            held = (A > 0 and ratio > 1 + high) or (A < 0 and ratio < 1 - low)
            held |= preset == "verl" and A < 0 and ratio > 10  # dual clip
            seen["held"] += held
            bounds = np.array([1 - low, 1 + high, 10])
            seen["margin"] = min(seen["margin"], np.abs(ratio - bounds).min())
            slope = 0.0 if held else -A * ratio  # d loss / d log-prob of this token
            slope += c.loss.kl_coef * (1 - np.exp(ref[i] - new[i]))  # of r - 1 - log r
            row = path[len(prompt) - 1 + i]
            p = np.exp(log_softmax(table[row] / T))
            grad[row] += weight * slope * (np.eye(V)[token] - p) / T
    return grad


def adamw(table, m, v, count, grad, lr, b2, decay):
    norm = np.sqrt((grad**2).sum())
    grad = grad / max(norm, 1.0)  # clip at 1
    m, v = 0.9 * m + 0.1 * grad, b2 * v + (1 - b2) * grad**2
    step = (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - b2**count)) + 1e-8)
    return table - lr * (step + decay * table), m, v, norm


def learning_rate(step, preset, peak):
    done = dict(verl=step / 10, paper=(step + 1) / 20, grpo=(step + 1) / 2)
    return peak * min(done[preset], 1)


def replay(c, preset, order):
    """(table, m, v, mean gradient norm) after each rollout step; order: (step) -> groups' order."""
    table, m, v, count = TABLE.astype(np.float64), np.zeros((V, V)), np.zeros((V, V)), 0
    seen, after = dict(held=0, margin=1.0), []
    T, b2 = c.rollout.temperature, 0.95 if preset == "grpo" else 0.999
    decay = 0.1 if preset == "verl" else 0.0
    for step in range(STEPS):
        everything, norms = [], []
        for prompt, responses in RECORD:
            pairs = zip(responses, advantages(responses, c, preset), strict=True)
            rows = [(prompt, t, A, log_probs(table, prompt, t, T)) for (t, _), A in pairs]
            everything.append(rows)
        for part in np.split(np.asarray(order(step)), 2):
            minibatch = [entry for g in part for entry in everything[g]]
            grad = gradient(table, TABLE.astype(np.float64), minibatch, c, preset, seen)
            count += 1
            lr = learning_rate(step, preset, c.optim.lr)
            table, m, v, norm = adamw(table, m, v, count, grad, lr, b2, decay)
            norms.append(norm)
        after.append((table, m, v, np.mean(norms)))
    return after, seen


def table_stats(shape, params, rows, temperature, kernel):
    """`update.row_stats` of a table in place of the network."""
    logp = jax.nn.log_softmax(params["table"][rows.tokens_AxRxT] / temperature)
    taken = jnp.take_along_axis(logp, rows.targets_AxRxT[..., None], -1)[..., 0]
    return HeadStats(taken, -(jnp.exp(logp) * logp).sum(-1))


def recorded_group(position, prompt, responses) -> Group:
    def response(tokens):
        nothing = np.zeros(len(tokens), np.float32)
        truncated = len(tokens) == LONGEST and tokens[-1] != 0
        return Response(np.array(tokens, np.int32), nothing, nothing, truncated)

    right = np.array([right for _, right in responses], bool)
    grades = Grades(np.where(right, 1.0, -1.0), right)
    return Group(position, prompt, [response(tokens) for tokens, _ in responses], grades)


@pytest.mark.parametrize(("c", "preset"), list(presets()))
def test_updates_are_those_of_the_equations(c, preset, monkeypatch):
    monkeypatch.setattr(update, "row_stats", table_stats)
    abstract = dict(table=jax.ShapeDtypeStruct((V, V), np.float32))
    monkeypatch.setattr(qwen2, "abstract", lambda _: abstract)
    monkeypatch.setattr(qwen2, "metadata", lambda *_: dict(table=("vocab", None)))
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), parallel.AXES)
    o = c.optim
    tx = learner.optimizer(o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm)
    shape = SimpleNamespace(shared_prompts=False, float32_head=False, vocab_size=V, lora=None)
    setup = learner.Setup(mesh, c.sharding.train.to_dict(), tx, c.model.dtype)
    trainer = update.Trainer(shape, setup)
    layout = packing.Layout(config.row_tokens(c), c.optim.micro_batch_rows, 8)
    machine = SimpleNamespace(trainer=trainer, layout=layout, watch=UNWATCHED)
    method = algorithm.dapo(c)
    put = lambda: parallel.to_device(dict(table=TABLE), trainer.param_shardings)
    params = put()
    reference = put() if c.loss.kl_coef else None
    state = State(params, trainer.init_opt_state(params), reference)

    order = lambda step: np.random.default_rng([c.seed, step]).permutation(4)
    expected, seen = replay(c, preset, order)
    assert seen["held"] and seen["margin"] > 1e-4  # clipped somewhere, undecided nowhere
    for step, (table, m, v, norm) in enumerate(expected):
        groups = [recorded_group(i, *row) for i, row in enumerate(RECORD)]
        items = algorithm.make_minibatches(method, groups, step)
        knobs = algorithm.update_knobs(method, step)
        state, logs, _ = method.learn(method, machine, state, items, knobs)
        state, log = state.count(step=step + 1), metrics.update_metrics(logs, False)
        adam = next(s for s in state.opt_state if hasattr(s, "mu"))
        assert knobs.lr == np.float32(learning_rate(step, preset, c.optim.lr))
        np.testing.assert_allclose(log["optim/grad_norm"], norm, rtol=2e-5)
        np.testing.assert_allclose(adam.mu["table"], m, atol=2e-6)
        np.testing.assert_allclose(adam.nu["table"], v, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(state.params["table"], table, atol=3e-5)
    assert np.abs(expected[-1][0] - TABLE).max() > 0.1
