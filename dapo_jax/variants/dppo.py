"""DPPO (arXiv 2602.04879): a trust region of probabilities in place of a clip of ratios."""

import jax
import jax.numpy as jnp

from dapo_jax.dapo.objective import TokenLoss, ratio_of


def _within(logp, old_logp, advantage, c, low, high) -> TokenLoss:
    """DPPO's loss: -min(ratio, cap) A log pi of tokens within the trust region, no gradient through
    min (arXiv 2602.04879, section 5.4; its authors' cap is 20). cap: loss.dual_clip."""
    ratio = ratio_of(logp - old_logp, c)
    kept = ~(low | high)
    weight = jax.lax.stop_gradient(jnp.where(kept, jnp.minimum(ratio, c.dual_clip), 0.0))
    return TokenLoss(-weight * advantage * logp, ratio, low, high, kept & (ratio > c.dual_clip))


def dppo_tv(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """DPPO-Binary-TV (arXiv 2602.04879): a token leaves the loss where its probability has moved
    further than clip_high (or clip_low, down) in the direction of its advantage; not its ratio, so
    that rare tokens stay. The authors: .15 both, and the sampler's log-probs as the old ones."""
    moved = jnp.exp(logp) - jnp.exp(old_logp)
    low, high = (advantage <= 0) & (moved < -c.clip_low), (advantage > 0) & (moved > c.clip_high)
    return _within(logp, old_logp, advantage, c, low, high)


def dppo_kl(logp, old_logp, advantage, c, per_response) -> TokenLoss:
    """DPPO-Binary-KL: as dppo_tv, by KL(old || new) of "this token or another" (authors: .05)."""
    p, q = jnp.exp(logp), jnp.exp(old_logp)
    kl = q * (old_logp - logp) + (1 - q) * jnp.log((1 - q + 1e-8) / (1 - p + 1e-8))
    low = (advantage <= 0) & (kl > c.clip_low) & (p < q)
    high = (advantage > 0) & (kl > c.clip_high) & (p > q)
    return _within(logp, old_logp, advantage, c, low, high)
