"""Sampling and updates of Qwen2.5 on one NVIDIA GPU, and of transformers and torch on the same one.

    python -m benchmarks gpu --all             # all parts of gpu_parts.py, of three sizes
    python -m benchmarks gpu --only decode update --sizes 1.5B
    python -m benchmarks gpu --only=roofline   # arithmetic; wants no GPU

The peers' part wants torch and transformers beside jax[cuda13]. results/gpu.json was put together
by hand from the files that `--out` names.

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

import sys
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import gpu_roofline, harness, sides
from benchmarks.harness import Flag, median_seconds
from dapo_jax import plan
from dapo_jax.log import hardware
from dapo_jax.model import adapters, qwen2
from dapo_jax.pods import slices
from dapo_jax.rollout.draw import Draw


class Setting(NamedTuple):
    """Lengths in TOKENS."""

    prompt: int = 256
    slots: int = 256
    equal: int = 512
    cap: int = 2048
    mean: int = 512
    rows: int = 64  # of an update
    row: int = 2048


def setting(size: str) -> Setting:
    return Setting(8, 16, 16, 32, 8, 8, 128) if size == "tiny" else Setting()


PROMPT, SLOTS, EQUAL, _, _, ROWS, ROW = Setting()
SIZES = gpu_roofline.SIZES
PARTS = "decode", "wide", "update", "step", "bits", "kernels", "peers"
FLAGS = {
    "sizes": Flag(SIZES, SIZES, choices=("tiny", *SIZES)),
    "repeats": Flag(1, 2),
    "all": Flag(False, False, "all parts of gpu_parts.py, or those that --only names"),
    "only": Flag(("",), ("",), "some parts, or roofline: arithmetic", ("", "roofline", *PARTS)),
    "minutes": Flag(20, 20, "after which no part is begun"),
    "out": Flag("gpu.json", "gpu.json", "the parts' file"),
}


def shape_of(size: str) -> qwen2.Shape:
    if size == "tiny":
        return sides.SMALL._replace(scan_layers=True)
    return plan.published(f"Qwen/Qwen2.5-{size}", scan_layers=True, remat="full", attention="auto")


def device_peak() -> dict:
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)  # a CPU tells none
    return {"device": device.device_kind, "gib": peak / 2**30}


def sampler(size: str, slots: int = 0) -> tuple:
    """(engine, random decode weights). slots: 0 = as everywhere."""
    shape, s = shape_of(size), setting(size)
    chunk = min(64, s.equal)
    engine = sides.engine(
        shape, slots or s.slots, s.prompt, s.cap, chunk, "bfloat16", prefill_prompts=32
    )
    params = jax.jit(qwen2.init, static_argnums=0)(shape, jax.random.key(0))
    return engine, engine.decode_params(params, keep=False)


def sample_ours(size: str, repeats: int, slots: int = 0) -> dict:
    (engine, weights), s = sampler(size, slots), setting(size)
    slots = engine.slots
    rng = np.random.default_rng(0)

    def turn(lengths):
        work = sides.requests(rng.integers(0, 1000, (len(lengths), s.prompt)), lengths)
        return lambda: engine.generate(weights, work, Draw(seed=1))

    # What compiles: the programs of all slots and of a call's last rows.
    more = [1 + engine.chunk * sum(i < n for n in engine.rungs) for i in range(slots)]
    turn([min(n, s.cap) for n in more])()
    tailed = sides.log_normal(2 * slots, s.cap, s.mean).tolist()
    found = {
        name: sum(lengths) / median_seconds(turn(lengths), repeats)
        for name, lengths in (("equal", [s.equal] * slots), ("tailed", tailed))
    }
    return found | device_peak()


def update_ours(size: str, repeats: int, remat="full", micro_rows=4, rank=0, norm=False) -> dict:
    """rank: of adapters, 0 = all weights are trained. norm: say the gradient's norm too."""
    lora = adapters.Lora(rank, 16.0, ("q", "k", "v", "o", "gate", "up", "down"), "bfloat16")
    s, lora = setting(size), lora if rank else None
    shape = shape_of(size)._replace(remat=remat, lora=lora, head_chunk=s.row)
    made = sides.trainer(shape, "bfloat16")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, (s.rows, s.row))
    items = sides.items(ids[:, : s.prompt], ids[:, s.prompt :], rng.normal(size=s.rows), -12.0)
    key = jax.random.key_data(jax.random.key(0))
    params = made.init_params(key)
    params = made.adapted(params, key) if rank else params
    rows = dict(row_tokens=s.row, micro_rows=micro_rows, lr=1e-6)
    step, _ = sides.update_step(made, params, items, **rows)
    del params
    first = step()
    assert not first["skipped"]
    seconds = median_seconds(step, repeats)
    # Of weights that stay as they are no gradient is needed.
    flops = (2 if rank else 3) * hardware.forward_flops(shape.merged, [s.row] * s.rows)
    peak = slices.peak_flops(jax.devices()[0].device_kind) or np.inf
    found = {"tokens": s.rows * s.row / seconds, "mfu": flops / seconds / peak} | device_peak()
    return found | ({"grad_norm": float(first["grad_norm"])} if norm else {})


def torch_model(size: str, dtype):
    import torch

    torch.set_default_device("cuda")
    more = dict(max_position_embeddings=4096, attn_implementation="sdpa")
    return sides.transformers_model(shape_of(size), **more).to(dtype)


def sample_theirs(size: str, repeats: int) -> dict:
    import torch

    model = torch_model(size, torch.bfloat16).eval()
    ids = torch.randint(0, 1000, (SLOTS, PROMPT))

    def turn(tokens=EQUAL):
        out = sides.transformers_generate(model, ids, tokens)
        torch.cuda.synchronize()
        assert out.shape == (SLOTS, PROMPT + tokens)

    turn(8)
    rate = SLOTS * EQUAL / median_seconds(turn, repeats)
    return {"equal": rate, "gib": torch.cuda.max_memory_allocated() / 2**30}


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
                logps = [checkpoint(log_probs, *part, use_reentrant=False) for part in parts]
            logp = torch.cat(logps, 1)
            ratio = (logp - old[rows]).clamp(-20, 20).exp()
            a = advantage[rows]
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            ((loss * weight).sum() / (ROWS * (ROW - PROMPT))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tx.step()
        tx.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    turn()
    rate = ROWS * ROW / median_seconds(turn, repeats)
    return {"tokens": rate, "gib": torch.cuda.max_memory_allocated() / 2**30}


def measure(args) -> list[harness.Table]:
    if not (args.all or any(args.only)):
        sys.exit("error: python -m benchmarks gpu: give --all, or parts by --only")
    by_arithmetic = [gpu_roofline.table()] if "roofline" in args.only else []
    if {*args.only} == {"roofline"}:
        return by_arithmetic
    from benchmarks import gpu_parts  # which imports this

    return by_arithmetic + gpu_parts.run(args)
