"""What a start of several processes takes from the hub and from disk, and who compiles.

    python -m benchmarks start --full [--size=1.5B] [--processes=4]

Writes a random bfloat16 checkpoint of Qwen2.5's shape (1.5B: 3.1 GB, removed afterwards), which a
stand-in for the hub gives out, and starts processes on loopback three times: first with nothing,
then once more, then where there is a checkpoint to go on from. They do what a run does before its
first step: meet, find the model, lay its weights out over all of them. A number per process.
"""

import collections
import concurrent.futures
import functools
import os
import socket
import tempfile
import time
from pathlib import Path

import huggingface_hub
import jax
from jax._src import cache_key, compiler

from benchmarks import harness
from benchmarks.harness import Flag
from benchmarks.load_memory import SIZES, shape_of, write
from dapo_jax import config, parallel
from dapo_jax.checkpoint import workdir
from dapo_jax.hosts import start
from dapo_jax.model import hf

FLAGS = {"size": Flag("tiny", "1.5B", choices=SIZES), "processes": Flag(2, 4)}
COLUMNS = ("hub_calls", "hub_bytes", "weight_bytes", "programs_compiled", "seconds")


def child(hub: Path, folder: str, address: str, total: int, index: int) -> dict:
    """One process of a start; it runs in a process of its own."""
    counts = collections.Counter(dict.fromkeys(COLUMNS, 0))
    compile_and_load, read = compiler.backend_compile_and_load, hf._read

    def download(name, allow_patterns):
        counts["hub_calls"] += 1
        if "*.safetensors" in allow_patterns:
            counts["hub_bytes"] += sum(p.stat().st_size for p in (hub / name).iterdir())
        return str(hub / name)

    def counted_compile(backend, module, devices, *rest):
        counts["programs_compiled"] += len({d.process_index for d in devices}) > 1
        return compile_and_load(backend, module, devices, *rest)

    def counted_read(*arguments):
        part = read(*arguments)
        counts["weight_bytes"] += part.nbytes
        return part

    # On CPU each process has another fingerprint of the same devices; those of a slice have one.
    cache_key._hash_accelerator_config = lambda key, devices: key.update(b"slice")
    huggingface_hub.snapshot_download = download
    compiler.backend_compile_and_load, hf._read = counted_compile, counted_read
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
    counts["seconds"] = round(time.perf_counter() - began, 1)
    jax.distributed.shutdown()
    return counts


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
    table = harness.Table("start", *COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        hub, run = Path(folder, "hub"), str(Path(folder, "run"))
        (hub / "Qwen/stand-in").mkdir(parents=True)
        write(hub / "Qwen/stand-in", shape_of(args.size))
        for what in ("first start", "second start", "with a checkpoint"):
            if what == "with a checkpoint":
                Path(run, "checkpoints", "1").mkdir(parents=True)
            counts = starts(hub, run, args.processes)
            table.row(what, *(", ".join(f"{c[column]:,}" for c in counts) for column in COLUMNS))
    return [table]
