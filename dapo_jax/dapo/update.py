"""The jitted half of training: log-probs of packed rows, and one gradient update.

`update` accumulates float32 gradients over micro-batches inside one program, then clips, applies
AdamW, and keeps the old state where the gradient is not finite (model/kernels.py).

With adapters (LoRA) only these have gradients and optimizer state (`qwen2.trained`).

Dims: A micro-batches, R rows, T cells.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from dapo_jax import parallel
from dapo_jax.dapo import objective, packing
from dapo_jax.dapo.packing import PackedBatch
from dapo_jax.model import attention, kernels, qwen2
from dapo_jax.model.head import HeadStats


def row_stats(
    shape: qwen2.Shape, params, rows: PackedBatch, temperature, kernel: kernels.Kernels
) -> HeadStats:
    """Log-probs and entropies of one micro-batch (fields of `rows` are [R, T] here)."""
    model = qwen2.bind(shape, params)
    x_RxTxD = model.hidden(rows.tokens_AxRxT, rows.positions_AxRxT, rows.segments_AxRxT)
    head_DxV, chunk = model.head(), shape.head_chunk
    return kernel.head_stats(x_RxTxD, head_DxV, rows.targets_AxRxT, temperature, chunk)


# ------------------------------------------------------------------------------------------------
# Losses of one micro-batch: (loss, (sums, maxima)); sums and maxima add up over micro-batches
# ------------------------------------------------------------------------------------------------


class LossTerm(NamedTuple):
    """A term that a method adds to the loss; static, part of the compiled update."""

    name: str  # of its sum in the metrics of an update
    loss: Callable  # (logp_RxT, weight_RxT) -> scalar


def dapo_loss(
    shape, params, rows: PackedBatch, old_RxT, ref_RxT, *weights_RxT, temperature,
    c: objective.Coefficients, choice: objective.Choice, terms: tuple[LossTerm, ...] = (),
    kernel: kernels.Kernels = kernels.GENERAL,
):  # fmt: skip
    """sum(weight * token loss), with optional KL and entropy terms of the same weights, and the
    extra `terms`, each with its own weights."""
    stats = row_stats(shape, params, rows, temperature, kernel)
    trained = rows.trained_AxRxT
    logp = jnp.where(trained, stats.logp_RxT, 0.0)
    old = jnp.where(trained, old_RxT, 0.0)
    over = per_response(rows, shape.shared_prompts)
    term = choice.token_loss(logp, old, rows.advantage_AxRxT, c, over)
    importance = choice.importance(old, rows.sampled_logp_AxRxT, c, over)
    weight = rows.weight_AxRxT * importance
    kl = objective.k3(logp, jnp.where(trained, ref_RxT, 0.0))
    bonus = c.entropy_coef * jnp.minimum(stats.entropy_RxT, c.entropy_enough)
    loss = jnp.sum(weight * (term.loss + c.kl_coef * kl - bonus))

    count = lambda x: jnp.sum(jnp.where(trained, x, 0.0))
    sums = dict(
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
    if choice.weighted:
        sums["importance"] = count(importance)
        sums["importance_capped"] = count(importance >= c.importance_cap)
    if choice.aged:
        sums["importance_square"] = count(importance**2)
    if choice.importance is not objective.DAPO.importance:
        sums["importance_zeroed"] = count(importance == 0)
    for extra, weight_RxT in zip(terms, weights_RxT, strict=True):
        sums[extra.name] = extra.loss(logp, weight_RxT)
        loss += sums[extra.name]
    gap = jnp.where(trained, jnp.abs(logp - rows.sampled_logp_AxRxT), 0.0)
    maxima = dict(ratio_max=jnp.max(jnp.where(trained, term.ratio, 0.0)), sampler_gap=jnp.max(gap))
    return loss, (sums, maxima)


def per_response(rows: PackedBatch, shared_prompts: bool = False) -> objective.PerResponse:
    """Reductions over the response of each cell of a micro-batch. A sequence lies whole in one row,
    so every device sums its own rows."""

    def part(x_RxT, segments_RxT):
        add = lambda x_T, at_T: jnp.zeros(x_T.size + 1).at[at_T].add(x_T)[at_T]
        return jax.vmap(add)(x_RxT, segments_RxT)

    cells = ("batch", None)
    split = parallel.per_shard(part, (cells, cells), cells)
    number_RxT = rows.segments_AxRxT
    if shared_prompts:
        number_RxT &= (1 << attention.SHARED) - 1
    total = lambda x_RxT: split(x_RxT, number_RxT)
    tokens = lambda: jnp.maximum(total(rows.trained_AxRxT.astype(jnp.float32)), 1.0)
    return objective.PerResponse(total, lambda x_RxT: total(x_RxT) / tokens())


def supervised_loss(shape, kernel: kernels.Kernels, params, rows: PackedBatch):
    """Cross-entropy of the response tokens, weighted like any other loss."""
    stats = row_stats(shape, params, rows, 1.0, kernel)
    loss = -jnp.sum(rows.weight_AxRxT * stats.logp_RxT)
    return loss, (dict(loss=loss), {})


# ------------------------------------------------------------------------------------------------
# Programs
# ------------------------------------------------------------------------------------------------


def optimizer(
    b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clip by global norm (0 = do not), Adam, decoupled decay; `apply` multiplies by the learning
    rate, which follows rollout steps and so is not optax's to count."""
    return optax.chain(
        kernels.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay),
    )


def learning_rate(optim, step: int) -> float:
    """lr of rollout step `step` (from 0): linear warm-up, then `optim.schedule` by optax. With
    `warmup_from_zero` step 0 trains at lr 0, which is where verl's schedule starts."""
    lr, steps, left = optim.lr, optim.decay_steps, optim.lr_end
    full = max(optim.warmup_steps - (not optim.warmup_from_zero), 0)  # first step at the full rate
    if step < full:
        done = step if optim.warmup_from_zero else step + 1
        return lr * (done / optim.warmup_steps)
    return scheduled(optim.schedule, lr, left, steps, step - full)


def scheduled(name: str, start: float, left: float, steps: int, step: int) -> float:
    """Value at `step` of a schedule from `start` to `left * start` over `steps` steps."""
    schedule = {
        "constant": lambda: optax.constant_schedule(start),
        "linear": lambda: optax.linear_schedule(start, start * left, steps),
        "cosine": lambda: optax.cosine_decay_schedule(start, steps, left),
    }[name]()
    return float(schedule(step))


class Batch(NamedTuple):
    """What one update trains on, on the devices."""

    rows: PackedBatch
    old_logp_AxRxT: jax.Array  # float32, the denominator of the ratio
    ref_logp_AxRxT: jax.Array  # float32, of the reference model; the old ones where there is none
    micro_batches: jax.Array  # int32, how many of the A hold something
    terms: tuple[jax.Array, ...] = ()  # float32 [A, R, T], weights of each extra term


class Knobs(NamedTuple):
    """Numbers of an update; traced, so that changing one compiles nothing."""

    lr: np.float32
    temperature: np.float32  # divides the logits, as in sampling
    loss: objective.Coefficients


class Trainer:
    """The compiled half of training, bound to a model shape, a mesh and an optimizer.

    Nothing compiles before its first use. `update` and `supervise` donate params and opt_state.
    With `offload` the optimizer's per-weight state rests in host memory and is on the device only
    while an update is applied; ValueError where the devices cannot reach such memory.
    """

    def __init__(
        self,
        shape: qwen2.Shape,
        mesh: Mesh,
        rules: parallel.Rules,
        tx: optax.GradientTransformation,
        dtype: str,
        offload: bool = False,
        choice: objective.Choice = objective.DAPO,
        terms: tuple[LossTerm, ...] = (),
    ):
        self.shape, self.mesh, self.rules, self.tx = shape, mesh, rules, tx
        self._choice, self._terms = choice, terms
        self._kernel = kernels.choose(mesh, shape, dtype)
        everywhere = parallel.replicated(mesh)
        self.param_shardings = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
        trained, base = qwen2.trained(self.param_shardings), qwen2.base(self.param_shardings)
        self.row_sharding = NamedSharding(mesh, parallel.spec((None, "batch", None), rules))

        opt_state = jax.eval_shape(tx.init, qwen2.trained(qwen2.abstract(shape)))

        def lay_out(per_weight):
            """The optimizer's state with its per-weight parts as `per_weight` says: what ends on
            the path of a weight."""
            of = dict(jax.tree.leaves_with_path(per_weight))
            own = lambda path: (of[path[i:]] for i in range(len(path)) if path[i:] in of)
            return jax.tree.map_with_path(lambda path, _: next(own(path), everywhere), opt_state)

        self._opt_on_device = self.opt_shardings = lay_out(trained)
        if offload:
            parallel.check_host_memory(mesh)
            on_host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), trained)
            self.opt_shardings = lay_out(on_host)
        self._offload = offload
        self._cast, self._dtype = functools.partial(qwen2.cast, dtype=dtype, c=shape), dtype
        options = parallel.compiler_options(mesh)
        same_bits = parallel.compiler_options(mesh, same_bits=True)

        state = (self.param_shardings, self.opt_shardings, everywhere)
        # (key data) -> params, without adapters
        self.init_params = jax.jit(self._init_params, out_shardings=base)
        # (params without adapters, key data) -> params; (params) -> params without adapters
        adapted = jax.jit(self._adapted, out_shardings=self.param_shardings)
        merged = jax.jit(functools.partial(qwen2.merge, shape), out_shardings=base)
        plain = base is self.param_shardings
        self.adapted = (lambda params, key_data: params) if plain else adapted
        self.merged = (lambda params: params) if plain else merged
        # (params) -> opt_state
        init = lambda params: tx.init(qwen2.trained(params))
        self.init_opt_state = jax.jit(init, out_shardings=self.opt_shardings)
        # (params, rows, micro_batches, temperature) -> float32 [A, R, T]
        self.log_probs = jax.jit(
            self._log_probs, out_shardings=self.row_sharding, compiler_options=options
        )
        # (params, opt_state, Batch, Knobs) -> (params, opt_state, metrics)
        self.update = jax.jit(
            self._update, donate_argnums=(0, 1), out_shardings=state, compiler_options=same_bits
        )
        # (params, Batch, Knobs) -> what `update` clips and hands to the optimizer
        self.gradient = jax.jit(self._gradient, out_shardings=trained)
        # (params, opt_state, rows, micro_batches, lr) -> (params, opt_state, metrics)
        self.supervise = jax.jit(
            self._supervise, donate_argnums=(0, 1), out_shardings=state, compiler_options=same_bits
        )

    def _init_params(self, key_data) -> qwen2.Params:
        with parallel.mesh_scope(self.mesh, self.rules):
            return qwen2.init(self.shape.merged, jax.random.wrap_key_data(key_data))

    def _adapted(self, params, key_data) -> qwen2.Params:
        with parallel.mesh_scope(self.mesh, self.rules):
            return qwen2.adapted(self.shape, params, jax.random.wrap_key_data(key_data))

    def _log_probs(self, params, rows: PackedBatch, micro_batches, temperature) -> jax.Array:
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            params = self._cast(params)

            def one(i, out):
                micro = jax.tree.map(lambda x: x[i], rows)
                stats = row_stats(self.shape, params, micro, temperature, self._kernel)
                return out.at[i].set(stats.logp_RxT)

            return jax.lax.fori_loop(0, micro_batches, one, jnp.zeros(rows.tokens_AxRxT.shape))

    def _update(self, params, opt_state, batch: Batch, knobs: Knobs):
        per_micro, loss_fn = self._per_micro(batch), self._loss(knobs)
        return self._step(loss_fn, params, opt_state, per_micro, batch.micro_batches, knobs.lr)

    def _gradient(self, params, batch: Batch, knobs: Knobs):
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            per_micro, loss_fn = self._per_micro(batch), self._loss(knobs)
            return self._accumulate(loss_fn, params, per_micro, batch.micro_batches)[0]

    def _supervise(self, params, opt_state, rows: PackedBatch, micro_batches, lr):
        loss_fn = functools.partial(supervised_loss, self.shape, self._kernel)
        return self._step(loss_fn, params, opt_state, (rows,), micro_batches, lr)

    # A trainer of another loss replaces these.

    def _per_micro(self, batch: Batch) -> tuple:
        return batch.rows, batch.old_logp_AxRxT, batch.ref_logp_AxRxT, *batch.terms

    def _loss(self, knobs: Knobs):
        bound = dict(temperature=knobs.temperature, c=knobs.loss, kernel=self._kernel)
        bound |= dict(choice=self._choice, terms=self._terms)
        return functools.partial(dapo_loss, self.shape, **bound)

    def _accumulate(self, loss_fn, params, per_micro, micro_batches):
        """Gradient of what is trained, sums and maxima over the first `micro_batches` entries of
        the trees `per_micro`."""
        params = self._cast(params)

        def loss(trained, i):
            micro = jax.tree.map(lambda x: x[i], per_micro)
            return loss_fn(qwen2.with_trained(params, trained), *micro)

        return self._kernel.accumulate(loss, qwen2.trained(params), micro_batches)

    def _step(self, loss_fn, params, opt_state, per_micro, micro_batches, lr):
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            grads, sums, maxima = self._accumulate(loss_fn, params, per_micro, micro_batches)
            if self._offload:
                opt_state = jax.device_put(opt_state, self._opt_on_device)
            trained = qwen2.trained(params)
            trained, opt_state, norm, skipped = self._kernel.apply(
                self.tx, trained, opt_state, grads, lr
            )
            params = qwen2.with_trained(params, trained)
        return params, opt_state, dict(sums, **maxima, grad_norm=norm, skipped=skipped)

    def abstract(self, A: int, R: int, T: int) -> tuple[qwen2.Params, Any, Batch, Knobs]:
        """Arguments for `update.trace` and `update.lower`: A micro-batches of R rows of T cells."""
        cell = lambda dtype: jax.ShapeDtypeStruct((A, R, T), dtype, sharding=self.row_sharding)
        params, number = qwen2.abstract(self.shape), np.float32(0)
        loss = objective.Coefficients(**dict.fromkeys(objective.Coefficients._fields, number))
        rows = PackedBatch(**{k: cell(d) for k, d in packing.DTYPES.items()})
        return (
            parallel.sharded(params, self.param_shardings),
            parallel.sharded(
                jax.eval_shape(self.tx.init, qwen2.trained(params)), self.opt_shardings
            ),
            Batch(
                rows,
                cell(jnp.float32),
                cell(jnp.float32),
                np.int32(A),
                tuple(cell(jnp.float32) for _ in self._terms),
            ),
            Knobs(number, number, loss),
        )
