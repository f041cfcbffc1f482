"""The jitted half of training: DAPO's loss, log-probs of packed rows, and the policy's updates.

Dims: A micro-batches, R rows, T cells.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo import objective, packing
from dapo_jax.dapo.packing import PackedBatch
from dapo_jax.model import adapters, attention, kernels, qwen2
from dapo_jax.model.head import HeadStats
from dapo_jax.model.learner import Learner, Setup


class Batch(NamedTuple):
    """What one update trains on, on the devices. Every array but the last has A first; the loss of
    a micro-batch gets the same fields without it, and `micro_batches` None."""

    rows: PackedBatch
    old_logp_AxRxT: jax.Array  # float32, the denominator of the ratio
    ref_logp_AxRxT: jax.Array  # float32, of the reference model; the old ones where there is none
    micro_batches: jax.Array | None  # int32, how many of the A hold something
    terms: tuple[jax.Array, ...] = ()  # float32 [A, R, T] each, weights of `Trainer`'s loss terms


class Knobs(NamedTuple):
    """Numbers of an update; traced, so that changing one compiles nothing."""

    lr: np.float32
    temperature: np.float32  # divides the logits, as in sampling
    loss: objective.Coefficients


class LossTerm(NamedTuple):
    """A term that a variant adds to the loss, with weights of its own (`Batch.terms`)."""

    name: str  # of its metric
    # (logp_RxT, old, weight_RxT) of a micro-batch -> what is added; log-probs: 0 if not trained
    loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def row_stats(
    shape: qwen2.Shape, params, rows: PackedBatch, temperature, kernel: kernels.Kernels
) -> HeadStats:
    """Log-probs and entropies of one micro-batch (fields of `rows` are [R, T] here)."""
    model = qwen2.bind(shape, params)
    x_RxTxD = model.hidden(rows.tokens_AxRxT, rows.positions_AxRxT, rows.segments_AxRxT)
    head_DxV, chunk = model.head(), shape.head_chunk
    return kernel.head_stats(x_RxTxD, head_DxV, rows.targets_AxRxT, temperature, chunk)


def dapo_loss(
    kernel: kernels.Kernels,
    params,
    batch: Batch,
    knobs: Knobs,
    *,
    shape: qwen2.Shape,
    choice: objective.Choice,
    terms: tuple[LossTerm, ...],
):
    """sum(weight * token loss) of a micro-batch, with optional KL and entropy terms of the same
    weights, and the terms of variants with their own: (loss, (sums, maxima) over its tokens)."""
    rows, c = batch.rows, knobs.loss
    stats = row_stats(shape, params, rows, knobs.temperature, kernel)
    trained = rows.trained_AxRxT
    logp = jnp.where(trained, stats.logp_RxT, 0.0)
    old = jnp.where(trained, batch.old_logp_AxRxT, 0.0)
    over = per_response(rows, shape.shared_prompts)
    term = choice.token_loss(logp, old, rows.advantage_AxRxT, c, over)
    weight, count = rows.weight_AxRxT, lambda x: jnp.sum(jnp.where(trained, x, 0.0))
    sums = {}
    if choice.importance:
        importance = choice.importance(old, rows.sampled_logp_AxRxT, c, over)
        weight = rows.weight_AxRxT * importance
        sums["importance"] = count(importance)
        sums["importance_capped"] = count(importance >= c.importance_cap)
        if choice.aged:
            sums["importance_square"] = count(importance**2)
        if choice.importance is not objective.importance_weight:
            sums["importance_zeroed"] = count(importance == 0)
    kl = objective.k3(logp, jnp.where(trained, batch.ref_logp_AxRxT, 0.0))
    bonus = c.entropy_coef * jnp.minimum(stats.entropy_RxT, c.entropy_enough)
    loss = jnp.sum(weight * (term.loss + c.kl_coef * kl - bonus))
    sums |= dict(
        loss=jnp.sum(weight * term.loss),
        tokens=count(1.0),
        entropy=count(stats.entropy_RxT),
        prob=count(jnp.exp(logp)),
        clip_low=count(term.clipped_low),
        clip_high=count(term.clipped_high),
        dual_clip=count(term.dual_clipped),
        approx_kl=count(old - logp),
        ref_kl=count(kl),
    )
    for extra, weight_RxT in zip(terms, batch.terms, strict=True):
        sums[extra.name] = extra.loss(logp, old, weight_RxT)
        loss += sums[extra.name]
    gap = jnp.where(trained, jnp.abs(logp - rows.sampled_logp_AxRxT), 0.0)
    maxima = dict(ratio_max=jnp.max(jnp.where(trained, term.ratio, 0.0)), sampler_gap=jnp.max(gap))
    return loss, (sums, maxima)


def per_response(rows: PackedBatch, shared_prompts: bool = False) -> objective.PerResponse:
    """Reductions over each cell's response, which lies in one row: a device sums its own rows."""
    add = lambda x_T, at_T: jnp.zeros(x_T.size + 1).at[at_T].add(x_T)[at_T]
    cells = ("batch", None)
    split = parallel.per_shard(jax.vmap(add), (cells, cells), cells)
    number_RxT = rows.segments_AxRxT
    if shared_prompts:
        number_RxT &= (1 << attention.SHARED) - 1
    total = lambda x_RxT: split(x_RxT, number_RxT)
    tokens = lambda: jnp.maximum(total(rows.trained_AxRxT.astype(jnp.float32)), 1.0)
    return objective.PerResponse(total, lambda x_RxT: total(x_RxT) / tokens())


class Trainer(Learner):
    """The policy's learner: DAPO's loss, log-probs of packed rows, and supervised updates.

    choice: an `objective.Choice`; terms: `LossTerm`s, what variants add to the loss. `supervise`
    donates params and opt_state, as `update` does.
    """

    def __init__(self, shape: qwen2.Shape, setup: Setup, choice=objective.DAPO, terms=()):
        loss = functools.partial(dapo_loss, shape=shape, choice=choice, terms=terms)
        super().__init__(shape, setup, loss)
        self._terms = terms
        base = adapters.base(self.param_shardings)
        # (key data) -> params, without adapters
        self.init_params = jax.jit(self._init_params, out_shardings=base)
        # (params without adapters, key data) -> params; (params) -> params without adapters
        self.adapted = jax.jit(self._adapted, out_shardings=self.param_shardings)
        merged = jax.jit(functools.partial(adapters.merge, shape.lora), out_shardings=base)
        self.merged = (lambda params: params) if base is self.param_shardings else merged
        # (params, rows, micro_batches, temperature) -> float32 [A, R, T]
        how = dict(compiler_options=parallel.compiler_options(setup.mesh))
        self.log_probs = jax.jit(self._log_probs, out_shardings=self.row_sharding, **how)
        # (params, opt_state, rows, micro_batches, lr) -> (params, opt_state, metrics)
        self.supervise = self._jit_step(self._supervise)

    def _init_params(self, key_data) -> qwen2.Params:
        with parallel.mesh_scope(self.mesh, self.rules):
            return qwen2.init(self.shape.merged, jax.random.wrap_key_data(key_data))

    def _adapted(self, params, key_data) -> qwen2.Params:
        with parallel.mesh_scope(self.mesh, self.rules):
            return qwen2.adapted(self.shape, params, jax.random.wrap_key_data(key_data))

    def _log_probs(self, params, rows: PackedBatch, micro_batches, temperature) -> jax.Array:
        logp = lambda *given: row_stats(self.shape, *given, temperature, self.kernel).logp_RxT
        return self.per_cell(logp, params, rows, micro_batches)

    def _supervise(self, params, opt_state, rows: PackedBatch, micro_batches, lr):
        def loss(params, micro: PackedBatch):
            """Cross-entropy of the response tokens, weighted like any other loss."""
            stats = row_stats(self.shape, params, micro, 1.0, self.kernel)
            total = -jnp.sum(micro.weight_AxRxT * stats.logp_RxT)
            return total, (dict(loss=total), {})

        return self._step(loss, rows, micro_batches, params, opt_state, lr)

    def abstract(self, A: int, R: int, T: int) -> tuple[qwen2.Params, Any, Batch, Knobs]:
        """Arguments for `update.trace` and `update.lower`: A micro-batches of R rows of T cells."""
        cells, number = self.abstract_cells(A, R, T), np.float32(0)
        terms = tuple(cells for _ in self._terms)
        batch = Batch(abstract_rows(self, A, R, T), cells, cells, np.int32(A), terms)
        loss = objective.Coefficients(**dict.fromkeys(objective.Coefficients._fields, number))
        return *self.abstract_state(), batch, Knobs(number, number, loss)


def abstract_rows(learner: Learner, A: int, R: int, T: int) -> PackedBatch:
    """The rows of a batch as jax.ShapeDtypeStructs."""
    return PackedBatch(*(learner.abstract_cells(A, R, T, d) for d in packing.DTYPES))
