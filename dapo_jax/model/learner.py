"""Gradient updates of any network and loss: one program accumulates float32 gradients over
micro-batches, clips, applies the optimizer, and keeps the old state where the gradient is not
finite (model/kernels.py). With adapters (LoRA) only these are trained (`adapters.trained`).

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
from dapo_jax.model import adapters, kernels, qwen2


class Setup(NamedTuple):
    """What all networks of a run share."""

    mesh: Mesh
    rules: parallel.Rules
    tx: optax.GradientTransformation
    dtype: str  # that networks compute in
    offload: bool = False  # the optimizer's per-weight state rests in host memory between updates
    last_row_tokens: int = 0  # as `packing.Layout` has it


class Learner:
    """Gradient updates of one network, by loss(kernel, params, batch, knobs) -> (loss, (sums,
    maxima)) of one micro-batch. A batch is a NamedTuple like `update.Batch`, with fields `rows` and
    `micro_batches`; knobs have a field `lr`. `update` donates params and opt_state. ValueError:
    `offload`, and the devices cannot reach such memory."""

    def __init__(self, shape: qwen2.Shape, setup: Setup, loss: Callable):
        mesh, rules, tx, dtype, offload, self._short = setup
        self.shape, self.mesh, self.rules, self.tx = shape, mesh, rules, tx
        self._loss, self._offload, self._dtype = loss, offload, dtype
        self.kernel = kernels.choose(mesh, shape, dtype)
        self._everywhere = parallel.replicated(mesh)
        self.param_shardings = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)
        self.row_sharding = NamedSharding(mesh, parallel.spec((None, "batch", None), rules))

        trained = adapters.trained(self.param_shardings)
        self._opt_on_device = self.opt_shardings = self._opt_layout(trained)
        if offload:
            parallel.check_host_memory(mesh)
            on_host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), trained)
            self.opt_shardings = self._opt_layout(on_host)
        # (params) -> opt_state
        init = lambda params: tx.init(adapters.trained(params))
        self.init_opt_state = jax.jit(init, out_shardings=self.opt_shardings)
        # (params, opt_state, batch, knobs) -> (params, opt_state, metrics)
        self.update = self._jit_step(self._update)

    def _opt_layout(self, per_weight):
        """Shardings of the optimizer's state: `per_weight` on a weight's path, else replicated."""
        opt_state = jax.eval_shape(self.tx.init, adapters.trained(qwen2.abstract(self.shape)))
        of = dict(jax.tree.leaves_with_path(per_weight))
        own = lambda path: (of[path[i:]] for i in range(len(path)) if path[i:] in of)
        return jax.tree.map_with_path(lambda path, _: next(own(path), self._everywhere), opt_state)

    def _jit_step(self, step):
        """A program (params, opt_state, ...) -> (params, opt_state, metrics)."""
        out = self.param_shardings, self.opt_shardings, self._everywhere
        options = parallel.compiler_options(self.mesh, same_bits=True)
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=out, compiler_options=options)

    def per_cell(self, numbers: Callable, params, rows, micro_batches) -> jax.Array:
        """numbers(cast params, the arrays of a micro-batch [R, T] of `rows`) of the first
        `micro_batches`, 0 in the others: float32 [A, R, T]."""
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            params = qwen2.cast(params, self._dtype, self.shape)

            def one(T, i, out):
                micro = jax.tree.map(lambda x: x[i, :, :T], rows)
                return out.at[i, :, :T].set(numbers(params, micro))

            out_AxRxT = jnp.zeros(jax.tree.leaves(rows)[0].shape)
            for T, *span in self.loops(rows, micro_batches):
                out_AxRxT = jax.lax.fori_loop(*span, functools.partial(one, T), out_AxRxT)
            return out_AxRxT

    def loops(self, rows, micro_batches) -> list[tuple]:
        """(cells of a row, None = all; first micro-batch; end) of each loop over micro-batches. The
        last one's rows are cut to `last_row_tokens` where there is nothing beyond."""
        if not (short := self._short):
            return [(None, 0, micro_batches)]
        beyond = rows.segments_AxRxT[micro_batches - 1, :, short:].any()
        whole = micro_batches - jnp.where(beyond, 0, 1)
        return [(None, 0, whole), (short, whole, micro_batches)]

    def _update(self, params, opt_state, batch, knobs):
        loss = lambda params, micro: self._loss(self.kernel, params, micro, knobs)
        per_micro = batch._replace(micro_batches=None)
        return self._step(loss, per_micro, batch.micro_batches, params, opt_state, knobs.lr)

    def _step(self, loss, per_micro, micro_batches, params, opt_state, lr):
        """One update by the gradient of what is trained, summed over the first `micro_batches`
        entries of the tree `per_micro`. loss: of (params, the arrays of a micro-batch)."""
        with parallel.mesh_scope(self.mesh, self.rules, self._dtype):
            cast = qwen2.cast(params, self._dtype, self.shape)

            def of_trained(trained, i, T=None):
                micro = jax.tree.map(lambda x: x[i, :, :T], per_micro)
                return loss(adapters.with_trained(cast, trained), micro)

            loops = self.loops(getattr(per_micro, "rows", per_micro), micro_batches)
            grads, sums, maxima = self.kernel.accumulate(of_trained, adapters.trained(cast), loops)
            if self._offload:
                opt_state = jax.device_put(opt_state, self._opt_on_device)
            old = adapters.trained(params), opt_state
            trained, opt_state, norm, skipped = self.kernel.apply(self.tx, *old, grads, lr)
            params = adapters.with_trained(params, trained)
        return params, opt_state, dict(sums, **maxima, grad_norm=norm, skipped=skipped)

    def abstract_state(self) -> tuple[qwen2.Params, Any]:
        """(params, opt_state) as jax.ShapeDtypeStructs with their shardings."""
        params = qwen2.abstract(self.shape)
        opt_state = jax.eval_shape(self.tx.init, adapters.trained(params))
        return parallel.sharded((params, opt_state), (self.param_shardings, self.opt_shardings))

    def abstract_cells(self, A: int, R: int, T: int, dtype=np.float32) -> jax.ShapeDtypeStruct:
        """A number per cell: A micro-batches of R rows of T cells."""
        return jax.ShapeDtypeStruct((A, R, T), dtype, sharding=self.row_sharding)


# --- Optimizer and learning rate ------------------------------------------------------------------


def optimizer(
    b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clip by global norm (0 = do not), Adam, decoupled decay; `kernels.apply` multiplies by the
    learning rate, since that follows rollout steps, which optax cannot count."""
    clip = kernels.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    adam, decay = optax.scale_by_adam(b1, b2, eps), optax.add_decayed_weights(weight_decay)
    return optax.chain(clip, adam, decay)


def learning_rate(optim, step: int) -> float:
    """lr of rollout step `step` (from 0): linear warm-up, then `optim.schedule` by optax. With
    `warmup_from_zero` step 0 trains at lr 0, which is where verl's schedule starts."""
    steps, first = max(optim.warmup_steps, 1), not optim.warmup_from_zero
    full = steps - first  # first step at the full rate
    if step < full:
        return optim.lr * ((step + first) / steps)
    return scheduled(optim.schedule, optim.lr, optim.lr_end, optim.decay_steps, step - full)


def scheduled(name: str, start: float, left: float, steps: int, step: int) -> float:
    """Value at `step` of a schedule that falls from `start` to `left * start` in `steps` steps."""
    schedule = {
        "constant": lambda: optax.constant_schedule(start),
        "linear": lambda: optax.linear_schedule(start, start * left, steps),
        "cosine": lambda: optax.cosine_decay_schedule(start, steps, left),
    }[name]()
    return float(schedule(step))
