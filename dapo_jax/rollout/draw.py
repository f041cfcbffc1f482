"""One token from one row of logits: temperature, nucleus cut, inverse CDF.

Each row brings one uniform number, made from a counter (seed, problem position, sample, token), so
a draw does not depend on which slot, batch or mesh it runs in; and one uniform a row is V times
fewer than Gumbel noise needs. The log-prob and the entropy are those of the full distribution at
temperature: a nucleus cut changes what is drawn, never what is recorded.

Dims: S slots, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Draw(NamedTuple):
    token_S: jax.Array  # int32
    logp_S: jax.Array  # float32, log-probability of the token at temperature, before any cut
    entropy_S: jax.Array  # float32, nats, of the full distribution at temperature


def uniform(key_S: jax.Array, counter_S: jax.Array) -> jax.Array:
    """float32 in [0, 1): the number that belongs to (row key, token index). key_S: typed keys."""
    draw = lambda key, i: jax.random.uniform(jax.random.fold_in(key, i))  # noqa: E731
    return jax.vmap(draw)(key_S, counter_S)


def row_keys(seed_key: jax.Array, stream_S: jax.Array, sample_S: jax.Array) -> jax.Array:
    """Typed keys [S], one for each (position of the problem in its stream, sample index)."""
    fold = lambda i, j: jax.random.fold_in(jax.random.fold_in(seed_key, i), j)  # noqa: E731
    return jax.vmap(fold)(stream_S, sample_S)


def nucleus(weight_SxV: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mask [S, V] of the smallest set of largest weights whose share is at least `top_p`.

    No sort: bisection on the threshold, over the bit patterns of the weights, which for
    non-negative floats are ordered like the floats; 31 halvings find it exactly. Equal weights at
    the threshold are all kept.
    """
    need_S = top_p * weight_SxV.sum(-1)

    def halve(_, bounds):
        low_S, high_S = bounds  # share(low) is enough, share(high) is not
        middle_S = low_S + (high_S - low_S) // 2
        threshold_S = jax.lax.bitcast_convert_type(middle_S, jnp.float32)
        mass_S = jnp.where(weight_SxV >= threshold_S[:, None], weight_SxV, 0.0).sum(-1)
        enough_S = mass_S >= need_S
        return jnp.where(enough_S, middle_S, low_S), jnp.where(enough_S, high_S, middle_S)

    top_S = jax.lax.bitcast_convert_type(weight_SxV.max(-1), jnp.int32)
    low_S, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(top_S), top_S + 1))
    return weight_SxV >= jax.lax.bitcast_convert_type(low_S, jnp.float32)[:, None]


def draw(
    logits_SxV: jax.Array, uniform_S: jax.Array, temperature: jax.Array, top_p: jax.Array, mode: str
) -> Draw:
    """`mode` (static): 'full' draws from the whole distribution, 'top_p' from its nucleus, and
    'greedy' takes the most likely token (recorded at temperature 1)."""
    scaled = logits_SxV.astype(jnp.float32)
    if mode != "greedy":
        scaled = scaled / temperature
    shifted_SxV = scaled - scaled.max(-1, keepdims=True)
    weight_SxV = jnp.exp(shifted_SxV)
    total_S = weight_SxV.sum(-1)
    if mode == "greedy":
        token_S = jnp.argmax(scaled, axis=-1)
    else:
        kept = weight_SxV
        if mode == "top_p":
            kept = jnp.where(nucleus(weight_SxV, top_p), weight_SxV, 0.0)
        cdf_SxV = jnp.cumsum(kept, axis=-1)
        # The first token beyond the target that has weight. Looking at the weights is needed: a
        # parallel sum rounds every entry on its own, so over a large vocabulary a token of weight 0
        # can rise above its neighbour. uniform < 1, so the target stays below `top_S`.
        live_SxV = kept > 0
        top_S = jnp.where(live_SxV, cdf_SxV, 0.0).max(-1)
        target_S = uniform_S * top_S
        token_S = jnp.argmax(live_SxV & (cdf_SxV > target_S[:, None]), axis=-1)
    token_S = token_S.astype(jnp.int32)
    log_total_S = jnp.log(total_S)
    taken_S = jnp.take_along_axis(shifted_SxV, token_S[:, None], axis=-1)[:, 0]
    mean_shifted_S = jnp.sum(weight_SxV * shifted_SxV, -1) / total_S
    return Draw(token_S, taken_S - log_total_S, log_total_S - mean_shifted_S)
