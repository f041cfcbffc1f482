"""The value model's loss of a token, and how much of the returns it explains.

The baseline of VAPO is PPO as in VC-PPO (arXiv 2503.01491); neither says whether values are
clipped. Here they are where asked for, as PPO's reference does, and are not by default.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ValueLoss(NamedTuple):
    """Per-token terms, all of the shape of the inputs."""

    loss: jax.Array
    clipped: jax.Array  # bool: the bound cut this token's gradient


def value_loss(values, old_values, returns, clip) -> ValueLoss:
    """.5 max((V - R)^2, (V_clipped - R)^2), V_clipped within `clip` of the old value.

    clip: in the reward's unit; inf = no bound. The mean over tokens is the caller's, by weights.
    """
    square = jnp.square(values - returns)
    bounded = jnp.clip(values, old_values - clip, old_values + clip)
    clipped_square = jnp.square(bounded - returns)
    return ValueLoss(0.5 * jnp.maximum(square, clipped_square), clipped_square > square)


def explained_variance(values, returns, trained) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over trained tokens; 1 is perfect, 0 a constant's,
    below 0 worse than one. NaN where the returns are all the same: there is nothing to explain.
    trained: bool, or weights; shapes alike."""
    weight = jnp.asarray(trained, jnp.float32)
    mean = lambda x: jnp.sum(weight * x) / jnp.maximum(jnp.sum(weight), 1e-30)
    variance = lambda x: mean(jnp.square(x - mean(x)))
    total = variance(returns)
    ratio = variance(returns - values) / jnp.where(total > 0, total, 1.0)
    return jnp.where(total > 0, 1.0 - ratio, jnp.nan)
