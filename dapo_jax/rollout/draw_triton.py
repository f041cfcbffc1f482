"""`draw.draw` of the whole distribution, for NVIDIA GPUs: a Pallas kernel by Triton.

XLA reads the logits four times for a token, which takes as long as two layers of 0.5B. Here they
are read once, for maximum, sum and entropy (softmax_triton.py); and again the one block in which
the running sum passes the uniform number's share of all: there is the token.

Dims: S slots, V vocabulary, J blocks of a row, b tokens of a block.
"""

import functools

import jax
import jax.numpy as jnp

from dapo_jax import parallel
from dapo_jax.model.softmax_triton import LOWEST, block_sums, block_tokens, how, scaled
from dapo_jax.rollout import draw as xla
from dapo_jax.rollout.draw import Drawn


def draw(logits_SxV, uniform_S, temperature, top_p, mode: str, near=None) -> Drawn:
    """`draw.draw`: by the kernel in mode 'full' where each GPU holds its rows' whole vocabulary."""
    if mode != "full" or not parallel.runs_triton() or parallel.axis_size("vocab") > 1:
        return xla.draw(logits_SxV, uniform_S, temperature, top_p, mode, near)
    row = ("batch",)
    split = parallel.per_shard(by_kernel, (("batch", None), row, ()), Drawn(row, row, row))
    drawn = split(logits_SxV, uniform_S, temperature)
    if near is None:
        return drawn
    scaled_SxV = logits_SxV / temperature
    weight_SxV = jnp.exp(scaled_SxV - scaled_SxV.max(-1, keepdims=True))
    told_S = near(scaled_SxV, weight_SxV, weight_SxV, drawn.token_S, uniform_S, top_p, mode)
    return drawn._replace(near_S=told_S)


def by_kernel(logits_SxV: jax.Array, uniform_S: jax.Array, temperature: jax.Array) -> Drawn:
    """Mode 'full', of logits float32 that one device holds whole. As by XLA to rounding: a
    token differs where the uniform number lies that near to the border between two tokens. Off GPUs
    it is interpreted, for tests."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py

    S, V = logits_SxV.shape
    b, sums = block_tokens(V), block_sums(logits_SxV, temperature)
    row = lambda x: pl.BlockSpec((None, x.shape[1]), lambda s: (s, 0))
    number = lambda *at: pl.BlockSpec((1,), lambda s: at or (s,))
    drawn = pl.pallas_call(
        functools.partial(_draw_row, vocab=V, b=b),
        grid=(S,),
        in_specs=[row(logits_SxV), number(0), number(), *map(row, sums)],
        out_specs=[number()] * 3,
        out_shape=[jax.ShapeDtypeStruct((S,), x) for x in (jnp.int32, jnp.float32, jnp.float32)],
        name="draw",
        **how(),
    )(logits_SxV, jnp.reshape(temperature, 1), uniform_S, *sums)
    return Drawn(*drawn)


def _draw_row(
    logits_ref, temperature_ref, uniform_ref, top_ref, total_ref, mean_ref, token_ref, logp_ref,
    entropy_ref, *, vocab, b,
):  # fmt: skip
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    J = top_ref.shape[0]
    index_J, index_b = jnp.arange(pl.next_power_of_2(J)), jnp.arange(b)
    of = lambda ref, other: triton.load(ref.at[index_J], mask=index_J < J, other=other)
    top_J, total_J, mean_J = of(top_ref, LOWEST), of(total_ref, 0.0), of(mean_ref, 0.0)
    top = top_J.max()
    fade_J = jnp.exp(top_J - top)
    share_J = fade_J * total_J
    total, mean = share_J.sum(), (fade_J * (mean_J + total_J * (top_J - top))).sum()
    target = uniform_ref[0] * total

    def first(weight_x, before, index_x):
        """The index of some weight at which the running sum passes the target; the last such one
        where sums of two orders leave it below."""
        live_x = weight_x > 0
        passed_x = live_x & (before + jnp.cumsum(weight_x) > target)
        at = jnp.where(passed_x, index_x, len(index_x)).min()
        return jnp.where(at < len(index_x), at, jnp.where(live_x, index_x, 0).max())

    chosen = first(share_J, 0.0, index_J)
    below = jnp.where(index_J < chosen, share_J, 0.0).sum()
    weight_b = jnp.exp(scaled(logits_ref, temperature_ref, chosen, vocab, b) - top)
    token = first(weight_b, below, index_b)
    taken = jnp.where(index_b == token, weight_b, 0.0).sum()
    log_total = jnp.log(total)
    token_ref[0] = chosen * b + token
    logp_ref[0] = jnp.log(taken) - log_total
    entropy_ref[0] = log_total - mean / total
