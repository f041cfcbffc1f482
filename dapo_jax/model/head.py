"""Log-probs and entropies of the next token, without an array of tokens x vocabulary.

Dims: R rows, T cells, c cells of a chunk, D hidden, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dapo_jax import parallel
from dapo_jax.model import ops, softmax_triton

# What the backward pass has of the forward pass. Sums and maxima of each cell's logits: where GPUs
# keep them, it reads its logits once, which memory bounds there.
_SUMS, _LOGITS = "sums of logits", "logits"


class HeadStats(NamedTuple):
    logp_RxT: jax.Array  # float32, of the target
    entropy_RxT: jax.Array  # float32, nats


def head_stats(x_RxTxD, head_DxV, targets_RxT, temperature, chunk: int) -> HeadStats:
    """One pass over chunks of cells, whose logits the backward pass makes again. If a chunk holds a
    whole row, its logits are kept. Of a split vocabulary each device sums over its own part, and
    only sums travel; the target's logit is one too: a gather would fetch all. Gradients of the head
    add up in float32 and travel once."""
    over_V, over_D, over_T = map(parallel.mesh_axes, ("vocab", "embed", "sequence"))
    everywhere = lambda x: jax.lax.psum(x, over_V) if over_V else x
    gpu = parallel.platform() == "gpu"
    by_kernel = parallel.runs_triton() and parallel.axis_size("vocab") == 1

    def part(x, head, targets, temperature):
        x = jax.lax.all_gather(x, over_T, axis=1, tiled=True) if over_T else x
        head = jax.lax.all_gather(head, over_D, axis=0, tiled=True) if over_D else head
        grads_at = head.astype(jnp.float32)
        first = jax.lax.axis_index(over_V) * head.shape[1] if over_V else 0

        def stats(x_RxcxD, targets_Rxc):
            logits_RxcxV = ops.logits(x_RxcxD, _summed_at(grads_at, head))
            logits_RxcxV = checkpoint_name(logits_RxcxV, _LOGITS)
            if by_kernel:
                return _stats(*_sums(logits_RxcxV, targets_Rxc, temperature))
            logits_RxcxV /= temperature
            top = jax.lax.stop_gradient(logits_RxcxV).max(-1, keepdims=True)
            top = checkpoint_name(jax.lax.pmax(top, over_V) if over_V else top, _SUMS)
            shifted = logits_RxcxV - top
            weight = jnp.exp(shifted)
            # Tied to the chunk, or jax works them out before the loop: two arrays like the logits.
            mine = targets_Rxc, first + jnp.arange(shifted.shape[2]), jnp.float32(0)
            targets_Rxc, ids_V, zero = jax.lax.optimization_barrier(mine)
            taken = jnp.where(ids_V == targets_Rxc[..., None], shifted, zero).sum(-1)
            sums = everywhere((weight.sum(-1), taken, (weight * shifted).sum(-1)))
            return _stats(*checkpoint_name(sums, _SUMS))

        kept = [_SUMS] * gpu + [_LOGITS] * (chunk >= x.shape[1])
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return in_chunks(jax.checkpoint(stats, policy=policy), x, targets, chunk)

    rows = ("batch", None)
    in_axes = (("batch", "sequence", None), ("embed", "vocab"), rows, ())
    split = parallel.per_shard(part, in_axes, HeadStats(rows, rows))
    return split(x_RxTxD, head_DxV, targets_RxT, jnp.float32(temperature))


def _stats(total, taken, mean) -> HeadStats:
    """From sums over x, a cell's logits over the temperature and less their maximum: exp(x), the
    target's x, exp(x) x."""
    log_total = jnp.log(total)
    return HeadStats(taken - log_total, log_total - mean / total)


@jax.custom_vjp
def _sums(logits_RxcxV, targets_Rxc, temperature):
    """What `_stats` wants, by a kernel that reads logits once; and so does the backward pass."""
    return _sums_forward(logits_RxcxV, targets_Rxc, temperature)[0]


def _sums_forward(logits_RxcxV, targets_Rxc, temperature):
    R, c, V = logits_RxcxV.shape
    sums = softmax_triton.block_sums(logits_RxcxV.reshape(R * c, V), temperature).of_rows()
    top, total, mean = checkpoint_name([x.reshape(R, c) for x in sums], _SUMS)
    taken = jnp.take_along_axis(logits_RxcxV, targets_Rxc[..., None], -1)[..., 0] / temperature
    taken = checkpoint_name(taken - top, _SUMS)
    return (total, taken, mean), (logits_RxcxV, targets_Rxc, temperature, top)


def _sums_backward(kept, grads):
    logits_RxcxV, targets, temperature, top = kept
    of_total, of_taken, of_mean, top, targets = (x[..., None] for x in (*grads, top, targets))
    x = logits_RxcxV / temperature - top
    taken = jnp.arange(x.shape[-1]) == targets
    grad = jnp.exp(x) * (of_total + of_mean * (x + 1)) + jnp.where(taken, of_taken, 0.0)
    return grad / temperature, None, None


_sums.defvjp(_sums_forward, _sums_backward)


@jax.custom_vjp
def _summed_at(grads_at, head):
    """`head`, whose gradient goes to the float32 array `grads_at`, which nothing reads. Each
    chunk's backward pass would convert `grads_at.astype(head.dtype)` again."""
    return head


_summed_at.defvjp(
    lambda grads_at, head: (head, None), lambda _, grad: (grad.astype(jnp.float32), None)
)


def in_chunks(stats, x_RxTxD, targets_RxT, chunk: int) -> HeadStats:
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
