"""What dapo/update.py does otherwise where one CPU holds a large model or a large vocabulary: the
same numbers up to float32 rounding, in less memory and time. Dims as there; n a few cells.
"""

import math

import jax
import jax.numpy as jnp
import optax

from dapo_jax import parallel
from dapo_jax.model import qwen2

LARGE_MODEL = 2**26  # parameters, of which a second copy is felt
LARGE_VOCABULARY = 2**15  # each pass over its logits, or over the embedding, is felt
_COLUMNS = 1024  # of logits at a time: with the gradients of 512 cells, 2 MiB


def large_model(trained: qwen2.Params) -> bool:
    """Whether one CPU holds what is trained, or its gradient, and that is large."""
    size = sum(w.size for w in jax.tree.leaves(trained))
    return parallel.on_one_cpu() and size >= LARGE_MODEL


def large_vocabulary(size: int) -> bool:
    return parallel.on_one_cpu() and size >= LARGE_VOCABULARY


def head_stats(x_RxcxD, head_DxV, targets_Rxc, temperature) -> list[jax.Array]:
    """[log-probs, entropies], the sums of `update.head_stats`: a few cells at a time, so that what
    they are sums of stays in the caches. XLA would write each of them out for all cells, several
    times the logits; that took as long as the products. The backward pass begins with the logits,
    and takes some columns of the vocabulary at a time: their gradient then stays in the caches too,
    and XLA multiplies parts with the head a third faster than the whole."""
    x_NxD, targets_N = x_RxcxD.reshape(-1, x_RxcxD.shape[-1]), targets_Rxc.reshape(-1)
    found = _stats(x_NxD, head_DxV, targets_N, temperature)
    return [x.reshape(targets_Rxc.shape) for x in found]


@jax.custom_vjp
def _stats(x_NxD, head_DxV, targets_N, temperature):
    return _forward(x_NxD, head_DxV, targets_N, temperature)[0]


def _forward(x_NxD, head_DxV, targets_N, temperature):
    logits_NxV = jax.lax.optimization_barrier(qwen2.logits(x_NxD, head_DxV))
    N, V = logits_NxV.shape
    cells = math.gcd(N, 8)

    def some(first):
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, cells)
        logits_nxV = cut(logits_NxV) / temperature
        top_n = logits_nxV.max(-1)
        shifted_nxV = logits_nxV - top_n[:, None]
        weight_nxV = jnp.exp(shifted_nxV)
        taken_n = jnp.where(jnp.arange(V) == cut(targets_N)[:, None], shifted_nxV, 0.0).sum(-1)
        total_n, mean_n = weight_nxV.sum(-1), (weight_nxV * shifted_nxV).sum(-1)
        log_total_n = jnp.log(total_n)
        return taken_n - log_total_n, log_total_n - mean_n / total_n, top_n + log_total_n

    found = jax.lax.map(some, jnp.arange(0, N, cells))
    logp_N, entropy_N, norm_N = (x.reshape(N) for x in found)
    kept = (x_NxD, head_DxV, logits_NxV, targets_N, norm_N, entropy_N, temperature)
    return (logp_N, entropy_N), kept


def _backward(kept, grad):
    x_NxD, head_DxV, logits_NxV, *of_cells, temperature = kept
    targets, norm, entropy, of_logp, of_entropy = (x[:, None] for x in (*of_cells, *grad))
    head_VxD, V = head_DxV.T, head_DxV.shape[1]

    def some(first, size, sums):
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, first, size, axis)
        logp_Nxv = cut(logits_NxV, 1) / temperature - norm
        of_each = of_logp + of_entropy * (logp_Nxv + entropy)
        taken = first + jnp.arange(size) == targets
        of_logits_Nxv = jnp.where(taken, of_logp, 0.0) - jnp.exp(logp_Nxv) * of_each
        of_logits_Nxv /= temperature
        of_x_NxD, of_head_VxD = sums
        of_some_vxD = (of_logits_Nxv.T @ x_NxD.astype(jnp.float32)).astype(head_DxV.dtype)
        return (
            of_x_NxD + of_logits_Nxv @ cut(head_VxD, 0).astype(jnp.float32),
            jax.lax.dynamic_update_slice_in_dim(of_head_VxD, of_some_vxD, first, 0),
        )

    size = min(_COLUMNS, V)
    parts, rest = divmod(V, size)
    sums = jnp.zeros(x_NxD.shape, jnp.float32), jnp.zeros_like(head_VxD)
    sums = jax.lax.fori_loop(0, parts, lambda i, sums: some(i * size, size, sums), sums)
    of_x_NxD, of_head_VxD = some(V - rest, rest, sums) if rest else sums
    return of_x_NxD.astype(x_NxD.dtype), of_head_VxD.T, None, None


_stats.defvjp(_forward, _backward)


def accumulate(loss, trained, micro_batches):
    """`update.accumulate`: each layer's gradient is added to the sum where that lies, and there is
    no second gradient of the size of the model. loss: as there, of (trained, i)."""
    totals = jax.tree.map(jax.new_ref, qwen2.zeros(trained))

    def add(i, carry):
        _, backward, more = jax.vjp(lambda p: loss(p, i), trained, has_aux=True)
        backward.with_refs(totals)(jnp.float32(1))
        return tuple(
            jax.tree.map(f, old, new)
            for f, old, new in zip((jnp.add, jnp.maximum), carry, more, strict=True)
        )

    told = qwen2.zeros(jax.eval_shape(lambda: loss(trained, 0)[1]))
    told = jax.lax.fori_loop(0, micro_batches, add, told)
    return jax.tree.map(lambda ref: ref[...], totals), *told


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """optax's. Of a large model by one product, which XLA makes again in each pass that reads the
    gradient: of optax's quotient it would keep a copy of the model's size."""
    clip = optax.clip_by_global_norm(largest)

    def update(grads, state, params=None):
        if not large_model(grads):
            return clip.update(grads, state, params)
        factor = largest / jnp.maximum(optax.tree.norm(grads), largest)
        return jax.tree.map(lambda g: factor * g, grads), state

    return optax.GradientTransformation(clip.init, update)


def apply(tx: optax.GradientTransformation, params, opt_state, grads, lr):
    """`update.apply`: weights and moments are written over, where that holds the old and
    the new. So the new weights are made twice, first to be looked at; each time in a branch, since
    XLA would join the two."""

    def step(params, opt_state):
        step, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.map(lambda p, u: p - lr * u, params, step), opt_state

    def sound(params, opt_state):
        new_params, _ = step(params, opt_state)
        return jnp.all(jnp.stack([jnp.isfinite(p).all() for p in jax.tree.leaves(new_params)]))

    norm, state = optax.tree.norm(grads), (params, opt_state)
    finite = jax.lax.cond(jnp.isfinite(norm), sound, lambda *_: jnp.bool_(False), *state)
    return *jax.lax.cond(finite, step, lambda *state: state, *state), norm, ~finite
