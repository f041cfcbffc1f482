"""Drafts on real responses: how many are kept, by source, and tokens per CPU-second with them.

    DAPO_JAX_ASSETS=... python -m benchmarks drafts --full [--only=kept|products|speed]

kept    responses of `verifier/*.jsonl.gz`, tokenized as Qwen2.5, are played back: the rows of a
        problem go on side by side, each pass guesses up to --tokens and keeps what the response
        goes on with. 'epoch 2': half of a problem's responses, the other half being history
products  what a pass multiplies by weights, by rows: random float32 weights of --layers layers of
        Qwen2.5-0.5B and as large a part of its vocabulary, CPU-milliseconds, medians of five
speed   random float32 weights of --layers layers of Qwen2.5-0.5B and as large a part of its
        vocabulary (6: a quarter of the model, 0.5 GB), one core. Every draw does its work and then
        gives the response's token, so that the sampler replays real text; CPU-seconds, medians of
        --repeats turns. Eight responses of a problem through four slots, or of two problems through
        sixteen; in 'epoch 2' four of each of two problems, whose other four were drawn before.
        Beside them texts that no guess is right of: random ids, and random ones of 50
"""

import collections
import dataclasses
import gzip
import json
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import half_billion, harness, sides
from benchmarks.harness import Flag
from dapo_jax import config, parallel
from dapo_jax.data import tokenizer
from dapo_jax.rollout import drafts, draw
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine, Request
from dapo_jax.rollout.settings import Rollout

FLAGS = {
    "tokens": Flag(3, 6, "of a guess, at most"),
    "problems": Flag(4, 54, "of each file"),
    "rows": Flag((4,), (4, 16), "slots"),
    "layers": Flag(2, 6),
    "length": Flag(24, 256, "of a replayed response, in tokens, at most"),
    "repeats": Flag(1, 3),
    "only": Flag("", "", "kept, products or speed", ("", "kept", "products", "speed")),
}
PLACES = {4: (12, 1.25), 16: (24, 1.3)}  # slots -> places of a pass, and its time in single steps
WIDTHS = (1, 4, 8, 12, 16, 20, 24, 32, 48, 64)  # rows of a product
PROMPT = 128  # tokens of a replayed prompt: its last ones


def texts(path: pathlib.Path, problems: int) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt, responses with a stop token) of the first problems of a file."""
    tok, found = tokenizer.load(path.parents[1] / "tokenizer"), collections.defaultdict(list)
    with gzip.open(path, "rt") as lines:
        for row in map(json.loads, lines):
            found[row["pid"]].append(row)
    end = [max(tok.stop_ids)]
    rows = [found[pid] for pid in list(found)[:problems]]
    encoded = lambda group: [tok.encode(row["response"]) + end for row in group]
    return [(tok.encode(group[0]["problem"]), encoded(group)) for group in rows]


def played(groups, tokens: int) -> drafts.Counts:
    """Counts of a playback, in which all rows of a problem draw one after the other."""
    source, counts = drafts.Drafts(tokens), drafts.Counts()
    for prompt, responses in groups:
        source.begin()
        at = [0] * len(responses)
        for i in range(len(at)):
            source.open(i, prompt)
        while live := [i for i, r in enumerate(responses) if at[i] < len(r)]:
            guesses = [source.draft(i, len(responses[i]) - at[i] - 1) for i in live]
            kept = []
            for i, guess in zip(live, guesses, strict=True):
                ahead = responses[i][at[i] : at[i] + len(guess.tokens)]
                same = [a == b for a, b in zip(guess.tokens, ahead, strict=True)]
                kept.append([*same, False].index(False))
                source.drew(i, guess, responses[i][at[i] : at[i] + kept[-1] + 1])
                at[i] += kept[-1] + 1
            source.count(guesses, kept)
        counts += source.counts
    return counts


def acceptance(folder: pathlib.Path, args) -> harness.Table:
    names = [f"{s}: kept / drafted" for s in drafts.SOURCES]
    table = harness.Table("responses of", "a problem", "tokens a pass", *names, name="drafts_kept")
    for path in sorted((folder / "verifier").glob("*.jsonl.gz")):
        groups = texts(path, args.problems)
        first = [(prompt, r[: len(r) // 2]) for prompt, r in groups]
        second = [(prompt, r[len(r) // 2 :]) for prompt, r in groups]
        for epochs in (1, 2) if len(groups[0][1]) == 8 else (1,):
            n = played(first + second if epochs == 2 else groups, args.tokens)
            cells = [f"{a} / {d}" for a, d in zip(n.accepted, n.drafted, strict=True)]
            each = len(groups[0][1]) // epochs
            name = path.name.split(".jsonl")[0].replace("__", "/") + ", 2 epochs" * (epochs == 2)
            table.row(name, each, f"{n.tokens_per_row:.2f}", *cells)
    return table


def measured_shape(layers: int):
    """So many layers of the real shape, and as large a part of its vocabulary."""
    real = half_billion.REAL
    vocab = real.vocab_size * layers // real.num_layers
    return real._replace(num_layers=layers, vocab_size=vocab, scan_layers=False)


def products(folder: pathlib.Path, args) -> harness.Table:
    c, rng = measured_shape(args.layers), np.random.default_rng(0)
    D, F = c.hidden_size, c.intermediate_size
    Hd, Kd = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = {"q": (D, Hd), "k": (D, Kd), "v": (D, Kd), "o": (Hd, D)}
    sizes |= {"gate": (D, F), "up": (D, F), "down": (F, D)}
    number = lambda size: jnp.asarray(rng.standard_normal(size, np.float32))
    weights = {name: [number(size) for _ in range(c.num_layers)] for name, size in sizes.items()}
    weights["head"] = [number((c.vocab_size, D))]  # as it is held: the embedding
    options = parallel.compiler_options(sides.one_device())
    names = {"q, k, v, o": "qkvo", "gate, up": ("gate", "up"), "down": ("down",), "head": ("head",)}
    columns = *(f"{name}: ms" for name in names), "all: ms", "over 4 rows", "over 16 rows"
    table, found = harness.Table("rows", *columns, name="drafts_products"), {}

    def seconds(rows: int, name: str) -> float:
        """CPU-seconds of all layers' products with this weight."""
        into = weights[name][0].shape[name == "head"]
        each = (lambda x, w: x @ w.T) if name == "head" else (lambda x, w: x @ w)
        f = jax.jit(lambda x, ws: [each(x, w) for w in ws], compiler_options=options)
        call = lambda: jax.block_until_ready(f(jnp.ones((rows, into)), weights[name]))
        call()  # compiles
        return harness.median_seconds(call, 5, time.process_time)

    for rows in WIDTHS:
        found[rows] = [1e3 * sum(seconds(rows, n) for n in group) for group in names.values()]
    for rows, parts in found.items():
        ratios = [f"{sum(parts) / sum(found[n]):.2f}" for n in (4, 16)]
        table.row(rows, *(f"{ms:.1f}" for ms in (*parts, sum(parts))), *ratios)
    return table


def replay(tokens_NxGxT: np.ndarray) -> None:
    """From here on this process's samplers draw `tokens[stream, sample]`: the log-prob is still
    of an inverse CDF of the logits, at a uniform number that is the token's share of the ids."""
    ids, real = jnp.asarray(tokens_NxGxT, jnp.float32), draw.draw

    def drawn(logits_SxV, id_S, temperature, top_p, mode, near=None):
        out = real(logits_SxV, id_S / logits_SxV.shape[-1], temperature, top_p, mode, near)
        return out._replace(token_S=id_S.astype(jnp.int32))

    draw.row_keys = lambda key, stream_S, sample_S: (stream_S, sample_S)
    draw.uniform = lambda key, at_S: ids[key[0], key[1], at_S]
    draw.draw = drawn  # `draw_apart` and draw_triton.py call it by this name


def speed(folder: pathlib.Path, args) -> harness.Table:
    T, rng, shape = args.length, np.random.default_rng(0), measured_shape(args.layers)
    V = shape.vocab_size
    groups = texts(folder / "verifier" / "QwenLM__Qwen2.5-Math.jsonl.gz", 2)
    few = rng.integers(0, V, 50)
    kinds = {
        "real responses": [[(r + [0] * T)[:T] for r in responses] for _, responses in groups],
        "random ids": rng.integers(0, V, (2, 8, T)),
        "random ones of 50 ids": rng.choice(few, (2, 8, T)),
    }
    played = np.concatenate([np.asarray(x) % V for x in kinds.values()])
    replay(played)
    mesh, rules = sides.one_device(), config.base().sharding.decode.to_dict()
    fixed = dict(prompt_tokens=PROMPT, response_tokens=T, stop_ids=[], dtype="float32")
    weights, speeds = half_billion.our_weights(shape), "tokens / CPU-s without, with drafts"
    columns = "slots", "text", speeds, "ratio", "tokens a row and pass", "passes / programs run"
    table = harness.Table(*columns, name="drafts")

    def turn(engine, work, before=()):
        """(CPU-seconds of a call, its Stats, counts of guesses). before: requests of the epoch
        before."""
        engine.drafts = drafts.Drafts(args.tokens, PLACES[engine.slots][1])
        if before:
            engine.generate(held, before, Draw(seed=0))
        started = time.process_time()
        responses, stats = engine.generate(held, work, Draw(seed=0))
        seconds = time.process_time() - started
        for request, response in zip(work, responses, strict=True):
            text = played[request.stream, request.sample]
            np.testing.assert_array_equal(response.tokens, text[: len(response.tokens)])
        return seconds, stats, engine.drafts.counts

    for rows in args.rows:
        places, cost = PLACES[rows]
        how = dict(draft_tokens=args.tokens, draft_places=places, draft_cost=cost)
        size = Rollout(slots=rows, chunk=8, prefill_prompts=4)
        usual = Engine(shape, mesh, rules, size, **fixed)
        ours = drafts.DraftEngine(shape, mesh, rules, dataclasses.replace(size, **how), **fixed)
        held = usual.decode_params(weights)
        for k, kind in enumerate(kinds):
            work = [
                Request([t % V for t in prompt[-PROMPT:]], 2 * k + n, g, 0 if k else len(r[:T]))
                for n, (prompt, responses) in enumerate(groups)
                for g, r in enumerate(responses)
            ]
            one, old = work[: max(rows, 8)], [r for r in work if r.sample < 4]
            works = {kind: (one,)}
            if not k:
                works[f"{kind}, epoch 2"] = [r for r in work if r.sample >= 4], old
            for name, given in works.items():
                turn(usual, [r._replace(limit=16) for r in given[0]])  # compiles
                turn(ours, *given)  # also what runs where guesses have proved right
                found = [(turn(usual, given[0]), turn(ours, *given)) for _ in range(args.repeats)]
                without, with_ = (statistics.median(x[i][0] for x in found) for i in (0, 1))
                _, stats, n = found[0][1]
                speeds = [stats.tokens / s for s in (without, with_)]
                cells = ["{:.2f}, {:.2f}".format(*speeds), f"{without / with_:.2f}"]
                cells += [f"{n.tokens_per_row:.2f}", f"{n.passes} / {stats.chunks}"]
                table.row(rows, name, *cells)
    return table


def measure(args) -> list[harness.Table]:
    folder = pathlib.Path(os.environ["DAPO_JAX_ASSETS"])
    parts = {"kept": acceptance, "products": products, "speed": speed}
    return [make(folder, args) for name, make in parts.items() if args.only in ("", name)]
