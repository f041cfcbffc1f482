"""`draw.draw` of the whole distribution, for NVIDIA GPUs: a Pallas kernel by Triton.

XLA reads the logits four times for a token, which takes as long as two layers of 0.5B. Here they
are read once, each block of a row by a program, for maximum, sum and entropy; and again the one
block in which the running sum passes the uniform number's share of all: there is the token.

Dims: S slots, V vocabulary, J blocks of a row, b tokens of a block.
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
    b = min(_BLOCK, pl.next_power_of_2(V))
    J = pl.cdiv(V, b)
    how = dict(
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=parallel.platform() != "gpu",
    )
    row = lambda n: pl.BlockSpec((None, n), lambda s, *_: (s, 0))
    number = lambda *at: pl.BlockSpec((1,), lambda s, *_: at or (s,))
    sums = pl.pallas_call(
        functools.partial(_sum_block, vocab=V, b=b),
        grid=(S, J),
        in_specs=[row(V), number(0)],
        out_specs=[row(J)] * 3,
        out_shape=[jax.ShapeDtypeStruct((S, J), jnp.float32)] * 3,
        name="draw_sums",
        **how,
    )(logits_SxV, jnp.reshape(temperature, 1))
    drawn = pl.pallas_call(
        functools.partial(_draw_row, vocab=V, b=b),
        grid=(S,),
        in_specs=[row(V), number(0), number(), *[row(J)] * 3],
        out_specs=[number()] * 3,
        out_shape=[jax.ShapeDtypeStruct((S,), x) for x in (jnp.int32, jnp.float32, jnp.float32)],
        name="draw",
        **how,
    )(logits_SxV, jnp.reshape(temperature, 1), uniform_S, *sums)
    return Drawn(*drawn)


def _scaled(logits_ref, temperature_ref, j, vocab: int, b: int):
    """Block j of a row's logits over the temperature; _LOWEST behind the vocabulary."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    there_b = j * b + jnp.arange(b) < vocab
    x_b = triton.load(logits_ref.at[pl.ds(j * b, b)], mask=there_b, other=0.0)
    return jnp.where(there_b, jnp.maximum(x_b / temperature_ref[0], _LOWEST), _LOWEST)


def _sum_block(logits_ref, temperature_ref, top_ref, total_ref, mean_ref, *, vocab, b):
    """A block's largest x, and the sums of exp(x - that) and of that times x - that."""
    from jax.experimental import pallas as pl

    j = pl.program_id(1)
    x_b = _scaled(logits_ref, temperature_ref, j, vocab, b)
    top = x_b.max()
    weight_b = jnp.exp(x_b - top)
    top_ref[j], total_ref[j] = top, weight_b.sum()
    mean_ref[j] = (weight_b * (x_b - top)).sum()


def _draw_row(
    logits_ref, temperature_ref, uniform_ref, top_ref, total_ref, mean_ref, token_ref, logp_ref,
    entropy_ref, *, vocab, b,
):  # fmt: skip
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    J = top_ref.shape[0]
    index_J, index_b = jnp.arange(pl.next_power_of_2(J)), jnp.arange(b)
    of = lambda ref, other: triton.load(ref.at[index_J], mask=index_J < J, other=other)
    top_J, total_J, mean_J = of(top_ref, _LOWEST), of(total_ref, 0.0), of(mean_ref, 0.0)
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
    weight_b = jnp.exp(_scaled(logits_ref, temperature_ref, chosen, vocab, b) - top)
    token = first(weight_b, below, index_b)
    taken = jnp.where(index_b == token, weight_b, 0.0).sum()
    log_total = jnp.log(total)
    token_ref[0] = chosen * b + token
    logp_ref[0] = jnp.log(taken) - log_total
    entropy_ref[0] = log_total - mean / total
