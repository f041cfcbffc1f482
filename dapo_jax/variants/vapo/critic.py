"""The value model: the policy's body with one number a token, and an optimizer of its own.

V at the cell that reads token t is the value of the state in which token t + 1 is chosen. VAPO
(arXiv 2504.05118, section 4.1) starts it from a reward model; VC-PPO (2503.01491) found why that
alone fails. `critic.init_from` names a reward or language model; '' takes the policy's weights.

Dims: A micro-batches, R rows, T cells, D hidden.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo import update
from dapo_jax.dapo.packing import PackedBatch
from dapo_jax.model import hf, hf_format, ops, qwen2, rope
from dapo_jax.model.learner import Learner, Setup
from dapo_jax.parallel import Call
from dapo_jax.variants.vapo import gae


class Batch(NamedTuple):
    """What one update of the value model trains on, on the devices."""

    rows: PackedBatch
    old_values_AxRxT: jax.Array  # float32, before the step's first update
    returns_AxRxT: jax.Array  # float32, the targets
    micro_batches: jax.Array | None  # int32, how many of the A hold something


class Knobs(NamedTuple):
    """Numbers of an update; traced, so that changing one compiles nothing."""

    lr: np.float32
    clip: np.float32  # how far a value may move from the old one and still learn; inf = any


class Horizon(NamedTuple):
    """Numbers of GAE; traced."""

    gamma: np.float32
    lambda_value: np.float32
    lambda_policy: np.float32
    alpha: np.float32  # of the length-adaptive lambda; 0 = lambda_policy whatever the length
    short: np.float32  # TOKENS: a response of at most so many is in the first third by length
    long: np.float32  # and one of more than so many in the last


class Estimates(NamedTuple):
    """Advantages and returns by GAE."""

    advantage_AxRxT: jax.Array  # float32, of the policy's lambda
    returns_AxRxT: jax.Array  # float32, of the value model's lambda
    # Over trained cells: float32 [4] each, of all and of the thirds by length (short, middle, long)
    sums: dict[str, jax.Array]


def values(shape: qwen2.Shape, params, rows: PackedBatch) -> jax.Array:
    """float32 [R, T] of one micro-batch (fields of `rows` are [R, T] here)."""
    model = qwen2.bind(shape, params)
    x_RxTxD = model.hidden(rows.tokens_AxRxT, rows.positions_AxRxT, rows.segments_AxRxT)
    return ops.logits(x_RxTxD, model.head())[..., 0]


def value_loss(values, old_values, returns, clip) -> tuple[jax.Array, jax.Array]:
    """(.5 max((V - R)^2, (V_clipped - R)^2), whether the bound cut this token's gradient), with
    V_clipped within `clip` of the old value, as PPO's reference has it (VAPO does not say); arrays
    of the shape of the inputs. clip: in the reward's unit; inf = no bound."""
    square = jnp.square(values - returns)
    bounded = jnp.clip(values, old_values - clip, old_values + clip)
    clipped_square = jnp.square(bounded - returns)
    return 0.5 * jnp.maximum(square, clipped_square), clipped_square > square


def critic_loss(shape: qwen2.Shape, kernel, params, batch: Batch, knobs: Knobs):
    """sum(weight * value loss) of a micro-batch, with the policy's weights."""
    rows = batch.rows
    within = lambda x: jnp.where(rows.trained_AxRxT, x, 0.0)
    values_RxT = within(values(shape, params, rows))
    old_RxT, returns_RxT = within(batch.old_values_AxRxT), within(batch.returns_AxRxT)
    loss_RxT, clipped_RxT = value_loss(values_RxT, old_RxT, returns_RxT, knobs.clip)
    count = lambda x: jnp.sum(within(x))
    sums = dict(tokens=count(1.0), value_loss=count(loss_RxT), clipped=count(clipped_RxT))
    return jnp.sum(rows.weight_AxRxT * loss_RxT), (sums, {})


class Critic(Learner):
    """The value model's learner. `update` takes `Batch` and `Knobs` of this module. `shape` has a
    value head and no adapters."""

    def __init__(self, shape: qwen2.Shape, setup: Setup):
        super().__init__(shape, setup, functools.partial(critic_loss, shape))
        cells = self.row_sharding
        # (params, rows, micro_batches) -> float32 [A, R, T]
        self.values = jax.jit(self._values, out_shardings=cells)
        # (rows, values, Horizon) -> Estimates; rows.advantage_AxRxT is the reward of its response
        estimates = Estimates(cells, cells, self._everywhere)
        self.estimate = jax.jit(self._estimate, out_shardings=estimates)
        # (parameters of a model with or without a value head) -> params: a copy, its new head zero
        self.of_model = jax.jit(self._of_model, out_shardings=self.param_shardings)

    def _values(self, params, rows: PackedBatch, micro_batches) -> jax.Array:
        numbers = lambda params, micro: values(self.shape, params, micro)
        return self.per_cell(numbers, params, rows, micro_batches)

    def _estimate(self, rows: PackedBatch, values_AxRxT, h: Horizon) -> Estimates:
        with parallel.mesh_scope(self.mesh, self.rules):
            length = jax.vmap(lambda r: update.per_response(r).sum(r.trained_AxRxT))(rows)
        trained, segments = rows.trained_AxRxT, rows.segments_AxRxT
        # The reward comes with the last token of a response. One that was cut and goes on has a
        # cell more, whose value follows that token instead.
        next_cell = lambda x: jnp.pad(x[..., 1:], ((0, 0), (0, 0), (0, 1)))
        ends = segments != next_cell(segments)
        reward = jnp.where(trained & ends, rows.advantage_AxRxT, 0.0)
        last = jnp.where(ends | next_cell(trained), 0.0, next_cell(values_AxRxT))
        lam = jnp.where(h.alpha > 0, gae.length_adaptive_lambda(length, h.alpha), h.lambda_policy)
        given = (values_AxRxT, reward, trained, segments, h.gamma)
        advantage = gae.gae(*given, lam, last)
        returns = jnp.where(trained, gae.gae(*given, h.lambda_value, last) + values_AxRxT, 0.0)

        third = jnp.stack([length <= h.short, length > h.long])
        third = jnp.stack([jnp.ones_like(trained), third[0], ~third.any(0), third[1]]) & trained
        add = lambda x: jnp.sum(jnp.where(third, x, 0.0), axis=(1, 2, 3))
        error = returns - values_AxRxT
        sums = dict(tokens=add(1.0), lam=add(lam))
        for name, x in (("return", returns), ("advantage", advantage), ("error", error)):
            sums |= {name: add(x), f"{name}_square": add(x * x)}
        return Estimates(advantage, returns, sums)

    def _of_model(self, params) -> qwen2.Params:
        """Copies, as a program shares no array with its arguments: updates donate these."""
        body = {k: w for k, w in params.items() if k in ("embed", "blocks", "final_norm")}
        score = params.get("score", jnp.zeros((self.shape.hidden_size, 1)))
        return jax.tree.map(lambda w: w.astype(jnp.float32), body) | {"score": score}

    def calls(self, A: int, R: int, T: int) -> dict[str, Call]:
        """What a step runs, by name, of A micro-batches of R rows of T cells."""
        params, opt_state = self.abstract_state()
        cells, number, used = self.abstract_cells(A, R, T), np.float32(0), np.int32(A)
        rows = update.abstract_rows(self, A, R, T)
        wanted = params, opt_state, Batch(rows, cells, cells, used), Knobs(number, number)
        return {
            "values": Call(self.values, (params, rows, used), "micro-batch"),
            "update of values": Call(self.update, wanted, "micro-batch"),
        }


def critic_shape(config, policy: qwen2.Shape) -> qwen2.Shape:
    """The value model's shape: the policy's, or that of `critic.init_from` on process 0, with a
    value head and no adapters. ValueError: it cannot read the policy's tokens. A collective."""
    if not (name := config.critic.init_from):
        return policy.merged._replace(value_head=True)
    choices = qwen2.compute_choices(config)
    read = lambda: hf.read_shape(hf.resolve(name, weights=False), **choices).merged._asdict()
    told = parallel.of_main_process(read)
    yarn = told["yarn"] and rope.Yarn(*told["yarn"])
    if told["vocab_size"] < policy.vocab_size:
        rows = f"{name} has {told['vocab_size']} embedding rows, the policy {policy.vocab_size}"
        remedy = "the value model has to have the policy's tokenizer"
        raise ValueError(f"config.critic.init_from: {rows}; {remedy}")
    return qwen2.Shape(**told | {"yarn": yarn, "value_head": True})


def initial_params(config, critic: Critic, policy_params: qwen2.Params) -> qwen2.Params:
    """A copy of the policy (without adapters) with a head of zeros; or of `critic.init_from`, whose
    `score.weight` is the head of a reward model. ValueError: it cannot be read. A collective."""
    if not config.critic.init_from:
        return critic.of_model(policy_params)

    def look() -> tuple[str, bool]:
        where = hf.resolve(config.critic.init_from)
        return str(where), hf_format.has_value_head(where)

    where, scores = parallel.of_main_process(look)
    shape = critic.shape._replace(value_head=scores)
    return critic.of_model(hf.load_params(where, shape, critic.mesh, critic.rules))
