"""The jitted half of sampling: prefill prompts into pages, decode a chunk of tokens for all slots.

A slot is a place for one response in flight; what it is doing comes as a few numbers with each call
of the host (engine.py). The pool of keys and values alone stays on the devices, donated and updated
in place. All shapes are fixed: one program a draw mode.

Dims: S slots, R pages of a slot's table, B prompts and T of their tokens per prefill call,
N tokens per chunk, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax import parallel
from dapo_jax.model import joined, kernels, paged, qwen2
from dapo_jax.rollout import draw, draw_triton, near_ties
from dapo_jax.rollout.weights import DecodeWeights, decode_weights


class Slots(NamedTuple):
    """What the slots are doing when a chunk starts. `token` is known but not yet in the cache: the
    first step feeds it at `position` and draws what follows."""

    token_S: jax.Array  # int32
    position_S: jax.Array  # int32, where token_S goes
    emitted_S: jax.Array  # int32, response tokens so far
    limit_S: jax.Array  # int32, most response tokens
    stream_S: jax.Array  # int32, the problem's position in its stream (counter of the draw)
    sample_S: jax.Array  # int32, the sample's index in its group (counter of the draw)
    top_p_S: jax.Array  # float32, nucleus mass; read in mode 'top_p' only
    active_S: jax.Array  # bool
    table_SxR: jax.Array  # int32, pages of the cache


# Logical axes: rows lie over `batch`.
SLOT_AXES = Slots(*[("batch",)] * (len(Slots._fields) - 1), table_SxR=("batch", None))


class Chunk(NamedTuple):
    """What one decode call drew; row s has `count_S[s]` tokens, the rest is undefined."""

    token_SxN: jax.Array  # int32
    logp_SxN: jax.Array  # float32
    entropy_SxN: jax.Array  # float32
    count_S: jax.Array  # int32
    active_S: jax.Array  # bool: still going
    near_SxN: jax.Array | None = None  # bool, of near_ties.py; with drafts


def _prefill(shape, g, window, params, pool, prompts: paged.Prompts):
    """Keys and values of one chunk of each prompt; no head is run."""
    T = prompts.tokens_BxT.shape[1]
    positions_BxT = jnp.broadcast_to(prompts.start + jnp.arange(T), prompts.tokens_BxT.shape)
    attend = paged.prefill_attend(g, prompts, shape.attention_chunk, window)
    model, layers = joined.bind_layers(shape, params)
    return model.cached(prompts.tokens_BxT, positions_BxT, pool, attend, layers)[1]


def _decode(shape, kernel, g, steps, stop_ids, near, mode, params, pool, slots, key, temperature):
    """Up to `steps` tokens for every active slot; ends early when all are done."""
    model, layers = joined.bind_layers(shape, params)
    logits = kernel.decode_logits(model)
    draw_rows = draw.draw_apart if kernel.rows_apart else draw_triton.draw
    S = slots.token_S.shape[0]
    key_S = draw.row_keys(jax.random.wrap_key_data(key), slots.stream_S, slots.sample_S)
    zeros = [jnp.zeros((S, steps), dtype) for dtype in ("int32", "float32", "float32")]
    told = [jnp.zeros((S, steps), bool)] if near else []
    out = Chunk(*zeros, jnp.zeros((S,), jnp.int32), slots.active_S, *told)
    more = lambda carry: (carry[0] < steps) & carry[-1].active_S.any()

    def step(carry):
        i, pool, token_S, position_S, out = carry
        active_S = out.active_S
        attend = paged.decode_attend(g, paged.CacheRows(slots.table_SxR, position_S, active_S))
        x_Sx1xD, pool = model.cached(token_S[:, None], position_S[:, None], pool, attend, layers)
        logits_SxV = logits(x_Sx1xD, active_S)
        emitted_S = slots.emitted_S + out.count_S
        uniform_S = draw.uniform(key_S, emitted_S)
        drawn = draw_rows(logits_SxV, uniform_S, temperature, slots.top_p_S, mode, near)
        stopped_S = jnp.isin(drawn.token_S, jnp.asarray(stop_ids, jnp.int32))
        count_S = out.count_S + active_S
        kept = (*out[:3], out.near_SxN)
        *kept, near_SxN = jax.tree.map(lambda x_SxN, x_S: x_SxN.at[:, i].set(x_S), kept, (*drawn,))
        goes_on_S = active_S & ~stopped_S & (slots.emitted_S + count_S < slots.limit_S)
        out = Chunk(*kept, count_S, goes_on_S, near_SxN)
        return i + 1, pool, drawn.token_S, position_S + active_S, out

    def several(carry):
        return jax.lax.fori_loop(0, ask, lambda _, carry: step(carry), carry)

    carry = (0, pool, slots.token_S, slots.position_S, out)
    ask = asked_every(g, steps)
    _, pool, *_, out = jax.lax.while_loop(more, several if ask > 1 else step, carry)
    return pool, out


def asked_every(g: paged.Geometry, steps: int) -> int:
    """Tokens between two looks at whether all rows have ended, which on a slice is an all-reduce
    over the shards, and on a GPU ends a queue of kernels; up to 7 tokens more are drawn and not
    counted. With drafts 1: the host looks at each pass."""
    return math.gcd(steps, 8) if g.by_kernel and not g.gathers else 1


class SamplerPrograms(NamedTuple):
    """The compiled half, bound to one model shape, mesh and set of sizes. Pools are donated."""

    new_pool: Callable  # () -> pool
    prefill: Callable  # (params, pool, Prompts) -> pool
    copy_pages: Callable  # (pool, source_S, target_S) -> pool
    # `Draw.mode` -> (params, pool, Slots, key data, temperature) -> (pool, Chunk)
    decode: dict[str, Callable]
    weights: DecodeWeights  # from training params


@functools.lru_cache(maxsize=8)
def programs(
    shape: qwen2.Shape, mesh, rules, g: paged.Geometry, *, prompt_tokens, chunk, stop_ids, dtype
) -> SamplerPrograms:
    """Nothing compiles here; each program does at its first call, once, for all engines of like
    arguments. rules: the items of `parallel.Rules`; stop_ids: a tuple. Lengths in TOKENS."""
    rules = dict(rules)
    weights = decode_weights(shape, mesh, rules, dtype, even_keys=g.quantized)
    shape, pool = shape.merged, paged.pool_sharding(g, mesh, rules)
    rep, kernel = parallel.replicated(mesh), kernels.choose(mesh, shape, dtype)
    near = near_ties.of(shape, dtype, g)

    def scoped(name, f):
        def traced(*args):
            with parallel.mesh_scope(mesh, rules, dtype):
                return f(*args)

        traced.__name__ = name  # what profiles and compile logs call it
        return traced

    jit = functools.partial(jax.jit, compiler_options=parallel.compiler_options(mesh))

    def decode(mode):
        f = functools.partial(_decode, shape, kernel, g, chunk, stop_ids, near, mode)
        return jit(scoped(f"decode_{mode}", f), donate_argnums=1, out_shardings=(pool, rep))

    prefill = functools.partial(_prefill, shape, g, prompt_tokens)
    copy_pages = functools.partial(paged.copy_pages, g)
    return SamplerPrograms(
        new_pool=jax.jit(functools.partial(paged.new_pool, g, dtype), out_shardings=pool),
        prefill=jit(scoped("prefill", prefill), donate_argnums=1, out_shardings=pool),
        copy_pages=jax.jit(scoped("copy_pages", copy_pages), donate_argnums=0, out_shardings=pool),
        decode={mode: decode(mode) for mode in ("full", "top_p", "greedy")},
        weights=weights,
    )
