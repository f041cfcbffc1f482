"""The jitted half of training: log-probs of packed rows, and one gradient update.

`update` accumulates float32 gradients over micro-batches inside one program, then clips, applies
AdamW, and keeps the old state where the gradient is not finite. It never makes an array of
tokens x vocabulary: the head runs on chunks of cells, and the backward pass makes each chunk's
logits again (one CPU keeps those of a row that is one chunk, where the vocabulary is large).

With adapters (LoRA) gradients, optimizer and `apply` are of these alone (`qwen2.trained`).

Dims: A micro-batches, R rows, T cells, D hidden, V vocabulary.
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
from dapo_jax.model import attention, one_cpu, qwen2


class HeadStats(NamedTuple):
    logp_RxT: jax.Array  # float32, of the target
    entropy_RxT: jax.Array  # float32, nats


def head_stats(x_RxTxD, head_DxV, targets_RxT, temperature, chunk: int) -> HeadStats:
    """Log-prob of each target, entropy of each distribution: one pass over chunks of cells.

    The vocabulary stays split over devices. Each sums over its own part, and only those sums
    travel; the target's logit is a masked sum too, since a gather would fetch all the others.
    Gradients of the head add up over chunks in float32, on each device, and travel once.
    """
    alone = one_cpu.large_vocabulary(head_DxV.shape[1])
    axes = ("vocab", "embed", "sequence")
    over_V, over_D, over_T = ((),) * 3 if alone else map(parallel.mesh_axes, axes)
    everywhere = lambda x: jax.lax.psum(x, over_V) if over_V else x

    def part(x, head, targets, temperature):
        x = jax.lax.all_gather(x, over_T, axis=1, tiled=True) if over_T else x
        head = jax.lax.all_gather(head, over_D, axis=0, tiled=True) if over_D else head
        head_f32, dtype = head.astype(jnp.float32), head.dtype
        first = jax.lax.axis_index(over_V) * head.shape[1] if over_V else 0

        def stats(x_RxcxD, targets_Rxc):
            head_DxV = head_f32.astype(dtype)
            if alone:
                return HeadStats(*one_cpu.head_stats(x_RxcxD, head_DxV, targets_Rxc, temperature))
            logits_RxcxV = qwen2.logits(x_RxcxD, head_DxV) / temperature
            top = jax.lax.stop_gradient(logits_RxcxV).max(-1, keepdims=True)
            shifted = logits_RxcxV - (jax.lax.pmax(top, over_V) if over_V else top)
            weight = jnp.exp(shifted)
            ids = first + jax.lax.broadcasted_iota(jnp.int32, shifted.shape, 2)
            taken = jnp.where(ids == targets_Rxc[..., None], shifted, 0.0).sum(-1)
            total, taken, mean = everywhere((weight.sum(-1), taken, (weight * shifted).sum(-1)))
            log_total = jnp.log(total)
            return HeadStats(taken - log_total, log_total - mean / total)

        if alone and chunk >= x.shape[1]:
            return stats(x, targets)  # kept: the backward pass begins with these logits
        return _in_chunks(jax.checkpoint(stats), x, targets, chunk)

    rows = ("batch", None)
    in_axes = (("batch", "sequence", None), ("embed", "vocab"), rows, ())
    split = part if alone else parallel.per_shard(part, in_axes, HeadStats(rows, rows))
    return split(x_RxTxD, head_DxV, targets_RxT, jnp.float32(temperature))


def _in_chunks(stats, x_RxTxD, targets_RxT, chunk: int) -> HeadStats:
    """`stats(x_RxcxD, targets_Rxc)` over chunks of cells, one after the other."""
    R, T, D = x_RxTxD.shape
    if chunk >= T:
        return stats(x_RxTxD, targets_RxT)
    pad = -T % chunk
    steps = (T + pad) // chunk
    x = jnp.pad(x_RxTxD, ((0, 0), (0, pad), (0, 0))).reshape(R, steps, chunk, D)
    targets = jnp.pad(targets_RxT, ((0, 0), (0, pad))).reshape(R, steps, chunk)
    out = jax.lax.map(lambda a: stats(*a), (jnp.moveaxis(x, 1, 0), jnp.moveaxis(targets, 1, 0)))
    return HeadStats(*(jnp.moveaxis(o, 0, 1).reshape(R, T + pad)[:, :T] for o in out))


def row_stats(shape: qwen2.Shape, params, rows: PackedBatch, temperature) -> HeadStats:
    """`head_stats` of one micro-batch (fields of `rows` are [R, T] here)."""
    model = qwen2.bind(shape, params)
    x_RxTxD = model.hidden(rows.tokens_AxRxT, rows.positions_AxRxT, rows.segments_AxRxT)
    return head_stats(x_RxTxD, model.head(), rows.targets_AxRxT, temperature, shape.head_chunk)


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
):  # fmt: skip
    """sum(weight * token loss), with optional KL and entropy terms of the same weights, and the
    extra `terms`, each with its own weights."""
    stats = row_stats(shape, params, rows, temperature)
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


def supervised_loss(shape, params, rows: PackedBatch):
    """Cross-entropy of the response tokens, weighted like any other loss."""
    stats = row_stats(shape, params, rows, 1.0)
    loss = -jnp.sum(rows.weight_AxRxT * stats.logp_RxT)
    return loss, (dict(loss=loss), {})


# ------------------------------------------------------------------------------------------------
# Programs
# ------------------------------------------------------------------------------------------------


def accumulate(loss_fn, params, per_micro, micro_batches, in_place: bool = False):
    """Gradient of what is trained, sums and maxima over the first `micro_batches` entries of the
    trees `per_micro`. in_place: see one_cpu.py.

    A loop with a traced trip count: one program for any number, and no time on empty entries,
    which a scan over all of them would run too. The gradient is taken inside, so that nothing of a
    micro-batch outlives its turn, and the sums in the carry are float32 and updated in place.
    """

    def loss(p, i):
        micro = jax.tree.map(lambda x: x[i], per_micro)
        return loss_fn(qwen2.with_trained(params, p), *micro)

    grad_fn, trained = jax.grad(loss, has_aux=True), qwen2.trained(params)
    if in_place:
        return one_cpu.accumulate(loss, trained, micro_batches)
    sums, maxima = jax.eval_shape(loss, trained, 0)[1]

    def add(i, carry):
        total, sums, maxima = carry
        # The barrier keeps XLA from moving the reductions over devices behind the loop: all of each
        # gradient would then be kept on every device (and libtpu 0.0.42 breaks off on it).
        grads, (more_sums, more_maxima) = jax.lax.optimization_barrier(grad_fn(trained, i))
        return (
            jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads),
            jax.tree.map(jnp.add, sums, more_sums),
            jax.tree.map(jnp.maximum, maxima, more_maxima),
        )

    start = tuple(map(qwen2.zeros, (trained, sums, maxima)))
    return jax.lax.fori_loop(0, micro_batches, add, start)


def apply(tx: optax.GradientTransformation, params, opt_state, grads, lr):
    """One optimizer step at learning rate `lr`; returns the old state where the gradient or any new
    parameter is not finite. (params, opt_state, gradient norm before clipping, skipped)."""
    norm = optax.tree.norm(grads)
    step, new_state = tx.update(grads, opt_state, params)
    new_params = jax.tree.map(lambda p, u: p - lr * u, params, step)
    finite = jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(new_params))
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
    return keep(new_params, params), keep(new_state, opt_state), norm, ~finite


def optimizer(
    b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clip by global norm (0 = do not), Adam, decoupled decay; `apply` multiplies by the learning
    rate, which follows rollout steps and so is not optax's to count."""
    return optax.chain(
        one_cpu.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
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
                return out.at[i].set(row_stats(self.shape, params, micro, temperature).logp_RxT)

            return jax.lax.fori_loop(0, micro_batches, one, jnp.zeros(rows.tokens_AxRxT.shape))

    def _update(self, params, opt_state, batch: Batch, knobs: Knobs):
        per_micro, loss_fn = self._per_micro(batch), self._loss(knobs)
        return self._step(loss_fn, params, opt_state, per_micro, batch.micro_batches, knobs.lr)

    def _gradient(self, params, batch: Batch, knobs: Knobs):
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            per_micro, loss_fn = self._per_micro(batch), self._loss(knobs)
            return accumulate(loss_fn, self._cast(params), per_micro, batch.micro_batches)[0]

    def _supervise(self, params, opt_state, rows: PackedBatch, micro_batches, lr):
        loss_fn = functools.partial(supervised_loss, self.shape)
        return self._step(loss_fn, params, opt_state, (rows,), micro_batches, lr)

    # A trainer of another loss replaces these.

    def _per_micro(self, batch: Batch) -> tuple:
        return batch.rows, batch.old_logp_AxRxT, batch.ref_logp_AxRxT, *batch.terms

    def _loss(self, knobs: Knobs):
        bound = dict(
            temperature=knobs.temperature, c=knobs.loss, choice=self._choice, terms=self._terms
        )
        return functools.partial(dapo_loss, self.shape, **bound)

    def _step(self, loss_fn, params, opt_state, per_micro, micro_batches, lr):
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            large = one_cpu.large_model(qwen2.trained(params))
            # jax 0.10 can add to a place neither what has to be cast nor cuts of a stack of layers.
            placed = large and np.dtype(self._dtype) == np.float32 and self.shape.scan_layers
            put = one_cpu.apply if large else apply
            cast = self._cast(params)
            grads, sums, maxima = accumulate(loss_fn, cast, per_micro, micro_batches, placed)
            if self._offload:
                opt_state = jax.device_put(opt_state, self._opt_on_device)
            trained = qwen2.trained(params)
            trained, opt_state, norm, skipped = put(self.tx, trained, opt_state, grads, lr)
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
