"""The heavy parts of training and decoding, chosen once by devices, sizes and dtype: here and in
head.py for any mesh, in one_cpu.py for one CPU that holds a large model or vocabulary.

Dims: S rows, D hidden, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dapo_jax.model import adapters, head, one_cpu, ops, qwen2
from dapo_jax.parallel import constrain


def accumulate(loss, trained, loops):
    """(gradient, sums, maxima) of `loss(trained, i, T) -> (loss, (sums, maxima))` in the loops over
    i that `Learner.loops` gives; float32. Nothing of a micro-batch outlives it."""
    grad_fn = jax.grad(loss, has_aux=True)
    sums, maxima = jax.eval_shape(loss, trained, 0)[1]

    def add(T, i, carry):
        total, sums, maxima = carry
        # The barrier keeps XLA from moving the reductions over devices behind the loop: all of each
        # gradient would then be kept on every device (and libtpu 0.0.42 breaks off on it).
        grads, (more_sums, more_maxima) = jax.lax.optimization_barrier(grad_fn(trained, i, T))
        return (
            jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads),
            jax.tree.map(jnp.add, sums, more_sums),
            jax.tree.map(jnp.maximum, maxima, more_maxima),
        )

    carry = tuple(map(qwen2.zeros, (trained, sums, maxima)))
    for T, *span in loops:
        carry = jax.lax.fori_loop(*span, functools.partial(add, T), carry)
    return carry


def apply(tx: optax.GradientTransformation, params, opt_state, grads, lr):
    """One optimizer step at learning rate `lr`; returns the old state where the gradient or any new
    parameter is not finite. (params, opt_state, gradient norm before clipping, skipped)."""
    norm = optax.tree.norm(grads)
    step, new_state = tx.update(grads, opt_state, params)
    new_params = jax.tree.map(lambda p, u: p - lr * u, params, step)
    finite = jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(new_params))
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
    return keep(new_params, params), keep(new_state, opt_state), norm, ~finite


def clip_by_global_norm(largest: float) -> optax.GradientTransformationExtraArgs:
    """optax's. by_product: one multiplication, which XLA repeats in each pass that reads the
    gradient (one_cpu.apply); of optax's quotient it would keep a copy of the model's size."""
    clip = optax.clip_by_global_norm(largest)

    def update(grads, state, params=None, *, by_product: bool = False, **_):
        if not by_product:
            return clip.update(grads, state, params)
        factor = largest / jnp.maximum(optax.tree.norm(grads), largest)
        return jax.tree.map(lambda g: factor * g, grads), state

    return optax.GradientTransformationExtraArgs(clip.init, update)


def decode_logits(model, inside: bool = False, masked: bool = False):
    """(x_Sx1xD, active_S) -> logits float32 [S, V], in the loop over tokens. inside: multiply by a
    tied embedding as it lies, of which XLA would make a transposed copy before the loop. masked:
    logits of idle rows are 0, or XLA's library for CPUs would find each row's maximum as it
    multiplies, in memory that it allocates each time."""
    before = None if inside else model.head()

    def logits(x_Sx1xD, active_S):
        head_DxV = model.head() if inside else before
        logits_SxV = constrain(ops.logits(x_Sx1xD[:, 0], head_DxV), "batch", "vocab")
        return jnp.where(active_S[:, None], logits_SxV, 0.0) if masked else logits_SxV

    return logits


class Kernels(NamedTuple):
    """Functions with the signatures of those that are the defaults, and how rows are drawn."""

    head_stats: Callable = head.head_stats
    accumulate: Callable = accumulate
    apply: Callable = apply
    decode_logits: Callable = decode_logits
    rows_apart: bool = False  # a token is drawn for one row after the other


def choose(mesh: Mesh, shape: qwen2.Shape, dtype) -> Kernels:
    """The kernels of a network of this shape that computes in `dtype` on these devices."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    alone = cpu and mesh.size == 1
    vocabulary = alone and shape.vocab_size >= one_cpu.LARGE_VOCABULARY
    trained = jax.tree.leaves(adapters.trained(qwen2.abstract(shape)))
    large = alone and sum(w.size for w in trained) >= one_cpu.LARGE_MODEL
    # jax 0.10 can add to a place neither what has to be cast nor cuts of a stack of layers.
    in_place = large and np.dtype(dtype) == np.float32 and shape.scan_layers
    return Kernels(
        head_stats=one_cpu.head_stats if vocabulary else head.head_stats,
        accumulate=one_cpu.accumulate if in_place else accumulate,
        apply=one_cpu.apply if large else apply,
        decode_logits=functools.partial(decode_logits, inside=vocabulary, masked=cpu),
        rows_apart=vocabulary,
    )
