"""Qwen2.5-0.5B's shape on a CPU, beside transformers and torch: decode, update, peak memory.

    pip install -r benchmarks/requirements-peers.txt ...       # see that file; a venv of its own
    python benchmarks/half_billion.py [--write] [--cores=1,2] [--repeats=3] [--only=decode|update]
        [--sequences=2]

Random float32 weights, the real vocabulary. Each side runs in a process of its own, in turns, with
its threads on the first cores named; a figure is the median over processes of CPU-seconds (user and
system, all threads), and peak memory is the largest resident set of such a process, from its start.

    decode  16 prompts of 64 tokens at temperature 1, by dapo_jax's Engine and by `generate`; the
            difference of two lengths, so that prefill and compilation drop out
    update  --sequences (2) of 64 + 448 tokens: the DAPO loss, clipping at 1, AdamW; the second
            update and later. Torch: micro-batches of one sequence, logits of response tokens alone,
            fused AdamW, SDPA, nothing recomputed. Losses and gradients of both are compared before,
            on a small shape with the same weights
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time

if len(sys.argv) > 2 and sys.argv[1] == "side":  # before XLA and OpenMP size their thread pools
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _cores = set(sorted(os.sched_getaffinity(0))[-int(sys.argv[2]) :])
    os.sched_setaffinity(0, _cores)
    os.environ["OMP_NUM_THREADS"] = sys.argv[2]

import resource
import statistics

import numpy as np
import results

HEADING = "## Qwen2.5-0.5B's shape on a CPU"
REAL = dict(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, rope_theta=1e6, rms_eps=1e-6, tie_embeddings=True,
)  # fmt: skip
SMALL = REAL | dict(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, head_dim=16
)
ROWS, PROMPT, SHORT, LONG = 16, 64, 16, 48  # of decode: tokens
RESPONSE = 448
ADAMW = dict(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1)
LR = 1e-6


def cpu_seconds(function, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return seconds


def prompts(n: int, tokens: int = PROMPT) -> np.ndarray:
    return np.random.default_rng(0).integers(0, REAL["vocab_size"], (n, tokens))


def our_weights(shape):
    """Random ones, made a few at a time where they stay: made whole, they are there two or three
    times while they go from numpy to jax, which would be the peak."""
    import jax

    from dapo_jax.model import qwen2

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


# ------------------------------------------------------------------------------------------------
# Decode: () -> CPU-seconds of a call of SHORT and of one of LONG tokens a row
# ------------------------------------------------------------------------------------------------


def our_decode() -> list[float]:

    from dapo_jax import config, parallel
    from dapo_jax.model import qwen2
    from dapo_jax.rollout.draw import Draw
    from dapo_jax.rollout.engine import Engine, Request

    shape = qwen2.Shape(**REAL, scan_layers=False)
    mesh = parallel.make_mesh(dict.fromkeys(parallel.AXES, 1))
    engine = Engine(
        shape, mesh, config.base().sharding.decode.to_dict(), slots=ROWS, prompt_tokens=PROMPT,
        response_tokens=LONG, chunk=16, prefill_prompts=8, stop_ids=[], dtype="float32",
    )  # fmt: skip
    weights = engine.decode_params(our_weights(shape), keep=False)
    requests = [Request(p.tolist(), i, 0) for i, p in enumerate(prompts(ROWS))]

    def call(tokens):
        engine.generate(weights, requests, Draw(seed=1, max_tokens=tokens))

    call(SHORT)  # compiles
    return [cpu_seconds(lambda n=n: call(n), 1)[0] for n in (SHORT, LONG)]


def torch_model(shape: dict):
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=shape["vocab_size"],
            hidden_size=shape["hidden_size"],
            intermediate_size=shape["intermediate_size"],
            num_hidden_layers=shape["num_layers"],
            num_attention_heads=shape["num_heads"],
            num_key_value_heads=shape["num_kv_heads"],
            rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
            rms_norm_eps=shape["rms_eps"],
            tie_word_embeddings=True,
            use_cache=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )


def their_decode() -> list[float]:
    import torch

    network, ids = torch_model(REAL).eval(), torch.from_numpy(prompts(ROWS))

    def call(tokens):
        lengths = dict(min_new_tokens=tokens, max_new_tokens=tokens)
        with torch.inference_mode():
            network.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                temperature=1.0, **lengths,
            )  # fmt: skip

    call(2)
    return [cpu_seconds(lambda n=n: call(n), 1)[0] for n in (SHORT, LONG)]


# ------------------------------------------------------------------------------------------------
# Update: (shape, weights) -> function () -> (loss, gradient norm) that makes one
# ------------------------------------------------------------------------------------------------


def experience(shape: dict, sequences: int):
    """(ids [N, T], advantages [N], old log-probs [N, responses])."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, shape["vocab_size"], (sequences, PROMPT + RESPONSE))
    old = np.full((sequences, RESPONSE), -np.log(shape["vocab_size"]), np.float32)
    return ids, rng.normal(size=sequences).astype(np.float32), old


def our_update(shape: dict, params=None, sequences: int = 2):
    import jax

    from dapo_jax import config, parallel
    from dapo_jax.dapo import objective, packing, update
    from dapo_jax.model import qwen2

    rows, remat = 1, "dots"  # of the micro-batches; recomputes attention and what is cheap
    network = qwen2.Shape(**shape, remat=remat, attention_chunk=512, head_chunk=512)
    mesh = parallel.make_mesh(dict.fromkeys(parallel.AXES, 1))
    tx = update.optimizer(**ADAMW, clip_norm=1.0)
    trainer = update.Trainer(network, mesh, config.base().sharding.train.to_dict(), tx, "float32")
    ids, advantages, old = experience(shape, sequences)
    items = [
        packing.Item(x[:PROMPT], x[PROMPT:], logp, float(a), 1 / old.size)
        for x, logp, a in zip(ids, old, advantages, strict=True)
    ]
    packed, used, _ = packing.pack(
        items, row_tokens=PROMPT + RESPONSE, micro_rows=rows, max_items=len(items)
    )
    packed = parallel.to_device(packed, trainer.row_sharding)
    params = our_weights(network) if params is None else params
    params = jax.device_put(params, trainer.param_shardings)  # or the second update compiles again
    state = [params, trainer.init_opt_state(params)]
    del params
    old = packed.sampled_logp_AxRxT
    batch = update.Batch(packed, old, old, np.int32(used))
    knobs = update.Knobs(np.float32(LR), np.float32(1), objective.coefficients(config.base().loss))

    def step():
        *state[:], metrics = trainer.update(*state, batch, knobs)
        return float(metrics["loss"]), float(metrics["grad_norm"])

    return step


def their_update(shape: dict, network=None, sequences: int = 2):
    import torch
    from torch.nn.functional import cross_entropy

    network = network or torch_model(shape)
    network.train()
    ids, advantages, old = map(torch.from_numpy, experience(shape, sequences))
    adamw = dict(betas=(ADAMW["b1"], ADAMW["b2"]), eps=ADAMW["eps"])
    optimizer = torch.optim.AdamW(
        network.parameters(), LR, **adamw, weight_decay=ADAMW["weight_decay"], fused=True
    )

    def step():
        total = 0.0
        for row, advantage, before in zip(ids, advantages, old, strict=True):
            hidden = network.model(row[None], use_cache=False).last_hidden_state
            logits = network.lm_head(hidden[0, PROMPT - 1 : -1])
            logp = -cross_entropy(logits, row[PROMPT:], reduction="none")
            del logits
            ratio = torch.exp(logp - before)
            clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).sum() / old.numel()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    return step


def agree() -> str:
    """The same weights and tokens at the small shape: both sides' first two updates."""
    import jax
    import torch

    from dapo_jax.model import qwen2

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

    shape = qwen2.Shape(**SMALL)
    names, inputs = (qwen2.metadata(shape, name) for name in ("hf", "in_axes"))
    params = jax.tree.map(found, qwen2.abstract(shape), names, inputs)
    params = jax.tree.map(jax.numpy.array, params)
    one, two = our_update(SMALL, params), their_update(SMALL, network)
    pairs = [(one(), two()) for _ in range(2)]
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=2e-4, atol=1e-6)
    return ", ".join(f"{a[1]:.5f} and {b[1]:.5f}" for a, b in pairs)


# ------------------------------------------------------------------------------------------------
# Processes
# ------------------------------------------------------------------------------------------------


def side(what: str, who: str, sequences: str) -> dict:
    """One process's part: CPU-seconds of a unit of work, and its peak memory."""
    if what == "agree":
        return dict(said=agree())
    if what == "decode":
        short, long = dict(ours=our_decode, theirs=their_decode)[who]()
        seconds = (long - short) / (LONG - SHORT)
    else:
        step = dict(ours=our_update, theirs=their_update)[who](REAL, sequences=int(sequences))
        step()  # compiles; makes the optimizer's state
        seconds = statistics.median(cpu_seconds(step, 2))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return dict(seconds=seconds, peak=used.ru_maxrss / 2**20)


def run(cores: int, what: str, who: str, sequences: int) -> dict:
    """The same in a process of its own, on the last `cores` cores."""
    command = [sys.executable, __file__, "side", str(cores), what, who, str(sequences)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(cores, what, who, found := json.loads(out.splitlines()[-1]), flush=True)
    return found


def compared(cores: int, what: str, repeats: int, sequences: int) -> tuple[str, ...]:
    """A row of the table: medians over processes, which take turns."""
    found = [
        [run(cores, what, who, sequences) for who in ("ours", "theirs")] for _ in range(repeats)
    ]
    middle = lambda i, name: statistics.median(turn[i][name] for turn in found)
    ours, theirs = (middle(i, "seconds") for i in (0, 1))
    work = dict(decode=ROWS, update=sequences * (PROMPT + RESPONSE))[what]
    peaks = (f"{middle(i, 'peak'):.2f}" for i in (0, 1))
    return (
        f"{what}, {cores} core(s)",
        f"{work / ours:.1f}",
        f"{work / theirs:.1f}",
        f"{theirs / ours:.2f}x",
        *peaks,
    )


def main() -> None:
    if sys.argv[1:2] == ["side"]:
        print(json.dumps(side(*sys.argv[3:6])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--sequences", type=int, default=2, help="of an update")
    parser.add_argument("--only", choices=("decode", "update"))
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write: only the whole table is kept")
    whats = [args.only] if args.only else ["decode", "update"]
    said = run(1, "agree", "both", 2)["said"] if "update" in whats else ""
    rows = [
        compared(cores, what, args.repeats, args.sequences)
        for what in whats
        for cores in map(int, args.cores.split(","))
    ]
    head = ("tokens a CPU-second", "dapo_jax", "transformers, torch", "", "peak GiB", "theirs")
    table = results.table(head, *rows)
    print(table)
    if args.write:
        made = results.made_by("jax", "transformers", "torch")
        about = (
            f"float32; medians of {args.repeats} processes a side; an update is of"
            f" {args.sequences} x {PROMPT + RESPONSE} tokens. Gradient norms of two updates at the"
            f" small shape, both sides: {said}."
        )
        results.write(HEADING, f"{HEADING}\n\n{made}; {about}\n\n{table}\n")


if __name__ == "__main__":
    main()
