"""The sampler against its peers on one core: tokens per CPU-second, in the same run.

    pip install -r benchmarks/requirements-peers.txt ...   # see that file; a venv of its own
    python benchmarks/sampler.py                           # the table, about ten minutes
    python benchmarks/sampler.py --write                   # and put it into RESULTS.md
    python benchmarks/sampler.py --isa=AVX2                # the peers, without AVX-512 for anybody
    python benchmarks/sampler.py --readers                 # CPU readers by row length, no peers

Peers are google-tunix's sampler (jitted, JAX) and transformers' `generate` (torch). All run the
same Qwen2.5 shape with random weights (4 layers, d 128, vocabulary 1,024, float32) on the same
prompts; nothing stops but by length. The process is pinned to one core and counts CPU seconds, all
sides take turns, the first turn (which compiles) is not counted, and the median of the others is.
"""

# ruff: noqa: E402  (jax is imported after the core is chosen)

import argparse
from collections.abc import Callable, Iterator, Sequence

import timing

timing.one_core()

import jax
import jax.numpy as jnp
import numpy as np
import results
from lengths import log_normal

from dapo_jax import config, parallel
from dapo_jax.model import qwen2
from dapo_jax.rollout import draw
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine, Request, Watch

SHAPE = qwen2.Shape(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e4,
    rms_eps=1e-6,
    tie_embeddings=True,
    scan_layers=False,
)
PROMPT = 32  # tokens
REAL_VOCAB = 151_936

HEADING = "## Sampling on a CPU core"

Turn = Callable[[], float]  # does the work once, returns how much that was (tokens, rows)
Found = Iterator[tuple[str, ...] | str]  # rows of the table, and sentences below it


def rates(turns: dict[str, Turn], repeats: int) -> dict[str, float]:
    """Work per CPU-second of each."""
    found = timing.in_turns(turns, repeats)
    return {name: work / seconds for name, (seconds, work) in found.items()}


def report(what: str, turns: dict[str, Turn], repeats: int) -> tuple[str, ...]:
    """A row of the table: the first of `turns` is ours."""
    (_, ours), *peers = rates(turns, repeats).items()
    beside = (f"{name} {rate:,.0f} ({ours / rate:.2f}x)" for name, rate in peers)
    row = what, f"{ours:,.0f}", *beside
    print("   ".join(row), flush=True)
    return row


def say(sentence: str) -> str:
    print(sentence, flush=True)
    return sentence


def prompts(n: int, tokens: int = PROMPT) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1000, (n, tokens))


# ------------------------------------------------------------------------------------------------
# The three samplers
# ------------------------------------------------------------------------------------------------


def engine(slots: int, response: int, *, prompt: int = PROMPT, chunk: int = 16, **cache) -> Engine:
    mesh = parallel.make_mesh(dict.fromkeys(parallel.AXES, 1))
    return Engine(
        SHAPE,
        mesh,
        config.base().sharding.decode.to_dict(),
        slots=slots,
        prompt_tokens=prompt,
        response_tokens=response,
        chunk=chunk,
        prefill_prompts=8,
        stop_ids=[],
        dtype="float32",
        **cache,
    )


class Ours:
    """An engine with weights. Keeps the statistics of its last turn."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.weights = engine.decode_params(qwen2.init(SHAPE, jax.random.key(0)))
        self.stats = None

    def turn(self, requests: Sequence[Request], top_p: float = 1.0, **observers) -> Turn:
        def run():
            draw = Draw(seed=1, top_p=top_p)
            self.stats = self.engine.generate(self.weights, requests, draw, **observers)[1]
            return self.stats.tokens

        return run


def requests(n: int, lengths=None) -> list[Request]:
    lengths = [0] * n if lengths is None else lengths.tolist()
    return [Request(p.tolist(), i, 0, lengths[i]) for i, p in enumerate(prompts(n))]


class Words:
    """The tokenizer that tunix wants: token ids, written as numbers."""

    pad_id = staticmethod(lambda: 1023)
    eos_id = staticmethod(lambda: 1022)
    bos_id = staticmethod(lambda: None)
    encode = staticmethod(lambda text, **_: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids, **_: "")
    dedup_bos_ids = staticmethod(lambda ids: ids)


def tunix_sampler(response: int):
    """generate(prompts, steps, top_p): whole batches, until the longest row ends."""
    from flax import nnx
    from tunix.generate import sampler
    from tunix.models.qwen2 import model

    shape = model.ModelConfig(
        num_layers=SHAPE.num_layers,
        vocab_size=SHAPE.vocab_size,
        embed_dim=SHAPE.hidden_size,
        hidden_dim=SHAPE.intermediate_size,
        num_heads=SHAPE.num_heads,
        head_dim=SHAPE.head_dim,
        num_kv_heads=SHAPE.num_kv_heads,
        rope_theta=int(SHAPE.rope_theta),
        norm_eps=SHAPE.rms_eps,
        use_tied_embedding=True,
    )
    network = model.Qwen2(shape, rngs=nnx.Rngs(0))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(network, nnx.Param))} == {jnp.dtype("f4")}
    cache = sampler.CacheConfig(
        PROMPT + response, SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim
    )
    generate = sampler.Sampler(network, Words(), cache)

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


def transformers_generate():
    import torch
    import transformers

    torch.set_num_threads(1)
    shape = transformers.Qwen2Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    network = transformers.Qwen2ForCausalLM(shape).eval()

    def run(rows: np.ndarray, steps: int, top_p: float) -> int:
        ids = torch.from_numpy(rows)
        with torch.no_grad():
            out = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=top_p,
                min_new_tokens=steps,
                max_new_tokens=steps,
            )
        return out[:, PROMPT:].numel()

    return run


# ------------------------------------------------------------------------------------------------
# The rows of the table
# ------------------------------------------------------------------------------------------------


def fixed_length(repeats: int) -> Found:
    steps, rows = 128, prompts(64)
    ours = Ours(engine(64, steps, chunk=64))
    tunix, torch = tunix_sampler(steps), transformers_generate()
    for top_p in (1.0, 0.7):
        turns = {
            "ours": ours.turn(requests(64), top_p=top_p),
            "tunix": lambda p=top_p: tunix(rows, steps, p),
            "transformers": lambda p=top_p: torch(rows, steps, p),
        }
        yield report(f"64 x ({PROMPT} + {steps}), T=1, top-p {top_p}", turns, repeats)


def draw_alone(repeats: int, rows: int = 16) -> Found:
    """A nucleus of 0.7 at the real vocabulary; the peer is tunix's own function, which sorts."""
    from tunix.generate.sampler import sample_top_p

    logits = 3 * jax.random.normal(jax.random.key(0), (rows, REAL_VOCAB))
    uniform, key = jax.random.uniform(jax.random.key(1), (rows,)), jax.random.key(2)
    ours = jax.jit(lambda x, u: draw.draw(x, u, jnp.float32(1), jnp.float32(0.7), "top_p"))
    peer = jax.jit(lambda x, k: sample_top_p(x[:, None], k, 1.0, 0.7, None, True))

    def turn(f, *args):
        jax.block_until_ready(f(*args))
        return rows

    turns = {"ours": lambda: turn(ours, logits, uniform), "tunix": lambda: turn(peer, logits, key)}
    yield report(f"draw alone, top-p 0.7, V={REAL_VOCAB:,} (rows/s)", turns, repeats)


def uneven(repeats: int, n: int = 512, cap: int = 512, slots: int = 64) -> Found:
    """Forced lengths. The peer takes the same requests in batches, each up to its longest row."""
    lengths = log_normal(n, cap, cap / 4, seed=1)
    ours, tunix = Ours(engine(slots, cap)), tunix_sampler(cap)

    def batches():
        for i in range(0, n, slots):
            tunix(prompts(n)[i : i + slots], int(lengths[i : i + slots].max()), 1.0)
        return lengths.sum()  # the rest of what it drew is of no use

    turns = {"ours": ours.turn(requests(n, lengths)), "tunix": batches}
    yield report(f"long tail, {n} requests, {slots} slots", turns, repeats)
    s = ours.stats
    yield say(
        f"lengths of the long tail: mean {lengths.mean():.0f}, median"
        f" {np.median(lengths):.0f}, longest {lengths.max()}; slot occupancy"
        f" {s.queued_occupancy:.1%} until the queue is empty, {s.occupancy:.1%} in all"
    )


def group(repeats: int, samples: int = 16) -> Found:
    """Samples of one prompt against one sample: CPU time up to the first token, and pages.

    Full pages of a prompt are shared; what does not fill its last page is copied for each sample,
    which then goes on in that page. So small pages waste less of a prompt's memory, and a prompt
    that fills its pages wastes nothing."""
    for page, tokens in ((0, 512), (64, 512), (64, 513), (8, 512)):
        ours = Ours(engine(samples, 16, prompt=tokens, page_tokens=page))
        prompt, g = prompts(1, tokens)[0].tolist(), ours.engine.geometry
        wanted = [Request(prompt, 0, i, 1) for i in range(samples)]
        pages = {}
        for n in (1, samples):
            ours.turn(wanted[:n])()
            cached, used = tokens - 1, round(ours.stats.peak_cache * g.pages)
            pages[n] = used if cached % g.page_tokens else used - n  # those hold the new token
        speed = rates({n: ours.turn(wanted[:n]) for n in (1, samples)}, repeats)
        share = f"{pages[samples]} prompt pages of {g.page_tokens} against {pages[1]}"
        time_of_one = speed[1] / (speed[samples] / samples)
        yield say(
            f"{samples} samples of one prompt of {tokens - 1} cached tokens against one sample:"
            f" {time_of_one:.2f}x the CPU time up to the first token; {share}"
            f" ({pages[samples] / pages[1]:.2f}x)"
        )


def linear(repeats: int, cap: int = 512, slots: int = 64) -> Found:
    """Cost by requests; the pool in use against the tokens that are alive."""
    for page in (32, 64):
        ours = Ours(engine(slots, cap, page_tokens=page))
        turns, alive = {}, {}
        for n in (256, 512, 1024):
            work = requests(n, log_normal(n, cap, cap / 4, seed=1))
            turns[f"{n} requests"] = ours.turn(work)
            peak, now, held = 0, 0, dict.fromkeys(range(n), PROMPT)

            def count(index, start, tokens, logps, held=held):
                nonlocal now
                held[index] = PROMPT + start + len(tokens)
                now += held[index]

            def chunk(finished):
                nonlocal now, peak
                peak, now = max(peak, now), 0

            ours.turn(work, on_tokens=count, watch=Watch(progress=chunk))()
            g = ours.engine.geometry
            used = ours.stats.peak_cache * g.tokens
            alive[n] = f"{peak:,} alive, {used:,.0f} in pages, {slots * (PROMPT + cap):,} full"
        found = rates(turns, repeats)
        for (name, rate), text in zip(found.items(), alive.values(), strict=True):
            yield say(
                f"pages of {page}, {name}: {rate:,.0f} tokens per CPU-second; cache tokens at the"
                f" peak: {text}"
            )


def readers(repeats: int) -> Found:
    """Whole rows against pages of 64 on CPU, by row length: what `paged.geometry` chooses from."""
    for row in (128, 160, 192, 256, 384, 512, 768, 1024):
        cap = row - PROMPT
        for kind, lengths in (
            ("all full", None),
            ("long tail", log_normal(128, cap, cap / 3, seed=1)),
        ):
            turns = {
                name: Ours(engine(64, cap, page_tokens=page)).turn(requests(128, lengths))
                for name, page in (("rows", row), ("pages", 64))
            }
            yield report(f"rows of {row} tokens, {kind}", turns, repeats)


def main() -> None:
    peers = (fixed_length, draw_alone, uneven)
    parts = (*peers, group, linear)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--readers", action="store_true", help="only the CPU readers, no peers")
    parser.add_argument("--only", choices=[p.__name__ for p in parts], help="one part of the table")
    parser.add_argument("--isa", choices=timing.ISA, help="all sides without what is beyond it")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    if args.write and (args.readers or args.only):
        parser.error("--write: only the whole table is kept")
    parts, found = peers if args.isa else parts, []
    for part in [readers] if args.readers else parts:
        if args.only in (None, part.__name__):
            found += part(args.repeats)
    if args.write:
        rows = [f for f in found if isinstance(f, tuple)]
        width = max(map(len, rows))
        head = ("work per CPU-second", "dapo_jax", *("peer (ours over it)",) * (width - 2))
        made = results.made_by("jax", "google-tunix", "transformers", "torch")
        rows = [row + ("",) * (width - len(row)) for row in rows]
        said = "\n".join(f"- {f}" for f in found if isinstance(f, str))
        heading = f"{HEADING}, {args.isa} alone" if args.isa else HEADING
        section = f"{heading}\n\n{made}; float32, one pinned core, medians of {args.repeats} turns."
        results.write(heading, f"{section}\n\n{results.table(head, *rows)}\n\n{said}")


if __name__ == "__main__":
    main()
