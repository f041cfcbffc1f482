"""Positions where another program might have drawn another token: the uniform number lies within
rounding of an edge of the token's interval, or the two best logits within rounding of each other.

The same logits from a program of another shape are sums in another order. What that may do to a
draw has two parts. The draw's own is bounded: draw.py's operations are known, and the worst order
of each sum is taken. That of the logits is allowed for, as no depth of layers has a bound that
tells anything: `allowance` says from what.

Dims: S slots, V vocabulary.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.model import paged, qwen2
from dapo_jax.rollout import draw

EPS = 2.0**-24  # the most that rounding to float32 changes a number, of its size
INT8 = 2.0**-8  # half a step of int8's 127, of a head's largest number
PRODUCTS = 7  # one behind the other in a layer: q k v, scores, values, o, gate and up, down; a norm
THRICE = 3  # roundings: of the two programs, and of the sums here


def allowance(shape: qwen2.Shape, dtype, quantized: bool) -> float:
    """How far the logits of two programs may lie apart, of the largest |logit|: sqrt(2 N) e, N
    products one behind the other in either program, errors that add up by chance and are passed on
    as large as they are. e, of one of them: a sum of n products of mixed signs errs by about
    sqrt(n) / 3 roundings to float32 of its typical size (sums of one sign, a softmax's, by no
    more), and the result is rounded to `dtype`, kept in int8 to half a step. The thrice that is
    left out of sqrt(n), and the largest logit in place of a typical one, three to four times it,
    stand for the furthest of V logits and for layers that enlarge what they are given."""
    width = max(shape.hidden_size, shape.intermediate_size)
    products = PRODUCTS * shape.num_layers + 1
    rounded = max(float(jnp.finfo(dtype).eps) / 2, INT8 * quantized)
    return math.sqrt(2 * products) * math.hypot(rounded, EPS * math.sqrt(width))


def of(shape: qwen2.Shape, dtype, g: paged.Geometry) -> Callable | None:
    """`near` of a sampler's programs; None without drafts."""
    return functools.partial(near, allowance(shape, dtype, g.quantized)) if g.gathers else None


def near(allowed: float, scaled_SxV, weight_SxV, kept_SxV, token_S, uniform_S, top_p, mode: str):
    """bool [S]: whether rounding could make `draw.draw` draw another token than `token_S`.

    allowed: of `allowance`. The others are that function's: float32 logits over temperature, their
    weights exp(logit - largest), those of them that may be drawn, uniform, nucleus mass, mode.

    A weight is off by a factor exp(x) at most: each logit by what `allowed` is of the largest, and
    by its roundings: the quotient, the difference (of numbers up to 2 L), and exp (2 ulp). A share
    B of the whole then moves by B (1 - B) (exp(2 x) - 1) at most: as if all below the edge were
    heavier and all above lighter. Sums add to that: in blocks of b tokens and over n blocks, each
    term is rounded n + b times at most, in the running sum and in the total; then the rest of a
    block, up to the whole, b + 4 times. (Weights below float32's least add up to nothing.)"""
    # So that nothing of the draw is fused with what is made here: its bits stay.
    given = jax.lax.optimization_barrier((scaled_SxV, weight_SxV, kept_SxV))
    scaled_SxV, weight_SxV, kept_SxV = given
    live_SxV = weight_SxV > 0
    largest_S = jnp.where(live_SxV, jnp.abs(scaled_SxV), 0.0).max(-1)
    off_S = allowed * largest_S + THRICE * EPS * (4 * largest_S + 4)
    index_V = jnp.arange(scaled_SxV.shape[-1])
    if mode == "greedy":
        other_SxV = jnp.where(index_V == token_S[:, None], -jnp.inf, scaled_SxV)
        return scaled_SxV.max(-1) - other_SxV.max(-1) <= 2 * off_S

    n, b = draw.blocks(scaled_SxV.shape[-1])
    mass = lambda held_SxV: draw.in_blocks(jnp.where(held_SxV, kept_SxV, 0.0), 0.0).sum(-1).sum(-1)
    below_S, above_S = mass(index_V < token_S[:, None]), mass(index_V > token_S[:, None])
    total_S = below_S + mass(index_V == token_S[:, None]) + above_S
    moves = lambda share: share * (1 - share) * jnp.expm1(2 * off_S)
    summed_S = THRICE * EPS * (2 * (n + b + 1) * uniform_S + b + 4)
    low_S, high_S = below_S / total_S, above_S / total_S  # shares on either side of the token
    at_low_S = (below_S > 0) & (uniform_S - low_S <= moves(low_S) + summed_S)
    at_high_S = (above_S > 0) & (1 - uniform_S - high_S <= moves(high_S) + summed_S)
    near_S = at_low_S | at_high_S
    return (
        near_S | _other_nucleus(weight_SxV, kept_SxV, top_p, off_S) if mode == "top_p" else near_S
    )


def _other_nucleus(weight_SxV, kept_SxV, top_p, off_S):
    """bool [S]: whether rounding could cut another nucleus: one more token, one less (of tied ones
    too), or another in place of the least. Sums over V err by chance here, by less than sqrt(V)
    roundings: of the worst order all would be near."""
    whole_S = weight_SxV.sum(-1)
    least_S = jnp.where(kept_SxV > 0, kept_SxV, jnp.inf).min(-1)
    next_S = jnp.where(kept_SxV > 0, 0.0, weight_SxV).max(-1)
    share_S = kept_SxV.sum(-1) / whole_S
    fewer_S = share_S - least_S / whole_S
    summed = 2 * THRICE * EPS * math.sqrt(weight_SxV.shape[-1])
    far = lambda share: share * (1 - share) * jnp.expm1(2 * off_S) + summed
    less_S = top_p - fewer_S <= far(fewer_S)
    more_S = (next_S > 0) & (share_S - top_p <= far(share_S))
    return (top_p < 1) & (more_S | less_S | (next_S >= least_S * jnp.exp(-2 * off_S)))
