"""The clipped policy objective (paper Eq. 8), one token at a time, and what each token weighs.

The loss of a batch is sum(weight * token_loss). Every way of averaging is a choice of `weight`,
made on the host from lengths alone, so that the loss cannot depend on micro-batches, packing,
padding or mesh, and one compiled update serves them all:

    batch_tokens   1 / tokens of the mini-batch. TRL's and today's verl's "token mean"; the default.
    group_tokens   1 / (groups x tokens of the group). The paper's Eq. 8 read literally: a mean over
                   questions of means over the question's tokens.
    chunk_tokens   token means of chunks of `chunk_sequences` responses, weighted by their numbers
                   of responses. verl at the authors' commit, whose chunks were micro-batches.
    sequence       1 / (responses x tokens of the response). GRPO: a mean over responses of token
                   means.
    constant       1 / (responses x L_max). Dr. GRPO: a mean over responses of token sums.

Which function gives a token's loss is a static choice (`Choice`): the paper's is `ppo_clip`, the
field's others are in objectives.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Coefficients(NamedTuple):
    """Numbers of the objective; traced, so that changing one compiles nothing."""

    clip_low: float
    clip_high: float
    dual_clip: float  # inf = off
    log_ratio_max: float
    importance_cap: float
    kl_coef: float
    entropy_coef: float
    entropy_enough: float  # nats; inf = the bonus has no end
    importance_floor: float = 0.0  # weights below it are zeroed, where the choice is a mask


def coefficients(loss) -> Coefficients:
    """From `config.loss`, where 0 means off; float32."""
    numbers = Coefficients(
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip or np.inf,
        log_ratio_max=loss.log_ratio_max,
        importance_cap=loss.importance_cap,
        kl_coef=loss.kl_coef,
        entropy_coef=loss.entropy_coef,
        entropy_enough=loss.entropy_enough or np.inf,
        importance_floor=loss.importance_floor,
    )
    return jax.tree.map(np.float32, numbers)


class PerResponse(NamedTuple):
    """Reductions over the trained tokens of a response, for losses whose ratio is a response's;
    each takes and gives an array of the tokens' shape, 0 outside responses."""

    sum: Callable[[jax.Array], jax.Array]
    mean: Callable[[jax.Array], jax.Array]


class TokenLoss(NamedTuple):
    """Per-token terms, all of the shape of the inputs."""

    loss: jax.Array
    ratio: jax.Array
    clipped_low: jax.Array  # bool: the lower bound cut this token's gradient
    clipped_high: jax.Array  # bool: the upper bound did
    dual_clipped: jax.Array  # bool: the dual clip did


def ratio_of(log_ratio, c: Coefficients) -> jax.Array:
    """exp(log_ratio), clamped so that one token cannot overflow."""
    return jnp.exp(jnp.clip(log_ratio, -c.log_ratio_max, c.log_ratio_max))


def ppo_clip(logp, old_logp, advantage, c: Coefficients, per_response=None) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), at most -c A where A < 0 (dual clip)."""
    ratio = ratio_of(logp - old_logp, c)
    unclipped_loss = -advantage * ratio
    clipped_loss = -advantage * jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high)
    loss = jnp.maximum(unclipped_loss, clipped_loss)
    # Where A < 0; elsewhere no bound. inf * 0 must not be formed.
    bound = jnp.where(
        advantage < 0, -jnp.where(advantage < 0, advantage, -1.0) * c.dual_clip, jnp.inf
    )
    low = (clipped_loss > unclipped_loss) & (ratio < 1 - c.clip_low)
    high = (clipped_loss > unclipped_loss) & (ratio > 1 + c.clip_high)
    return TokenLoss(jnp.minimum(loss, bound), ratio, low, high, loss > bound)


def importance_weight(old_logp, sampled_logp, c: Coefficients, per_response=None) -> jax.Array:
    """min(pi_trainer / pi_sampler, cap), for samplers whose probabilities are not the trainer's."""
    return jnp.minimum(ratio_of(old_logp - sampled_logp, c), c.importance_cap)


class Choice(NamedTuple):
    """What of the objective is code and no number: static, part of the compiled update."""

    token_loss: Callable[..., TokenLoss] = ppo_clip
    importance: Callable[..., jax.Array] | None = None  # weight of a token; None = all weigh 1
    aged: bool = False  # whether what it mends is the age of tokens too


DAPO = Choice()


def k3(logp, ref_logp) -> jax.Array:
    """Schulman's estimate of KL(policy || reference) from the policy's samples: r - 1 - log r with
    r = pi_ref / pi. Never negative."""
    log_r = jnp.clip(ref_logp - logp, -20.0, 20.0)
    return jnp.exp(log_r) - 1 - log_r


def token_weights(
    tokens_Q: np.ndarray, group_Q: np.ndarray, normalizer: str, chunk_sequences: int, max_tokens=1
) -> np.ndarray:
    """What one token of each response weighs; float64 [Q].

    tokens_Q: trained tokens of each response, 0 where filtered out (it counts in no denominator).
    group_Q: its group. max_tokens: L_max, of 'constant'. The weights of all trained tokens add up
    to 1 (0 when there are none); with 'constant' to the mean length over L_max.
    """
    tokens_Q = np.asarray(tokens_Q, np.float64)
    kept_Q = tokens_Q > 0
    responses = max(kept_Q.sum(), 1)
    if normalizer == "batch_tokens":
        share_Q = np.full(tokens_Q.shape, 1 / max(tokens_Q.sum(), 1))
    elif normalizer == "sequence":
        share_Q = 1 / (responses * np.maximum(tokens_Q, 1))
    elif normalizer == "constant":
        share_Q = np.full(tokens_Q.shape, 1 / (responses * max_tokens))
    else:
        by_group = normalizer == "group_tokens"  # else by chunks of consecutive kept responses
        part_Q = group_Q if by_group else (np.cumsum(kept_Q) - 1) // chunk_sequences
        _, part_Q = np.unique(part_Q, return_inverse=True)
        part_tokens, part_responses = np.bincount(part_Q, tokens_Q), np.bincount(part_Q, kept_Q)
        live = part_responses > 0
        part_share = live / max(live.sum(), 1) if by_group else part_responses / responses
        share_Q = (part_share / np.maximum(part_tokens, 1))[part_Q]
    return np.where(kept_Q, share_Q, 0.0)
