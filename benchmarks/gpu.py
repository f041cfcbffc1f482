"""Sampling and updates of Qwen2.5 on one NVIDIA GPU, and of transformers and torch on the same one.

    python benchmarks/gpu.py --write           # wants torch and transformers beside jax[cuda13]
    python benchmarks/gpu.py --sizes 1.5B --no-peers

Random weights, bfloat16 products, float32 master weights and Adam moments, nothing but lengths ends
a response. Each side and size is a process of its own, so that it has the memory to itself.

    sampling    256 slots, prompts of 256 tokens. 'equal': 256 responses of 512 tokens; the peer is
                `generate` (SDPA, its default cache) on one batch of 256. 'tailed': 512 responses,
                log-normal lengths of mean 512, at most 2,048; the peer would wait for the longest.
    update      one step of AdamW after clipping, DAPO's loss, on 64 sequences of 256 + 1,792 tokens
                (131,072 in all), the blocks rematerialised. The peer is transformers' model under
                autocast with SDPA, gradient checkpointing and fused AdamW; its head, too, is run on
                parts of a row at a time and again in the backward pass.

Wall seconds, the median of `--repeats` after a turn that is not counted (of sampling a short one),
which compiles. MFU: FLOPs that the model needs (causal attention, nothing twice) over the device's
dense bfloat16 peak. Memory: the most that the platform's allocator held.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import results

SIZES = ("0.5B", "1.5B")
PROMPT, SLOTS, EQUAL, CAP, MEAN = 256, 256, 512, 2048, 512
ROWS, ROW = 64, 2048
HEADING = "## On a GPU"


def median_seconds(turn, repeats: int) -> float:
    """Of a turn that has been made before, or one like it."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# ------------------------------------------------------------------------------------------------
# Ours
# ------------------------------------------------------------------------------------------------


def shape_of(size: str, **choices):
    from dapo_jax import plan

    choices = dict(scan_layers=True, remat="full", attention="auto") | choices
    return plan.qwen2_5(size, **choices)


def device_peak() -> dict:
    import jax

    device = jax.devices()[0]
    return {"device": device.device_kind, "gib": device.memory_stats()["peak_bytes_in_use"] / 2**30}


def sample_ours(size: str, repeats: int) -> dict:
    import jax
    from lengths import log_normal

    from dapo_jax import config, parallel
    from dapo_jax.model import qwen2
    from dapo_jax.rollout.draw import Draw
    from dapo_jax.rollout.engine import Engine, Request

    shape, mesh = shape_of(size), parallel.make_mesh(dict.fromkeys(parallel.AXES, 1))
    engine = Engine(
        shape, mesh, config.base().sharding.decode.to_dict(), slots=SLOTS, prompt_tokens=PROMPT,
        response_tokens=CAP, chunk=64, prefill_prompts=32, stop_ids=[], dtype="bfloat16",
    )  # fmt: skip
    weights = engine.decode_params(jax.jit(qwen2.init, static_argnums=0)(shape, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def turn(lengths):
        prompts = rng.integers(0, 1000, (len(lengths), PROMPT)).tolist()
        work = [Request(p, i, 0, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        return lambda: engine.generate(weights, work, Draw(seed=1))

    turn([1] * SLOTS)()
    found = {"reader": engine.geometry.reader}
    for name, lengths in (
        ("equal", [EQUAL] * SLOTS),
        ("tailed", log_normal(2 * SLOTS, CAP, MEAN).tolist()),
    ):
        found[name] = sum(lengths) / median_seconds(turn(lengths), repeats)
    return found | device_peak()


def update_ours(size: str, repeats: int) -> dict:
    import jax

    from dapo_jax import config, parallel
    from dapo_jax.dapo import objective, packing, update
    from dapo_jax.log import hardware
    from dapo_jax.pods import slices

    shape, mesh = shape_of(size), parallel.make_mesh(dict.fromkeys(parallel.AXES, 1))
    tx = update.optimizer(0.9, 0.999, 1e-8, 0.1, 1.0)
    made = update.Trainer(shape, mesh, config.base().sharding.train.to_dict(), tx, "bfloat16")
    rng, n = np.random.default_rng(0), ROW - PROMPT
    draw = lambda n: rng.integers(0, 1000, n)
    items = [
        packing.Item(draw(PROMPT), draw(n), np.full(n, -12.0, "f"), float(a), 1 / (n * ROWS))
        for a in rng.normal(size=ROWS)
    ]
    rows, used, _ = packing.pack(items, row_tokens=ROW, micro_rows=4, max_items=ROWS)
    rows = parallel.to_device(rows, made.row_sharding)
    old = rows.sampled_logp_AxRxT
    knobs = update.Knobs(
        np.float32(1e-6), np.float32(1), objective.coefficients(config.base().loss)
    )
    key = jax.random.key_data(jax.random.key(0))
    state = [made.init_params(key), made.init_opt_state(made.init_params(key))]

    def turn():
        *state[:], log = made.update(*state, update.Batch(rows, old, old, np.int32(used)), knobs)
        assert not log["skipped"]  # waits for it

    turn()
    seconds = median_seconds(turn, repeats)
    flops = 3 * hardware.forward_flops(shape, [ROW] * ROWS)
    peak = slices.peak_flops(jax.devices()[0].device_kind)
    return {"tokens": ROWS * ROW / seconds, "mfu": flops / seconds / peak} | device_peak()


# ------------------------------------------------------------------------------------------------
# Theirs
# ------------------------------------------------------------------------------------------------


def torch_model(size: str, dtype):
    import torch
    import transformers

    c = shape_of(size)
    shape = transformers.Qwen2Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, tie_word_embeddings=c.tie_embeddings,
        max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_device("cuda")
    return transformers.Qwen2ForCausalLM(shape).to(dtype)


def torch_peak() -> dict:
    import torch

    return {"gib": torch.cuda.max_memory_allocated() / 2**30}


def sample_theirs(size: str, repeats: int) -> dict:
    import torch

    model = torch_model(size, torch.bfloat16).eval()
    ids = torch.randint(0, 1000, (SLOTS, PROMPT))

    def turn(tokens=EQUAL):
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, min_new_tokens=tokens, max_new_tokens=tokens,
            )  # fmt: skip
        torch.cuda.synchronize()
        assert out.shape == (SLOTS, PROMPT + tokens)

    turn(8)
    return {"equal": SLOTS * EQUAL / median_seconds(turn, repeats)} | torch_peak()


def update_theirs(size: str, repeats: int) -> dict:
    import torch
    from torch.utils.checkpoint import checkpoint

    model = torch_model(size, torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tx = torch.optim.AdamW(model.parameters(), 1e-6, (0.9, 0.999), weight_decay=0.1, fused=True)
    ids = torch.randint(0, 1000, (ROWS, ROW + 1))
    advantage, old = torch.randn(ROWS, 1), torch.full((ROWS, ROW), -12.0)
    weight = torch.arange(ROW)[None] >= PROMPT - 1

    def log_probs(x, targets):
        logits = model.lm_head(x).float()
        return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)

    def turn():
        for at in range(0, ROWS, 4):
            rows = slice(at, at + 4)
            with torch.autocast("cuda", torch.bfloat16):
                x = model.model(ids[rows, :-1], use_cache=False).last_hidden_state
                parts = zip(x.split(1024, 1), ids[rows, 1:].split(1024, 1), strict=True)
                logp = torch.cat(
                    [checkpoint(log_probs, *part, use_reentrant=False) for part in parts], 1
                )
            ratio = (logp - old[rows]).clamp(-20, 20).exp()
            a = advantage[rows]
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            ((loss * weight).sum() / (ROWS * (ROW - PROMPT))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tx.step()
        tx.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    turn()
    seconds = median_seconds(turn, repeats)
    return {"tokens": ROWS * ROW / seconds} | torch_peak()


# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------

PARTS = {f.__name__: f for f in (sample_ours, update_ours, sample_theirs, update_theirs)}


def measured(part: str, size: str, repeats: int) -> dict:
    """In a process of its own, which leaves nothing on the GPU."""
    command = [
        sys.executable,
        __file__,
        f"--part={part}",
        f"--sizes={size}",
        f"--repeats={repeats}",
    ]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"error: {part} of {size} ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(part, size, found, flush=True)
    return found


def rows(size: str, peers: bool, repeats: int) -> tuple[str, list[tuple]]:
    """(device, rows of the table) of one model."""
    found = {
        part: measured(part, size, repeats) if peers or part.endswith("ours") else {}
        for part in PARTS
    }
    sample, update, sample_peer, update_peer = found.values()
    if update_peer:  # of the same tokens
        update_peer["mfu"] = update["mfu"] * update_peer["tokens"] / update["tokens"]

    def row(what, ours, theirs, key, form, ratio=False):
        x, y = ours[key], theirs.get(key)
        beside = f" ({x / y:.2f}x)" if y and ratio else ""
        return f"{size}: {what}", format(x, form), (format(y, form) if y else "") + beside

    return sample["device"], [
        row("sampling, equal lengths, tokens/s", sample, sample_peer, "equal", ",.0f", True),
        row("sampling, long tail, tokens/s", sample, sample_peer, "tailed", ",.0f", True),
        row("sampling, peak GiB", sample, sample_peer, "gib", ".1f"),
        row("update, tokens/s", update, update_peer, "tokens", ",.0f", True),
        row("update, MFU", update, update_peer, "mfu", ".1%"),
        row("update, peak GiB", update, update_peer, "gib", ".1f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--part", choices=PARTS, help="print one part as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args.sizes[0], args.repeats)))
        return
    found = [rows(size, not args.no_peers, args.repeats) for size in args.sizes]
    packages = ("jax",) if args.no_peers else ("jax", "torch", "transformers")
    table = results.table(
        ("Qwen2.5", "dapo_jax", "transformers (ours over it)"), *(r for _, of in found for r in of)
    )
    section = f"{HEADING}\n\n{found[0][0]}: {results.made_by(*packages)}.\n\n{table}"
    print(section)
    if args.write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
