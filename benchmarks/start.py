"""Starts of several processes: how often the hub is asked, what is read and compiled, how long.

    python -m benchmarks start --full [--size=1.5B] [--processes=4]

Writes a random bfloat16 checkpoint of Qwen2.5's shape in sharded files (1.5B: 3.1 GB, removed
afterwards). A stand-in for the hub serves it. Processes start on loopback three times: with
nothing, once more, and where there is a checkpoint to resume from. They do what a run does before
its first step: meet, find the model, shard its weights over all of them. One number per process.
"""

import concurrent.futures
import functools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
from jax._src import cache_key, compiler

from benchmarks import harness, sides
from benchmarks.harness import Flag
from dapo_jax import config, parallel
from dapo_jax.checkpoint import workdir
from dapo_jax.hosts import start
from dapo_jax.model import hf, hf_format
from dapo_jax.model.qwen2 import Shape
from dapo_jax.plan import shapes

FLAGS = {
    "size": Flag("tiny", "1.5B", choices=("tiny", "0.5B", "1.5B", "3B")),
    "processes": Flag(2, 4),
}
COLUMNS = ("hub_calls", "hub_bytes", "weight_bytes", "programs_compiled", "seconds")


def write(directory: Path, shape: Shape, shard_bytes: int = 1_000_000_000) -> None:
    """A checkpoint of repeated noise: what is in it does not matter, that it differs does."""
    noise = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    files, index = hf._plan(shape, 2, shard_bytes)
    for file, tensors in files.items():
        values = (np.resize(noise, w.hf_shape) for w, _ in tensors)
        hf._write_file(directory / file, tensors, "bfloat16", values)
    (directory / hf_format.INDEX).write_bytes(index)
    (directory / "config.json").write_text(json.dumps(hf_format.config_json(shape, "bfloat16")))


def counting(fetch: Callable[[str, Sequence[str]], tuple[str, int]]) -> dict[str, int]:
    """What this process asks of the hub, reads and compiles for all from now on. fetch: in place of
    the hub's download, (name, patterns of files) -> (folder, bytes)."""
    counts = dict.fromkeys(COLUMNS[:-1], 0)
    compile_and_load, read = compiler.backend_compile_and_load, hf._read

    def download(name, allow_patterns):
        folder, size = fetch(name, allow_patterns)
        counts["hub_calls"] += 1
        counts["hub_bytes"] += size
        return folder

    def counted_read(*arguments):
        part = read(*arguments)
        counts["weight_bytes"] += part.nbytes
        return part

    def counted_compile(backend, module, devices, *rest):
        counts["programs_compiled"] += len({d.process_index for d in devices}) > 1
        return compile_and_load(backend, module, devices, *rest)

    huggingface_hub.snapshot_download = download
    compiler.backend_compile_and_load, hf._read = counted_compile, counted_read
    return counts


def child(hub: Path, folder: str, address: str, total: int, index: int) -> dict[str, float]:
    """One process of a start; it runs in a process of its own."""

    def fetch(name, patterns):
        files = (hub / name).iterdir() if "*.safetensors" in patterns else ()
        return str(hub / name), sum(p.stat().st_size for p in files)

    counts = counting(fetch)
    # On CPU each process has another fingerprint of the same devices; those of a slice have one.
    cache_key._hash_accelerator_config = lambda key, devices: key.update(b"slice")
    began = time.perf_counter()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, total, index)
    home, c = workdir.open_workdir(folder), config.base()
    c.model.path = "Qwen/stand-in"
    start.share_programs(home)
    directory = start.model_directory(c, home, home.checkpoints)
    shape = hf.read_shape(directory)
    if not Path(home.checkpoints).exists():
        mesh = parallel.make_mesh({"data": 1, "fsdp": total, "tensor": 1})
        params = hf.load_params(directory, shape, mesh, c.sharding.train.to_dict(), "bfloat16")
        jax.block_until_ready(params)
    seconds = round(time.perf_counter() - began, 1)
    jax.distributed.shutdown()
    return counts | {"seconds": seconds}


def starts(hub: Path, folder: str, total: int) -> list[dict]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    one = functools.partial(
        harness.apart, child, hub, folder, address, total,
        JAX_PLATFORMS="cpu", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(total) as pool:
        return list(pool.map(one, range(total)))


def measure(args) -> list[harness.Table]:
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder, "hub")
        model = hub / "Qwen/stand-in"
        model.mkdir(parents=True)
        write(
            model,
            sides.SMALL if args.size == "tiny" else shapes.published(f"Qwen/Qwen2.5-{args.size}"),
        )
        table, run = harness.Table("start", *COLUMNS), Path(folder, "run")
        for what in ("first start", "second start", "with a checkpoint"):
            if what == "with a checkpoint":
                (run / "checkpoints" / "1").mkdir(parents=True)
            counts = starts(hub, str(run), args.processes)
            table.row(what, *(", ".join(f"{c[column]:,}" for c in counts) for column in COLUMNS))
        return [table]
