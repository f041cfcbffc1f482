"""The value model's loss of a token.

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
