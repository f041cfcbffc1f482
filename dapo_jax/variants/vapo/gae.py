"""Generalized advantage estimation over packed rows: decoupled and length-adaptive.

    delta_t = r_t + gamma V_(t+1) - V_t,    A_t = delta_t + gamma lambda A_(t+1)

V_t is the value of the state in which token t is chosen; after the last token of a response V is 0,
or, of a truncated one under critic.bootstrap_truncated, that of the state it broke off in.
Decoupled GAE (VC-PPO, arXiv 2503.01491; VAPO section 4.1) takes two lambdas, one for the policy's
advantages and one for the value model's targets: with lambda and gamma 1 the target of every token
is the response's final reward, whatever V says.

Dims: R rows, T cells of a row; axes before them (A micro-batches) are as good as rows.
"""

import jax
import jax.numpy as jnp


def length_adaptive_lambda(length, alpha):
    """lambda = 1 - 1 / (alpha l), so that the trace 1 / (1 - lambda) is the share `alpha` of the
    response (VAPO Eq. 4-5); 0, one-step TD, for l <= 1 / alpha. length: trained TOKENS of the
    response, with the stop token; any shape."""
    return 1.0 - 1.0 / jnp.maximum(alpha * jnp.asarray(length, jnp.float32), 1.0)


def gae(
    values_RxT, rewards_RxT, trained_RxT, segments_RxT, gamma, lambda_RxT, last_value_RxT
) -> jax.Array:
    """Advantages, float32 [R, T], 0 in cells that are not trained.

    A segment ends where the next cell has another number; cells that are not trained (a prompt)
    are passed over. lambda, last_value and gamma are read at trained cells and may be of any shape
    that broadcasts; last_value is the value after a segment's last trained cell, read there.
    """
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), values_RxT.shape)
    floats = map(wide, (values_RxT, rewards_RxT, gamma, lambda_RxT, last_value_RxT))
    over_T = [jnp.moveaxis(x, -1, 0) for x in (trained_RxT, segments_RxT, *floats)]

    def back(carry, cell):
        segment, next_value, advantage = carry
        trained, here, value, reward, gamma, lam, last = cell
        ends = here != segment  # nothing trained behind this cell
        next_value = jnp.where(ends, last, next_value)
        advantage = jnp.where(ends, 0.0, advantage)
        new = reward + gamma * next_value - value + gamma * lam * advantage
        pick = lambda a, b: jnp.where(trained, a, b)
        carry = pick(here, segment), pick(value, next_value), pick(new, advantage)
        return carry, pick(new, 0.0)

    rows = values_RxT.shape[:-1]
    start = jnp.full(rows, -1, segments_RxT.dtype), jnp.zeros(rows), jnp.zeros(rows)
    _, advantages = jax.lax.scan(back, start, over_T, reverse=True)
    return jnp.moveaxis(advantages, 0, -1)
