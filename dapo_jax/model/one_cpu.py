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


def large_model(trained: qwen2.Params) -> bool:
    size = sum(w.size for w in jax.tree.leaves(trained))
    return parallel.on_one_cpu() and size >= LARGE_MODEL


def large_vocabulary(size: int) -> bool:
    return parallel.on_one_cpu() and size >= LARGE_VOCABULARY


@jax.custom_vjp
def over_vocabulary(logits_RxcxV, targets_Rxc) -> tuple[jax.Array, jax.Array]:
    """(log-probs, entropies), the sums of `update.head_stats`: a few cells at a time, so that what
    they are sums of stays in the caches. XLA would write each of them out for all cells, several
    times the logits, and again in the backward pass; that took as long as the products."""
    return _forward(logits_RxcxV, targets_Rxc)[0]


def _forward(logits_RxcxV, targets_Rxc):
    logits_RxcxV = jax.lax.optimization_barrier(logits_RxcxV)  # not made along with the sums
    V, cells = logits_RxcxV.shape[-1], math.gcd(targets_Rxc.size, 8)

    def some(args):
        logits_nxV, targets_n = args
        top_n = logits_nxV.max(-1)
        shifted_nxV = logits_nxV - top_n[:, None]
        weight_nxV = jnp.exp(shifted_nxV)
        taken_n = jnp.where(jnp.arange(V) == targets_n[:, None], shifted_nxV, 0.0).sum(-1)
        total_n, mean_n = weight_nxV.sum(-1), (weight_nxV * shifted_nxV).sum(-1)
        log_total_n = jnp.log(total_n)
        return taken_n - log_total_n, log_total_n - mean_n / total_n, top_n + log_total_n

    few = (logits_RxcxV.reshape(-1, cells, V), targets_Rxc.reshape(-1, cells))
    *stats, norm = (x.reshape(targets_Rxc.shape) for x in jax.lax.map(some, few))
    return tuple(stats), (logits_RxcxV, targets_Rxc, norm, stats[1])


def _backward(kept, grad):
    logits_RxcxV, *others = kept
    targets, norm, entropy, of_logp, of_entropy = (x[..., None] for x in (*others, *grad))
    logp_RxcxV = logits_RxcxV - norm
    of_each = of_logp + of_entropy * (logp_RxcxV + entropy)
    taken = jnp.arange(logits_RxcxV.shape[-1]) == targets
    return jnp.where(taken, of_logp, 0.0) - jnp.exp(logp_RxcxV) * of_each, None


over_vocabulary.defvjp(_forward, _backward)


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
