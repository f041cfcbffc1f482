"""Rotary embedding (RoPE, arXiv 2104.09864) and YaRN, which stretches its context."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax import parallel


class Yarn(NamedTuple):
    """YaRN (arXiv 2309.00071) stretches the context of RoPE; as config.json's rope_scaling."""

    factor: float  # new context / old
    original: int  # tokens of the old context
    attention_factor: float  # of queries and keys each
    beta_fast: float = 32.0  # frequencies of more turns than this in the old context stay
    beta_slow: float = 1.0  # those of fewer are divided by `factor`; between them, a ramp


def angles(positions_BxT, head_dim: int, theta: float, yarn: Yarn | None = None):
    """(cos, sin) of rotary embedding, float32 [B, 1, T, d/2], the same for all heads and layers.
    YaRN's attention factor is in them, so that whatever rotates queries and keys applies it."""
    half = head_dim // 2
    frequency_half = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if yarn:
        frequency_half *= yarn_scale(head_dim, theta, yarn)
    angle = positions_BxT[:, None, :, None].astype(jnp.float32) * frequency_half
    turns = jnp.cos(angle), jnp.sin(angle)
    turns = tuple(yarn.attention_factor * x for x in turns) if yarn else turns
    if parallel.platform() == "cpu":
        # A product with 1, or XLA makes them again for each head of each layer, barrier or not.
        return tuple(jnp.matmul(x, jnp.eye(half), precision="highest") for x in turns)
    return jax.lax.optimization_barrier(turns)


def yarn_scale(head_dim: int, theta: float, yarn: Yarn) -> np.ndarray:
    """What YaRN multiplies each frequency by, float32 [d/2]: 1 for the fast ones, 1 / factor for
    the slow. As in transformers, the ramp begins and ends at whole dimensions."""
    octave = 2 * math.log(theta)
    at = lambda turns: head_dim * math.log(yarn.original / (turns * 2 * math.pi)) / octave
    low = max(math.floor(at(yarn.beta_fast)), 0)
    high = min(math.ceil(at(yarn.beta_slow)), head_dim - 1)
    high = high if high != low else low + 0.001
    slow_half = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return (1 - slow_half + slow_half / yarn.factor).astype(np.float32)


def rotate(x_BxHxTxd, angles):
    """Half-split as in Hugging Face's Qwen2: dimension i pairs with i + d/2."""
    cos, sin = angles
    a, b = jnp.split(x_BxHxTxd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxHxTxd.dtype)
