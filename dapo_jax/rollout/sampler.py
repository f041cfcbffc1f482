"""The jitted half of sampling: prefill prompts into slots, decode a chunk of tokens for all slots.

A slot is one row of the cache with one response in flight. The host (engine.py) visits only between
chunks: it takes finished rows away and gives freed slots new requests. All shapes are fixed, so two
programs (a third for another draw mode) serve every length; the state is donated and updated in
place.

Dims: S slots, C cached tokens of a slot, P prompts a prefill call, T prompt tokens, N tokens a
chunk, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dapo_jax import parallel
from dapo_jax.model import qwen2
from dapo_jax.parallel import constrain
from dapo_jax.rollout import draw


class Slots(NamedTuple):
    """Device state of all slots. `token` is known but not yet in the cache: the next decode step
    feeds it at `position` and draws what follows."""

    cache: list  # a layer: (keys, values), each [S, K, C, d]
    token_S: jax.Array  # int32
    position_S: jax.Array  # int32, where token_S goes
    emitted_S: jax.Array  # int32, response tokens so far
    limit_S: jax.Array  # int32, most response tokens
    stream_S: jax.Array  # int32, the problem's position in its stream (counter of the draw)
    sample_S: jax.Array  # int32, the sample's index in its group (counter of the draw)
    active_S: jax.Array  # bool


class Refill(NamedTuple):
    """What a prefill call puts where. Entry i fills `slot[i]` (S = nobody) from prompt `row[i]`."""

    tokens_PxT: jax.Array  # int32, prompts without their last token, right-padded
    slot_S: jax.Array  # int32
    row_S: jax.Array  # int32
    token_S: jax.Array  # int32, the prompt's last token
    position_S: jax.Array  # int32, its position
    limit_S: jax.Array  # int32
    stream_S: jax.Array  # int32
    sample_S: jax.Array  # int32


class Chunk(NamedTuple):
    """What one decode call drew; row s has `count_S[s]` tokens, the rest is undefined."""

    token_SxN: jax.Array  # int32
    logp_SxN: jax.Array  # float32
    entropy_SxN: jax.Array  # float32
    count_S: jax.Array  # int32
    active_S: jax.Array  # bool: still going


def empty_slots(shape: qwen2.Shape, slots: int, cached_tokens: int, dtype) -> Slots:
    kv = (slots, shape.num_kv_heads, cached_tokens, shape.head_dim)
    zeros = lambda: jnp.zeros((slots,), jnp.int32)  # noqa: E731
    cache = [(jnp.zeros(kv, dtype), jnp.zeros(kv, dtype)) for _ in range(shape.num_layers)]
    return Slots(cache, *(zeros() for _ in range(6)), jnp.zeros((slots,), bool))


def slot_shardings(shape: qwen2.Shape, mesh: Mesh, rules: parallel.Rules) -> Slots:
    """Slots lie over `batch`, key/value heads over `kv_heads`."""
    kv = NamedSharding(mesh, parallel.spec(("batch", "kv_heads", None, None), rules))
    row = NamedSharding(mesh, parallel.spec(("batch",), rules))
    return Slots([(kv, kv)] * shape.num_layers, *[row] * 7)


def _prefill(shape: qwen2.Shape, params, slots: Slots, refill: Refill) -> Slots:
    """Run the prompts once and copy each one's keys and values to the slots of its samples."""
    T = refill.tokens_PxT.shape[1]
    new = qwen2.bind(shape, params).prefill(refill.tokens_PxT)
    put = functools.partial(_put, slot_S=refill.slot_S)
    cache = [
        tuple(
            old.at[refill.slot_S, :, :T].set(x[refill.row_S].astype(old.dtype), mode="drop")
            for old, x in zip(pair, kv, strict=True)
        )
        for pair, kv in zip(slots.cache, new, strict=True)
    ]
    return Slots(
        cache,
        put(slots.token_S, refill.token_S),
        put(slots.position_S, refill.position_S),
        put(slots.emitted_S, jnp.zeros_like(refill.slot_S)),
        put(slots.limit_S, refill.limit_S),
        put(slots.stream_S, refill.stream_S),
        put(slots.sample_S, refill.sample_S),
        put(slots.active_S, jnp.ones_like(refill.slot_S, bool)),
    )


def _put(old_S, new_S, slot_S):
    return old_S.at[slot_S].set(new_S, mode="drop")


def _decode(
    shape: qwen2.Shape,
    steps: int,
    stop_ids: tuple[int, ...],
    mode: str,
    params,
    slots: Slots,
    seed_key,
    temperature,
    top_p,
) -> tuple[Slots, Chunk]:
    """Up to `steps` tokens for every active slot; ends early when all are done."""
    model = qwen2.bind(shape, params)
    head_DxV = model.head()
    S = slots.token_S.shape[0]
    key_S = draw.row_keys(jax.random.wrap_key_data(seed_key), slots.stream_S, slots.sample_S)
    out = Chunk(
        jnp.zeros((S, steps), jnp.int32),
        jnp.zeros((S, steps)),
        jnp.zeros((S, steps)),
        jnp.zeros((S,), jnp.int32),
        slots.active_S,
    )

    def more(carry):
        i, slots, _ = carry
        return (i < steps) & slots.active_S.any()

    def step(carry):
        i, slots, out = carry
        # An idle slot computes too, into its own cells: a refill overwrites all that is read.
        x_SxD, cache = model.decode(slots.token_S, slots.position_S, slots.cache)
        logits_SxV = jnp.matmul(x_SxD, head_DxV, preferred_element_type=jnp.float32)
        logits_SxV = constrain(logits_SxV, "batch", "vocab")
        drawn = draw.draw(
            logits_SxV, draw.uniform(key_S, slots.emitted_S), temperature, top_p, mode
        )
        active = slots.active_S
        emitted_S = slots.emitted_S + active
        stopped_S = jnp.isin(drawn.token_S, jnp.asarray(stop_ids, jnp.int32))
        out = Chunk(
            out.token_SxN.at[:, i].set(drawn.token_S),
            out.logp_SxN.at[:, i].set(drawn.logp_S),
            out.entropy_SxN.at[:, i].set(drawn.entropy_S),
            out.count_S + active,
            active & ~stopped_S & (emitted_S < slots.limit_S),
        )
        slots = slots._replace(
            cache=cache,
            token_S=jnp.where(active, drawn.token_S, slots.token_S),
            position_S=slots.position_S + active,
            emitted_S=emitted_S,
            active_S=out.active_S,
        )
        return i + 1, slots, out

    _, slots, out = jax.lax.while_loop(more, step, (0, slots, out))
    return slots, out


class Programs(NamedTuple):
    """The compiled half, bound to one model shape, mesh and set of sizes."""

    new_slots: callable  # () -> Slots
    prefill: callable  # (params, slots, refill) -> slots            [slots donated]
    decode: dict  # mode -> (params, slots, key data, temperature, top_p) -> (slots, Chunk)
    to_decode_layout: callable  # training params -> decode params


def programs(
    shape: qwen2.Shape,
    mesh: Mesh,
    rules: parallel.Rules,
    *,
    slots: int,
    prompt_tokens: int,
    response_tokens: int,
    chunk: int,
    stop_ids: tuple[int, ...],
    dtype,
) -> Programs:
    """Nothing compiles here; each program does at its first call, once."""
    state = slot_shardings(shape, mesh, rules)
    rep = parallel.replicated(mesh)
    weights = parallel.shardings(qwen2.metadata(shape, "axes"), mesh, rules)

    def scoped(f):
        @functools.wraps(f)
        def traced(*args):
            with parallel.use(mesh, rules):
                return f(*args)

        return traced

    new_slots = functools.partial(empty_slots, shape, slots, prompt_tokens + response_tokens, dtype)
    prefill = functools.partial(_prefill, shape)
    decode = {
        mode: functools.partial(_decode, shape, chunk, stop_ids, mode)
        for mode in ("full", "top_p", "greedy")
    }
    cast = functools.partial(qwen2.cast, dtype=dtype)
    return Programs(
        jax.jit(new_slots, out_shardings=state),
        jax.jit(_named("prefill", scoped(prefill)), donate_argnums=1, out_shardings=state),
        {
            mode: jax.jit(
                _named(f"decode_{mode}", scoped(f)), donate_argnums=1, out_shardings=(state, rep)
            )
            for mode, f in decode.items()
        },
        jax.jit(cast, out_shardings=weights),
    )


def _named(name, f):
    f.__name__ = name
    return f
