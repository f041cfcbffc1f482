"""Everything that is to be measured on one GPU, part by part: `python -m benchmarks gpu --all`.

    decode    sampling, lengths equal and with a long tail
    wide      sampling of four times the responses, with four times the slots
    update    a step of AdamW; of 7B adapters of rank 32
    step      whole steps of a training on the embedded task: rollout, old log-probs, updates
    bits      the same samples and the same updated weights, twice
    kernels   tests/test_gpu.py: kernels against plain readers
    peers     transformers with torch, where they are in this environment

Each part and size has a process of its own. What is found stands in `--out` after each of them,
with the driver and the clocks around it; nothing is begun after `--minutes`. 'tiny' runs on CPU.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zlib

import jax
import numpy as np

from benchmarks import gpu, harness, sides
from dapo_jax import config, train
from dapo_jax.log import metrics
from dapo_jax.model import qwen2
from dapo_jax.reward.grading import Grade
from dapo_jax.rollout.draw import Draw

QUERY = (
    "name,driver_version,memory.total,power.limit,clocks.sm,clocks.mem,"
    "clocks.max.sm,clocks.max.mem,temperature.gpu"
)
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "torch",
    "transformers",
)


def card() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; {} where there is none."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    values = (x.strip() for x in done.stdout.splitlines()[0].split(","))
    return dict(zip(QUERY.split(","), values, strict=True))


# Remat and rows of a pass: what fits into 80 GB, the quickest last.
UPDATES = {
    "0.5B": (("dots_attention", 8), ("none", 16)), "1.5B": (("full", 8), ("dots_attention", 8)),
    "7B": (("dots_attention", 4), ("none", 2), ("none", 4)),
    "tiny": (("full", 4), ("dots_attention", 8)),
}  # fmt: skip


def update(size: str, repeats: int) -> dict:
    rank = 32 if size == "7B" else 0  # all of its weights and moments would take 91 GB
    out = {}
    for remat, rows in UPDATES[size]:
        try:
            found = gpu.update_ours(size, repeats, remat=remat, micro_rows=rows, rank=rank)
        except jax.errors.JaxRuntimeError as error:  # no memory: the others have it
            found = {"broke": str(error).splitlines()[0][:200]}
        out |= {f"{remat}, passes of {rows} rows: {k}": x for k, x in found.items()}
    return out


def wide(size: str, repeats: int) -> dict:
    if size == "7B":
        return {"skipped": "its cache would not fit"}
    return gpu.sample_ours(size, repeats, slots=4 * gpu.setting(size).slots)


def judged(problem, response: str) -> Grade:
    """Right for half of all texts, so that groups of a random model teach."""
    right = zlib.crc32(response.encode()) % 2 == 0
    return Grade(1.0 if right else -1.0, right)


def step(size: str, repeats: int) -> dict:
    """Seconds of the last of the steps; the first ones compile."""
    c, s, shape = config.base(), gpu.setting(size), gpu.shape_of(size)
    c.update({f"model.{n}": getattr(shape, n) for n in qwen2.Shape._fields[:10]})
    c.update({"model.dtype": "bfloat16", "model.scan_layers": True, "model.remat": "full"})
    c.rollout.groups, c.rollout.group_size, c.rollout.chunk = s.slots // 8, 8, min(64, s.equal)
    c.rollout.slots, c.rollout.prefill_prompts = s.slots, max(s.slots // 8, 1)
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = s.equal, s.equal // 4
    c.optim.minibatches, c.optim.row_tokens, c.optim.micro_batch_rows = 2, s.row, 4
    c.supervised_warmup.skill_steps = c.supervised_warmup.habit_steps = 0
    c.steps, c.eval.every, c.checkpoint.every, c.log.tensorboard = 2 + repeats, 0, 0, False
    with tempfile.TemporaryDirectory() as folder:
        train.train(c, folder, score=judged)
        last = metrics.read(pathlib.Path(folder, "metrics.jsonl"))[-1]
    named = (
        "time/rollout_s",
        "time/update_s",
        "time/step_s",
        "perf/tokens_per_s",
        "perf/mfu_update",
    )
    return {name: last[name] for name in named if name in last}


def bits(size: str, repeats: int) -> dict:
    """How many of two samplings and of two updated models are the same, bit for bit."""
    s = gpu.setting(size)
    engine, weights = gpu.sampler(size)
    ids = np.random.default_rng(0).integers(0, 1000, (s.slots, s.prompt))
    drawn = [engine.generate(weights, sides.requests(ids), Draw(seed=1, max_tokens=s.equal))[0]
             for _ in range(2)]  # fmt: skip
    flat = ([x for response in responses for x in response[:3]] for responses in drawn)
    alike = all(map(np.array_equal, *flat))
    engine.release()
    del weights, engine
    made = [gpu.update_ours(size, 1, norm=True)["grad_norm"] for _ in range(2)]
    return {"samples alike": alike, "gradients' norms alike": made[0] == made[1]}


def kernels(size: str, repeats: int) -> dict:
    # Which a machine without a GPU skips.
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--no-header", "tests/test_gpu.py"]
    platforms = {} if size == "tiny" else {"JAX_PLATFORMS": "cuda,cpu"}
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | platforms
    done = subprocess.run(
        command, cwd=harness.ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    counts = {
        what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return counts | ({"failed tests": failed} if failed else {}) | {"status": done.returncode}


def peers(size: str, repeats: int) -> dict:
    if size in ("tiny", "7B") or not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return {"skipped": "no transformers with torch, or a size without peers"}
    out = {}
    for what, part in (("sampling", gpu.sample_theirs), ("update", gpu.update_theirs)):
        found = harness.apart(part, size, repeats)
        out |= {f"transformers {what}: {name}": x for name, x in found.items()}
    return out


PARTS = {
    "decode": gpu.sample_ours, "wide": wide, "update": update, "step": step, "bits": bits,
    "kernels": kernels, "peers": peers,
}  # fmt: skip
ONCE = {"bits", "kernels", "step"}  # of the first size alone


def run(args) -> list[harness.Table]:
    """SystemExit: there is no GPU."""
    tiny, about = [*args.sizes] == ["tiny"], card()
    if not about and not tiny:
        sys.exit(
            "error: python -m benchmarks gpu --all: no NVIDIA GPU here (nvidia-smi lists none)"
        )
    there = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in there}
    out = {"date": str(datetime.date.today()), "commit": harness.commit(), "card": about}
    out |= {"machine": harness.machine(), "versions": versions, "parts": {}}
    table, began = (
        harness.Table("part", "size", "what", "found", name="gpu_parts"),
        time.monotonic(),
    )
    for part in (name for name in PARTS if name in args.only or not any(args.only)):
        for size in args.sizes[:1] if part in ONCE else args.sizes:
            if time.monotonic() - began > 60 * args.minutes:
                table.note(f"{part}, {size}: not begun, {args.minutes} minutes are over.")
                continue
            before, started = card(), time.monotonic()
            try:  # of one part that breaks the others are measured all the same
                alone = (lambda f, *a: f(*a)) if part in ("kernels", "peers") or tiny else apart
                found = alone(PARTS[part], size, args.repeats)
            except Exception as error:
                found = {"broke": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            clocks = {n: [x.get(n) for x in (before, card())] for n in ("clocks.sm", "clocks.mem")}
            took = {"seconds": round(time.monotonic() - started, 1)} | (clocks if about else {})
            out["parts"].setdefault(part, {})[size] = found | took
            for what, value in found.items():
                table.row(part, size, what, f"{value:,.4g}" if isinstance(value, float) else value)
            pathlib.Path(args.out).write_text(json.dumps(out, indent=1, default=str) + "\n")
    table.note(
        f"{about.get('name', 'no GPU')}, driver {about.get('driver_version', '-')}; {args.out}."
    )
    return [table]


def apart(part, size: str, repeats: int) -> dict:
    return harness.apart(part, size, repeats, XLA_PYTHON_CLIENT_MEM_FRACTION="0.95")
