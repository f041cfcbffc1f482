"""The field's other objectives: each a function of a token's log-probs and a line of a table.

`config.loss.objective` names an entry of OBJECTIVES or a function of the user's (own_objective.py),
`config.loss.importance` an entry of IMPORTANCE. Both are static: a run compiles what it uses, and
DAPO's program knows nothing of the others. All take what `objective.ppo_clip` takes; outside
responses log-probs and advantages are 0. The mean over tokens is no part of them
(`objective.token_weights`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.dapo.objective import Choice, TokenLoss, importance_weight, ppo_clip, ratio_of
from dapo_jax.variants import own_objective
from dapo_jax.variants.dppo import dppo_kl, dppo_tv
from dapo_jax.variants.over_batch import unclipped


def cispo(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """-clip(ratio, 1 - low, 1 + high) A log pi, with no gradient through the clip: no token is
    dropped, a bound caps what it weighs. MiniMax-M1 (arXiv 2506.13585, Eq. 4-5) and ScaleRL
    (arXiv 2510.13786, Eq. 4) use no lower bound, clip_low 1; TRL's absolute `epsilon_high` 5 is
    clip_high 4. The loss's value depends on log pi and says nothing."""
    ratio = ratio_of(logp - old_logp, c)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - c.clip_low, 1 + c.clip_high))
    low, high = ratio < 1 - c.clip_low, ratio > 1 + c.clip_high
    return TokenLoss(-weight * advantage * logp, ratio, low, high, jnp.zeros_like(low))


def gspo(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """PPO's clip of the geometric mean of the response's ratios (arXiv 2507.18071, Eq. 5-7)."""
    return ppo_clip(per_response.mean(logp - old_logp), 0.0, advantage, c)


def gspo_token(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """GSPO-token (Eq. 13-15): GSPO's value, and a gradient through the token alone. The same as
    `gspo` where a response has one advantage, as here; this sums over responses forwards only."""
    mean = per_response.mean(logp - old_logp)
    return ppo_clip(jax.lax.stop_gradient(mean - logp) + logp, 0.0, advantage, c)


def rloo(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """PPO's clip of the product of the response's ratios: the response is one action (arXiv
    2402.14740; the clip is TRL's). At ratio 1 the gradient is REINFORCE's."""
    return ppo_clip(per_response.sum(logp - old_logp), 0.0, advantage, c)


def sapo(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """-4 / tau sigmoid(tau (ratio - 1)) A: a soft gate in place of the clip (arXiv 2511.20347). The
    gradient at ratio 1 is the policy gradient and fades on both sides; nothing is clipped."""
    tau = jnp.where(advantage > 0, 1.0, 1.05)  # the paper's, of positive and of other advantages
    ratio = ratio_of(logp - old_logp, c)
    never = jnp.zeros_like(ratio, bool)
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
    return TokenLoss(-gate * advantage, ratio, never, never, never)


class Objective(NamedTuple):
    token_loss: Callable[..., TokenLoss]
    dual_clip: bool = False  # whether loss.dual_clip has a meaning in it
    of_responses: bool = False  # its ratio is a response's: loss.normalizer 'sequence' is meant


OBJECTIVES = {
    "ppo": Objective(ppo_clip, dual_clip=True),
    "cispo": Objective(cispo),
    "gspo": Objective(gspo, of_responses=True),
    "gspo_token": Objective(gspo_token, of_responses=True),
    "rloo": Objective(rloo, of_responses=True),
    "sapo": Objective(sapo),
    "dppo_tv": Objective(dppo_tv, dual_clip=True),
    "dppo_kl": Objective(dppo_kl, dual_clip=True),
    # What over_batch.py prepares for each update:
    "clip_cov": Objective(ppo_clip),
    "kl_cov": Objective(unclipped),
    "high_entropy": Objective(ppo_clip, dual_clip=True),
    "ess": Objective(cispo),
}


# The weight of pi_trainer / pi_sampler; never differentiated, and never part of a clip


def _kept(weight, ratio, c):
    """`weight` where the ratio is within its bounds, else 0, which stays in every denominator."""
    return jnp.where((ratio >= c.importance_floor) & (ratio <= c.importance_cap), weight, 0.0)


def token_mask(old_logp, sampled_logp, c, per_response):
    """The token's ratio, or 0. IcePop (arXiv 2510.18855: .5 to 5); with an upper bound alone what
    AReaL called `behave_imp_weight_cap`."""
    ratio = ratio_of(old_logp - sampled_logp, c)
    return _kept(ratio, ratio, c)


def sequence(old_logp, sampled_logp, c, per_response):
    """min(product over the response, cap), the same for all its tokens."""
    return jnp.minimum(ratio_of(per_response.sum(old_logp - sampled_logp), c), c.importance_cap)


def sequence_mask(old_logp, sampled_logp, c, per_response):
    """The product over the response, or 0 for all of it (TRL's default). Over thousands of tokens a
    product leaves any band by noise alone; there rather `mean_mask`."""
    ratio = ratio_of(per_response.sum(old_logp - sampled_logp), c)
    return _kept(ratio, ratio, c)


def mean(old_logp, sampled_logp, c, per_response):
    """min(geometric mean over the response, cap)."""
    return jnp.minimum(ratio_of(per_response.mean(old_logp - sampled_logp), c), c.importance_cap)


def mean_mask(old_logp, sampled_logp, c, per_response):
    """Tokens' ratios if the geometric mean is within bounds (NeMo-RL's `seq-mask-tis`)."""
    gap = old_logp - sampled_logp
    return _kept(ratio_of(gap, c), ratio_of(per_response.mean(gap), c), c)


IMPORTANCE: dict[str, Callable[..., jax.Array]] = {
    "token": importance_weight,
    "token_mask": token_mask,
    "sequence": sequence,
    "sequence_mask": sequence_mask,
    "mean": mean,
    "mean_mask": mean_mask,
}


def choice(loss) -> Choice:
    """The functions that `config.loss` names; its checks are in validation.py. Without
    `importance_cap` there is no weight, whichever it would be."""
    weight = IMPORTANCE[loss.importance] if loss.importance_cap else None
    return Choice(named(loss.objective).token_loss, weight)


def named(name: str) -> Objective:
    """An entry of OBJECTIVES, or the objective FILE.py:FUNCTION. ValueError: it is neither."""
    return OBJECTIVES.get(name) or Objective(own_objective.load(name, OBJECTIVES))
