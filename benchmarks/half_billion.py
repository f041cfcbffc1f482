"""Qwen2.5-0.5B's shape on a CPU, beside transformers and torch: decode, update, peak memory.

    pip install -r benchmarks/requirements-peers.txt ...       # see that file; a venv of its own
    python -m benchmarks half_billion --full [--cores 1 2] [--only=decode|update] [--sequences=2]

Random float32 weights, the real vocabulary. Each side runs in a process of its own, in turns, with
its threads on the last cores; a figure is the median over processes of CPU-seconds (user and
system, all threads), and peak memory is the largest resident set of such a process, from its start.

    decode  16 prompts of 64 tokens at temperature 1, by dapo_jax's Engine and by `generate`; the
            difference of two lengths, so that prefill and compilation drop out
    update  --sequences (2) of 64 + 448 tokens: the DAPO loss, clipping at 1, AdamW; the second
            update and later. Torch: micro-batches of one sequence, logits of response tokens alone,
            fused AdamW, SDPA, nothing recomputed. Losses and gradients of both are compared before,
            on a small shape with the same weights
"""

import math
import os
import resource
import time

import jax
import numpy as np

from benchmarks import harness, sides
from benchmarks.harness import Flag, median_seconds
from dapo_jax.model import qwen2
from dapo_jax.rollout.draw import Draw

REAL = qwen2.Shape(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=True,
)  # fmt: skip
SMALL = REAL._replace(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, head_dim=16
)
ROWS, PROMPT, SHORT, LONG = 16, 64, 16, 48  # of decode: tokens
RESPONSE, LR = 448, 1e-6
FLAGS = {
    "repeats": Flag(1, 3, "processes a side"),
    "cores": Flag((1,), (1, 2)),
    "sequences": Flag(2, 2, "of an update"),
    "only": Flag("", "", "decode or update", ("", "decode", "update")),
}


def prompts(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, REAL.vocab_size, (n, PROMPT))


def our_weights(shape):
    """Random ones, made a few at a time where they stay: made whole, they are there two or three
    times while they go from numpy to jax, which would be the peak."""
    rng = np.random.default_rng(0)

    def put(w, part, i):
        by_part = w.reshape(-1, part.size)
        return jax.lax.dynamic_update_index_in_dim(by_part, part, i, 0).reshape(w.shape)

    put = jax.jit(put, donate_argnums=0)

    def made(like):
        w, parts = jax.numpy.zeros(like.shape), math.gcd(like.size, 64)
        for i in range(parts):
            part = rng.standard_normal(like.size // parts, np.float32)
            w = jax.block_until_ready(put(w, 0.02 * part, i))
        return w

    return jax.tree.map(made, qwen2.abstract(shape))


def torch_model(shape: qwen2.Shape):
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    return sides.transformers_model(shape, use_cache=True)


def our_decode():
    shape = REAL._replace(scan_layers=False)
    engine = sides.engine(shape, ROWS, PROMPT, LONG, 16, "float32")
    weights = engine.decode_params(our_weights(shape), keep=False)
    requests = sides.requests(prompts(ROWS))
    return lambda tokens: engine.generate(weights, requests, Draw(seed=1, max_tokens=tokens))


def their_decode():
    import torch

    network, ids = torch_model(REAL).eval(), torch.from_numpy(prompts(ROWS))
    return lambda tokens: sides.transformers_generate(network, ids, tokens)


def experience(shape: qwen2.Shape, sequences: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(ids [N, T], advantages [N], the log-prob of every response token before)."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, shape.vocab_size, (sequences, PROMPT + RESPONSE))
    return ids, rng.normal(size=sequences).astype(np.float32), -math.log(shape.vocab_size)


def our_update(shape: qwen2.Shape, params=None, sequences: int = 2):
    # remat: recomputes attention and what is cheap
    shape = shape._replace(remat="dots", attention_chunk=512, head_chunk=512)
    ids, *told = experience(shape, sequences)
    items = sides.items(ids[:, :PROMPT], ids[:, PROMPT:], *told)
    sizes = dict(row_tokens=PROMPT + RESPONSE, micro_rows=1, lr=LR)
    made = sides.trainer(shape, "float32")
    given = [our_weights(shape) if params is None else params]
    step, _ = sides.update_step(made, given.pop(), items, **sizes)  # no other owner: they are large

    def call():
        metrics = step()
        return float(metrics["loss"]), float(metrics["grad_norm"])

    return call


def their_update(shape: qwen2.Shape, network=None, sequences: int = 2):
    import torch
    from torch.nn.functional import cross_entropy

    network = network or torch_model(shape)
    network.train()
    ids, advantages, old = experience(shape, sequences)
    rows = [*zip(torch.from_numpy(ids), torch.from_numpy(advantages), strict=True)]
    b1, b2, eps, decay = sides.ADAMW.values()
    optimizer = torch.optim.AdamW(
        network.parameters(), LR, (b1, b2), eps, weight_decay=decay, fused=True
    )

    def step():
        total = 0.0
        for row, advantage in rows:
            hidden = network.model(row[None], use_cache=False).last_hidden_state
            logits = network.lm_head(hidden[0, PROMPT - 1 : -1])
            logp = -cross_entropy(logits, row[PROMPT:], reduction="none")
            del logits
            ratio = torch.exp(logp - old)
            clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).sum()
            loss = loss / (sequences * RESPONSE)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    return step


def agree() -> str:
    """The same weights and tokens at the small shape: both sides' first two updates."""
    import torch

    network = torch_model(SMALL)
    with torch.no_grad():
        for w in network.parameters():  # biases and norms that are not trivial
            w.add_(0.1 * torch.randn_like(w))
    given = {name: w.detach().numpy().copy() for name, w in network.named_parameters()}

    def found(like, hf, inputs):
        if "{}" in hf:
            one = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
            return np.stack([found(one, hf.format(i), inputs) for i in range(like.shape[0])])
        return (given[hf].T if inputs else given[hf]).reshape(like.shape)

    names, inputs = (qwen2.metadata(SMALL, name) for name in ("hf", "in_axes"))
    params = jax.tree.map(found, qwen2.abstract(SMALL), names, inputs)
    params = jax.tree.map(jax.numpy.array, params)
    one, two = our_update(SMALL, params), their_update(SMALL, network)
    pairs = [(one(), two()) for _ in range(2)]
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=2e-4, atol=1e-6)
    return ", ".join(f"{a[1]:.5f} and {b[1]:.5f}" for a, b in pairs)


SIDES = {
    "decode": {"ours": our_decode, "theirs": their_decode},
    "update": {"ours": our_update, "theirs": their_update},
}


def side(what: str, who: str, sequences: int) -> tuple[float, float]:
    """One process's part: (CPU-seconds of a unit of work, its peak memory in GiB)."""
    cpu = lambda function, times: median_seconds(function, times, time.process_time)
    if what == "decode":
        call = SIDES[what][who]()
        call(SHORT)  # compiles
        seconds = (cpu(lambda: call(LONG), 1) - cpu(lambda: call(SHORT), 1)) / (LONG - SHORT)
    else:
        step = SIDES[what][who](REAL, sequences=sequences)
        step()  # compiles; makes the optimizer's state
        seconds = cpu(step, 2)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def compared(cores: int, what: str, repeats: int, sequences: int) -> tuple[str, ...]:
    """A row of the table: medians over processes, which take turns."""
    found = {"ours": [], "theirs": []}
    for _ in range(repeats):
        for who, of in found.items():
            of.append(harness.apart(side, what, who, sequences, cores=cores, JAX_PLATFORMS="cpu"))
    (a, our_peak), (b, their_peak) = (np.median(of, axis=0) for of in found.values())
    work = dict(decode=ROWS, update=sequences * (PROMPT + RESPONSE))[what]
    rates = f"{work / a:.1f}", f"{work / b:.1f}", f"{b / a:.2f}x"
    return f"{what}, {cores} core(s)", *rates, f"{our_peak:.2f}", f"{their_peak:.2f}"


def measure(args) -> list[harness.Table]:
    head = ("dapo_jax", "transformers, torch", "ours over it", "peak GiB", "theirs")
    table = harness.Table("tokens a CPU-second", *head)
    whats = [args.only] if args.only else list(SIDES)
    if "update" in whats:
        said = harness.apart(agree, cores=1, JAX_PLATFORMS="cpu")
        table.note(f"Gradient norms of two updates at the small shape, both sides: {said}.")
    for what in whats:
        for cores in args.cores:
            table.row(*compared(cores, what, args.repeats, args.sequences))
    return [table]
