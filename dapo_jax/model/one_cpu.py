"""Kernels for one CPU that holds a large model or a large vocabulary (`kernels.choose`): the same
numbers up to float32 rounding, in less memory and time.

Dims: R rows, T cells, N cells in one axis, n or c a few of them, D hidden, V vocabulary.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax

from dapo_jax.model import ops, qwen2
from dapo_jax.model.head import HeadStats, in_chunks

LARGE_MODEL = 2**26  # trained parameters from which a second copy matters
LARGE_VOCABULARY = 2**15  # tokens from which each pass over logits or embedding matters
_COLUMNS = 1024  # of logits at a time: with the gradients of 512 cells, 2 MiB


def head_stats(x_RxTxD, head_DxV, targets_RxT, temperature, chunk: int) -> HeadStats:
    """`head.head_stats` of a few cells at a time, so that the terms of its sums, several times the
    logits, stay in the caches. The backward pass takes some columns of the vocabulary at a time,
    for the same reason; it begins with the logits, which a row of one chunk keeps."""
    temperature, head_f32 = jnp.float32(temperature), head_DxV.astype(jnp.float32)

    def stats(x_RxcxD, targets_Rxc):
        head = head_f32.astype(head_DxV.dtype)
        x_NxD, targets_N = x_RxcxD.reshape(-1, x_RxcxD.shape[-1]), targets_Rxc.reshape(-1)
        found = _stats(x_NxD, head, targets_N, temperature)
        return HeadStats(*(x.reshape(targets_Rxc.shape) for x in found))

    if chunk >= x_RxTxD.shape[1]:
        return stats(x_RxTxD, targets_RxT)
    return in_chunks(jax.checkpoint(stats), x_RxTxD, targets_RxT, chunk)


@jax.custom_vjp
def _stats(x_NxD, head_DxV, targets_N, temperature):
    return _forward(x_NxD, head_DxV, targets_N, temperature)[0]


def _forward(x_NxD, head_DxV, targets_N, temperature):
    logits_NxV = jax.lax.optimization_barrier(ops.logits(x_NxD, head_DxV))
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


def accumulate(loss, trained, loops):
    """`kernels.accumulate`: layers' gradients are added in place; there is no second whole one."""
    totals = jax.tree.map(jax.new_ref, qwen2.zeros(trained))

    def add(T, i, carry):
        _, backward, more = jax.vjp(lambda p: loss(p, i, T), trained, has_aux=True)
        backward.with_refs(totals)(jnp.float32(1))
        return tuple(map(jax.tree.map, (jnp.add, jnp.maximum), carry, more))

    told = qwen2.zeros(jax.eval_shape(lambda: loss(trained, 0)[1]))
    for T, *span in loops:
        told = jax.lax.fori_loop(*span, functools.partial(add, T), told)
    return jax.tree.map(lambda ref: ref[...], totals), *told


def apply(tx: optax.GradientTransformation, params, opt_state, grads, lr):
    """`kernels.apply`, in place of weights and moments: the new weights are computed twice, first
    to see whether they are finite; each time in a branch, since XLA would join the two."""
    tx = optax.with_extra_args_support(tx)

    def step(params, opt_state):
        step, opt_state = tx.update(grads, opt_state, params, by_product=True)
        return jax.tree.map(lambda p, u: p - lr * u, params, step), opt_state

    def sound(*state):
        new = jax.tree.leaves(step(*state)[0])
        return jnp.all(jnp.stack([jnp.isfinite(p).all() for p in new]))

    norm, state = optax.tree.norm(grads), (params, opt_state)
    finite = jax.lax.cond(jnp.isfinite(norm), sound, lambda *_: jnp.bool_(False), *state)
    return *jax.lax.cond(finite, step, lambda *state: state, *state), norm, ~finite
