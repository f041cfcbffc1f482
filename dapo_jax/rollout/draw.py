"""One token from one row of logits: temperature, nucleus cut, inverse CDF.

Each row brings one uniform number, made from a counter (seed, problem position, sample, token), so
a draw does not depend on slot, batch or mesh. The log-prob and the entropy are those of the full
distribution at temperature: a nucleus cut changes what is drawn, never what is recorded.

Dims: S slots, V vocabulary.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.parallel import constrain

_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


class Draw(NamedTuple):
    """How responses are drawn; plain data. Lengths in TOKENS."""

    seed: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # nucleus mass
    max_tokens: int = 0  # longest response; 0 = what the sampler holds
    stop_strings: tuple[str, ...] = ()  # texts that end a response (`grading.cut_at`)

    @property
    def mode(self) -> str:
        """Which of the decode programs draws so."""
        return "greedy" if self.temperature == 0 else "full" if self.top_p >= 1 else "top_p"


class Drawn(NamedTuple):
    token_S: jax.Array  # int32
    logp_S: jax.Array  # float32, log-probability of the token at temperature, before any cut
    entropy_S: jax.Array  # float32, nats, of the full distribution at temperature
    near_S: jax.Array | None = None  # bool: rounding could draw another; where that is asked


def uniform(key_S: jax.Array, counter_S: jax.Array) -> jax.Array:
    """float32 in [0, 1): the number that belongs to (row key, token index). key_S: typed keys."""
    draw = lambda key, i: jax.random.uniform(jax.random.fold_in(key, i))
    return jax.vmap(draw)(key_S, counter_S)


def row_keys(seed_key: jax.Array, stream_S: jax.Array, sample_S: jax.Array) -> jax.Array:
    """Typed keys [S], one for each (position of the problem in its stream, sample index). seed_key:
    of all rows, or [S]."""
    fold = lambda key, i, j: jax.random.fold_in(jax.random.fold_in(key, i), j)
    return jax.vmap(fold, (0 if seed_key.ndim else None, 0, 0))(seed_key, stream_S, sample_S)


def nucleus(weight_SxV: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mask [S, V] of the smallest set of largest weights whose share is at least `top_p` (a scalar
    or [S]); equal weights at the threshold are all kept. No sort: bisection on the threshold's bit
    pattern, as those of non-negative floats are ordered like them; 31 halvings find it exactly. A
    row alone has closer bounds to begin with, and so needs fewer."""
    S, V = weight_SxV.shape
    total_S = weight_SxV.sum(-1)
    need_S = top_p * total_S
    bits = lambda x_S: jax.lax.bitcast_convert_type(x_S, jnp.int32)

    def halve(_, bounds):
        low_S, high_S = bounds  # share(low) is enough, share(high) is not
        middle_S = low_S + (high_S - low_S) // 2
        threshold_S = jax.lax.bitcast_convert_type(middle_S, jnp.float32)
        enough_S = jnp.where(weight_SxV >= threshold_S[:, None], weight_SxV, 0.0).sum(-1) >= need_S
        return jnp.where(enough_S, middle_S, low_S), jnp.where(enough_S, high_S, middle_S)

    high_S = bits(weight_SxV.max(-1)) + 1
    low_S, halvings = jnp.zeros_like(high_S), 31
    if S == 1:  # V weights below (1 - top_p) total / V can be spared, rounding of the sums included
        spare_S = (1 - top_p - 3 * V * 2.0**-24) * total_S / V
        low_S = bits(jnp.where(spare_S > 0, spare_S, 0.0))
        halvings = 32 - jax.lax.clz(high_S - low_S)[0]
    low_S, _ = jax.lax.fori_loop(0, halvings, halve, (low_S, high_S))
    return weight_SxV >= jax.lax.bitcast_convert_type(low_S, jnp.float32)[:, None]


def blocks(vocab: int) -> tuple[int, int]:
    """(number of blocks, tokens a block) for the two-level draw: a divisor of the vocabulary near
    its square root, a multiple of 8 where there is one (so that blocks shard over `tensor`); if no
    divisor is fair, the vocabulary is padded to a multiple of 128."""
    fair = [n for n in range(1, vocab + 1) if vocab % n == 0 and n * n <= 16 * vocab <= 256 * n * n]
    if not fair:
        return 128, -(-vocab // 128)
    n = min(fair, key=lambda n: (n % 8 != 0, abs(math.log(n * n / vocab))))
    return n, vocab // n


def in_blocks(x_SxV: jax.Array, pad: float) -> jax.Array:
    """[S, blocks, tokens a block]; `pad` stands behind the last token."""
    S, V = x_SxV.shape
    n, b = blocks(V)
    x_SxNxb = jnp.pad(x_SxV, ((0, 0), (0, n * b - V)), constant_values=pad).reshape(S, n, b)
    return constrain(x_SxNxb, "batch", "vocab" if n % 8 == 0 else None, None)


def first_largest(x_SxV: jax.Array) -> jax.Array:
    """int32 [S]: the first index of each row's maximum. By blocks as in `invert`: XLA on CPUs makes
    an argmax over the vocabulary number by number, five times as slow as all else of a draw."""
    x_SxNxb = in_blocks(x_SxV, -jnp.inf)
    _, n, b = x_SxNxb.shape
    top_SxN = constrain(x_SxNxb.max(-1), "batch", None)
    block_S = _first(top_SxN == top_SxN.max(-1, keepdims=True))
    chosen_SxN = jnp.arange(n) == block_S[:, None]
    inside_Sxb = jnp.where(chosen_SxN[:, :, None], x_SxNxb, -jnp.inf).max(1)
    return block_S * b + _first(inside_Sxb == inside_Sxb.max(-1, keepdims=True))


def _first(holds_Sxn: jax.Array) -> jax.Array:
    """int32 [S]: the first index that holds; n where none does."""
    n = holds_Sxn.shape[-1]
    return jnp.where(holds_Sxn, jnp.arange(n, dtype=jnp.int32), n).min(-1)


def invert(weight_SxV: jax.Array, uniform_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverse CDF: (token int32 [S], its weight [S]) for unnormalised weights, uniform < 1. First
    the block and then the token in it: two running sums of about sqrt(V) terms in place of one of
    V. In a parallel one a token of weight 0 may rise above its neighbour: weights are looked at."""
    weight_SxNxb = in_blocks(weight_SxV, 0.0)
    _, n, b = weight_SxNxb.shape
    share_SxN = constrain(weight_SxNxb.sum(-1), "batch", None)

    block_S, cdf_SxN, target_S = _cross(share_SxN, uniform_S)
    # Masked sums and not gathers: exact (one term is not 0), and local where the axis is sharded.
    index_N = jnp.arange(n)
    below_S = jnp.where(index_N == block_S[:, None] - 1, cdf_SxN, 0.0).sum(-1)
    inside_Sxb = jnp.where((index_N == block_S[:, None])[:, :, None], weight_SxNxb, 0.0).sum(1)
    share_S = jnp.where(index_N == block_S[:, None], share_SxN, 0.0).sum(-1)
    rest_S = jnp.clip((target_S - below_S) / share_S, 0.0, _BELOW_ONE)
    offset_S, _, _ = _cross(inside_Sxb, rest_S)
    taken_S = jnp.where(jnp.arange(b) == offset_S[:, None], inside_Sxb, 0.0).sum(-1)
    return (block_S * b + offset_S).astype(jnp.int32), taken_S


def _cross(weight_Sxn, uniform_S):
    """(index of the first weight at which the running sum passes uniform x total, running sums,
    that target). Entries of weight 0 are never chosen."""
    cdf_Sxn = jnp.cumsum(weight_Sxn, axis=-1)
    live_Sxn = weight_Sxn > 0
    target_S = uniform_S * jnp.where(live_Sxn, cdf_Sxn, 0.0).max(-1)  # uniform < 1: below the top
    return _first(live_Sxn & (cdf_Sxn > target_S[:, None])), cdf_Sxn, target_S


def draw(logits_SxV, uniform_S, temperature, top_p, mode: str, near=None) -> Drawn:
    """`mode` (static): 'full' draws from the whole distribution, 'top_p' from its nucleus (of a
    row at 1, from all of it: the same token as by 'full'), and 'greedy' takes the most likely token
    (recorded at temperature 1). logits, top_p: float32; top_p: one or [S]. near: near_ties.near"""
    scaled_SxV = logits_SxV if mode == "greedy" else logits_SxV / temperature
    shifted_SxV = scaled_SxV - scaled_SxV.max(-1, keepdims=True)
    weight_SxV = jnp.exp(shifted_SxV)
    kept, total_S = weight_SxV, weight_SxV.sum(-1)
    if mode == "greedy":
        token_S = first_largest(shifted_SxV)
        taken_S = jnp.ones_like(total_S)
    else:
        if mode == "top_p":
            whole_Sx1 = jnp.atleast_1d(top_p)[:, None] >= 1
            kept = jnp.where(nucleus(weight_SxV, top_p) | whole_Sx1, weight_SxV, 0.0)
        token_S, taken_S = invert(kept, uniform_S)
    # exp(-inf) * -inf is not a number: a token that cannot come adds nothing to the entropy.
    mean_shifted_S = jnp.where(weight_SxV > 0, weight_SxV * shifted_SxV, 0.0).sum(-1) / total_S
    log_total_S = jnp.log(total_S)
    told = [near(scaled_SxV, weight_SxV, kept, token_S, uniform_S, top_p, mode)] if near else []
    return Drawn(token_S, jnp.log(taken_S) - log_total_S, log_total_S - mean_shifted_S, *told)


def draw_apart(logits_SxV, uniform_S, temperature, top_p_S, mode: str, near=None) -> Drawn:
    """`draw`, one row after the other: what is read again and again of a row of a large vocabulary
    stays in a CPU's cache, and a row at top_p 1 has no nucleus to look for."""

    def of_row(logits_V, uniform, top_p):
        row = logits_V[None], uniform[None], temperature, top_p
        if mode != "top_p":
            return draw(*row, mode, near)
        full, cut = (lambda: draw(*row, "full", near)), (lambda: draw(*row, mode, near))
        return jax.lax.cond(top_p >= 1, full, cut)

    drawn = jax.lax.map(lambda row: of_row(*row), (logits_SxV, uniform_S, top_p_S))
    return jax.tree.map(lambda x_Sx1: x_Sx1[:, 0], drawn)
