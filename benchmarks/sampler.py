"""The sampler against its peers on one core: tokens per CPU-second, in the same process.

    pip install -r benchmarks/requirements-peers.txt ...       # see that file; a venv of its own
    python -m benchmarks sampler --full [--isa=AVX2]           # about ten minutes
    python -m benchmarks sampler --parts readers               # CPU readers by row length, no peers

Peers are google-tunix's sampler (jitted, JAX) and transformers' `generate` (torch). All run the
same Qwen2.5 shape with random weights (4 layers, width 128, vocabulary 1,024, float32) on the same
prompts; nothing stops but by length. The process is pinned to one core and counts CPU-seconds, all
sides take turns, the first turn (which compiles) is not counted, and the median of the others is.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, sides
from benchmarks.harness import Flag
from dapo_jax.model import qwen2
from dapo_jax.rollout import draw
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine, Request

SHAPE = sides.SMALL
PROMPT = 32  # tokens
REAL_VOCAB = 151_936

Turn = Callable[[], float]  # does the work once, returns how much that was (tokens, rows)


def prompts(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1000, (n, PROMPT))


def requests(n: int, lengths=()) -> list[Request]:
    return sides.requests(prompts(n), lengths)


def engine(slots: int, response: int, chunk: int = 16, **cache) -> Engine:
    return sides.engine(SHAPE, slots, PROMPT, response, chunk, "float32", **cache)


def ours(made: Engine, wanted: Sequence[Request], top_p: float = 1.0) -> Turn:
    weights = made.decode_params(qwen2.init(SHAPE, jax.random.key(0)))
    return lambda: made.generate(weights, wanted, Draw(seed=1, top_p=top_p))[1].tokens


class Words:
    """The tokenizer that tunix wants: token ids, written as numbers."""

    pad_id = staticmethod(lambda: 1023)
    eos_id = staticmethod(lambda: 1022)
    bos_id = staticmethod(lambda: None)
    encode = staticmethod(lambda text, **_: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids, **_: "")
    dedup_bos_ids = staticmethod(lambda ids: ids)


def tunix_sampler(response: int):
    """generate(prompts, steps, top_p) -> tokens: whole batches, until the longest row ends."""
    from tunix.generate import sampler

    room = PROMPT + response
    cache = sampler.CacheConfig(room, SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim)
    generate = sampler.Sampler(sides.tunix_model(SHAPE), Words(), cache)

    def run(rows: np.ndarray, steps: int, top_p: float) -> int:
        out = generate(
            [" ".join(map(str, row)) for row in rows],
            max_generation_steps=steps,
            max_prompt_length=PROMPT,
            eos_tokens=[5000],  # never drawn
            temperature=1.0,
            top_p=top_p,
            seed=0,
        )
        return sum(len(tokens) for tokens in out.tokens)

    return run


def torch_sampler():
    import torch

    torch.set_num_threads(1)
    network = sides.transformers_model(SHAPE).eval()

    def run(rows: np.ndarray, steps: int, top_p: float) -> int:
        out = sides.transformers_generate(network, torch.from_numpy(rows), steps, top_p)
        return out[:, PROMPT:].numel()

    return run


def fixed_length(table: harness.Table, repeats: int, scale: int) -> None:
    steps, rows = 128 // scale, prompts(64)
    made = engine(64, steps, chunk=steps // 2)
    tunix, torch = tunix_sampler(steps), torch_sampler()
    for top_p in (1.0, 0.7):
        turns = {
            "ours": ours(made, requests(64), top_p),
            "tunix": lambda p=top_p: tunix(rows, steps, p),
            "transformers": lambda p=top_p: torch(rows, steps, p),
        }
        add(table, f"64 x ({PROMPT} + {steps}) tokens, T=1, top-p {top_p}", turns, repeats)


def draw_alone(table: harness.Table, repeats: int, scale: int, rows: int = 16) -> None:
    """A nucleus of 0.7 at the real vocabulary; the peer is tunix's own function, which sorts."""
    from tunix.generate.sampler import sample_top_p

    vocabulary = REAL_VOCAB // scale
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocabulary))
    uniform, key = jax.random.uniform(jax.random.key(1), (rows,)), jax.random.key(2)
    our_draw = jax.jit(lambda x, u: draw.draw(x, u, jnp.float32(1), jnp.float32(0.7), "top_p"))
    peer = jax.jit(lambda x, k: sample_top_p(x[:, None], k, 1.0, 0.7, None, True))

    def turn(f, *args):
        jax.block_until_ready(f(*args))
        return rows

    turns = {
        "ours": lambda: turn(our_draw, logits, uniform),
        "tunix": lambda: turn(peer, logits, key),
    }
    add(table, f"draw alone, top-p 0.7, V={vocabulary:,} (rows)", turns, repeats)


def uneven(table: harness.Table, repeats: int, scale: int) -> None:
    """Forced lengths. The peer takes the same requests in batches, each up to its longest row."""
    n = cap = 512 // scale
    slots, lengths = 64, sides.log_normal(n, cap, cap / 4, seed=1)
    tunix = tunix_sampler(cap)

    def batches():
        for i in range(0, n, slots):
            tunix(prompts(n)[i : i + slots], int(lengths[i : i + slots].max()), 1.0)
        return lengths.sum()  # the rest of what it drew is of no use

    turns = {"ours": ours(engine(slots, cap), requests(n, lengths)), "tunix": batches}
    what = f"{n} requests of log-normal lengths (mean {cap // 4}, cap {cap}), {slots} slots"
    add(table, what, turns, repeats)


def readers(table: harness.Table, repeats: int, scale: int) -> None:
    """Whole rows against pages of 64 on CPU, by row length: what `paged.geometry` chooses from."""
    for row in (128, 160, 192, 256, 384, 512, 768, 1024)[: 8 // scale]:
        cap = row - PROMPT
        long_tail = sides.log_normal(128, cap, cap / 3, seed=1)
        for kind, lengths in (("all full", ()), ("long tail", long_tail)):
            turns = {
                name: ours(engine(64, cap, page_tokens=page), requests(128, lengths))
                for name, page in (("rows", row), ("pages", 64))
            }
            add(table, f"rows of {row} tokens, {kind}; peer: pages of 64", turns, repeats)


def add(table: harness.Table, what: str, turns: dict[str, Turn], repeats: int) -> None:
    """A row: work per CPU-second, the first of `turns` ours."""
    found = harness.in_turns(turns, repeats)
    (_, rate), *peers = ((name, work / seconds) for name, (seconds, work) in found.items())
    beside = {name: f"{x:,.0f} ({rate / x:.2f}x)" for name, x in peers}
    second = beside.get("tunix") or beside.get("pages")
    table.row(what, f"{rate:,.0f}", second, beside.get("transformers", ""))


PARTS = {f.__name__: f for f in (fixed_length, draw_alone, uneven, readers)}
PEERS = ("fixed_length", "draw_alone", "uneven")
FLAGS = {
    "repeats": Flag(1, 5, "turns that are counted"),
    "parts": Flag(PEERS, PEERS, "rows of the table", tuple(PARTS)),
}


def measure(args) -> list[harness.Table]:
    table = harness.Table("work per CPU-second", "dapo_jax", "google-tunix", "transformers")
    for part in args.parts:
        PARTS[part](table, args.repeats, 1 if args.full else 8)
    return [table]
