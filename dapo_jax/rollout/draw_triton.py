"""`draw.draw` of the whole distribution, for NVIDIA GPUs: a Pallas kernel by Triton.

XLA reads the logits four times for a token, which takes as long as two layers of 0.5B. Here one
program a row reads them once for maximum, sum and entropy, and again up to the block in which the
running sum passes the uniform number's share of that sum; in that block it finds the token.

Dims: S slots, V vocabulary, b tokens of a block.
"""

import functools

import jax
import jax.numpy as jnp

from dapo_jax import parallel
from dapo_jax.rollout import draw as xla
from dapo_jax.rollout.draw import Drawn

_BLOCK, _WARPS = 4096, 8  # tokens of the vocabulary that a program reads at a time
_LOWEST = -1e30  # finite: exp of a difference to it is 0 and not NaN


def draw(logits_SxV, uniform_S, temperature, top_p, mode: str, near=None) -> Drawn:
    """`draw.draw`: by the kernel in mode 'full' where each GPU holds its rows' whole vocabulary."""
    if mode != "full" or parallel.platform() != "gpu" or parallel.axis_size("vocab") > 1:
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
    from jax.experimental.pallas import triton

    S, V = logits_SxV.shape
    number = pl.BlockSpec((1,), lambda s: (s,))
    out = [jax.ShapeDtypeStruct((S,), x) for x in (jnp.int32, jnp.float32, jnp.float32)]
    drawn = pl.pallas_call(
        functools.partial(_draw_row, vocab=V, block=min(_BLOCK, pl.next_power_of_2(V))),
        grid=(S,),
        in_specs=[
            pl.BlockSpec((None, V), lambda s: (s, 0)),
            number,
            pl.BlockSpec((1,), lambda s: (0,)),
        ],
        out_specs=[number] * 3,
        out_shape=out,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=parallel.platform() != "gpu",
        name="draw",
    )(logits_SxV, uniform_S, jnp.reshape(temperature, 1))
    return Drawn(*drawn)


def _draw_row(logits_ref, uniform_ref, temperature_ref, token_ref, logp_ref, entropy_ref, **sizes):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    vocab, block = sizes["vocab"], sizes["block"]
    index_b, temperature = jnp.arange(block), temperature_ref[0]

    def scaled(j):
        there_b = j * block + index_b < vocab
        x_b = triton.load(logits_ref.at[pl.ds(j * block, block)], mask=there_b, other=0.0)
        return jnp.where(there_b, jnp.maximum(x_b / temperature, _LOWEST), _LOWEST)

    def add(j, carry):
        top, total, mean = carry  # sums of exp(x - top), and of that times x - top
        x_b = scaled(j)
        new_top = jnp.maximum(top, x_b.max())
        fade, shifted_b = jnp.exp(top - new_top), x_b - new_top
        weight_b = jnp.exp(shifted_b)
        mean = fade * (mean + total * (top - new_top)) + (weight_b * shifted_b).sum()
        return new_top, fade * total + weight_b.sum(), mean

    blocks, zero, none = pl.cdiv(vocab, block), jnp.int32(0), jnp.float32(0)
    top, total, mean = jax.lax.fori_loop(0, blocks, add, (jnp.float32(_LOWEST), none, none))
    target = uniform_ref[0] * total

    def seek(carry):
        j, before, chosen, below, _ = carry  # chosen: the last block of some weight, `below` it
        share = jnp.exp(scaled(j) - top).sum()
        chosen, below = jnp.where(share > 0, j, chosen), jnp.where(share > 0, before, below)
        return j + 1, before + share, chosen, below, before + share > target

    more = lambda carry: (carry[0] < blocks) & ~carry[-1]
    _, _, chosen, below, _ = jax.lax.while_loop(more, seek, (zero, none, zero, none, False))

    weight_b = jnp.exp(scaled(chosen) - top)
    live_b = weight_b > 0
    passed_b = live_b & (below + jnp.cumsum(weight_b) > target)
    first = jnp.where(passed_b, index_b, block).min()
    # Sums of two orders: where the last one stays below, the last token of some weight.
    first = jnp.where(first < block, first, jnp.where(live_b, index_b, 0).max())
    taken = jnp.where(index_b == first, weight_b, 0.0).sum()
    log_total = jnp.log(total)
    token_ref[0] = chosen * block + first
    logp_ref[0] = jnp.log(taken) - log_total
    entropy_ref[0] = log_total - mean / total
