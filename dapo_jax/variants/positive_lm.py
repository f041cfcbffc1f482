"""Positive-example language-model loss (VAPO Eq. 9-10): L = L_PPO + mu L_NLL,

    L_NLL = -(sum over tokens of right responses of log pi) / (tokens of right responses).

Right is what the judge says, not a shaped reward above 0; the divisor is that of the whole
mini-batch, so that micro-batches, packing and mesh change nothing; and a mini-batch without a right
response has a term of 0. It needs no value model: `loss.positive_coef` adds it to any objective.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dapo_jax import gate
from dapo_jax.algorithm import Algorithm
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.update import LossTerm

NLL = LossTerm("positive_loss", lambda logp_RxT, old, weight: -jnp.sum(weight * logp_RxT))


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm with this term where `loss.positive_coef` is set."""
    if not (coef := config.loss.positive_coef):
        return algorithm
    return algorithm._replace(terms=(*algorithm.terms, (NLL, functools.partial(weights, coef))))


def weights(coef: float, groups: Sequence[Group], tokens_MxG: np.ndarray) -> np.ndarray:
    """What a token of each response weighs: `coef` over the trained tokens of all right responses
    of the mini-batch; float64 [M, G]. ConfigError: the reward is a score alone."""
    if any(group.grades.right_G is None for group in groups):
        why = f"{coef} needs responses that are right or wrong, and the reward only scores"
        remedy = "give Grade(..., right=...), or set 0"
        raise gate.ConfigError(f"config.loss.positive_coef: {why}; {remedy}")
    right_MxG = np.stack([group.grades.right_G for group in groups]).astype(bool) & (tokens_MxG > 0)
    tokens = np.where(right_MxG, tokens_MxG, 0).sum()
    return np.where(right_MxG, coef / max(tokens, 1), 0.0)
