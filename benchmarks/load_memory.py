"""Host memory that loading a checkpoint takes (Linux: it reads /proc).

    python -m benchmarks load_memory --full [--size=0.5B] [--dtype=float32]

Writes a random bfloat16 checkpoint of Qwen2.5's shape in sharded files to a temporary directory
(1.5B: 3.1 GB, removed afterwards) and loads it in fresh processes:

    on 1 CPU device    peak resident memory, in units of the parameters' own bytes
    on 8 CPU devices   the largest host buffer, and the most host memory alive at a time (both
                       without the simulated devices' own memory), in units of the largest tensor
"""

import json
import tempfile
import time
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from benchmarks import harness, sides
from benchmarks.harness import Flag
from dapo_jax import config, parallel, plan
from dapo_jax.model import hf, hf_format
from dapo_jax.model.qwen2 import Shape

SIZES = ("tiny", "0.5B", "1.5B", "3B")
FLAGS = {
    "size": Flag("tiny", "1.5B", choices=SIZES),
    "dtype": Flag("bfloat16", "bfloat16", "dtype to load to"),
}


def shape_of(size: str) -> Shape:
    return sides.SMALL if size == "tiny" else plan.qwen2_5(size)


def write(directory: Path, shape: Shape, shard_bytes: int = 1_000_000_000) -> None:
    """A checkpoint of repeated noise: what is in it does not matter, that it differs does."""
    noise = np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16)
    files = hf._plan(shape, 2, shard_bytes)
    for file, tensors in files.items():
        values = (np.resize(noise, w.hf_shape) for w, _ in tensors)
        hf._write_file(directory / file, tensors, "bfloat16", values)
    (directory / hf_format.INDEX).write_bytes(hf._index(files, 2))
    (directory / "config.json").write_text(json.dumps(hf_format.config_json(shape, "bfloat16")))


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) * 1024


def load(directory: Path, dtype: str) -> dict[str, float]:
    """Bytes and seconds of a load in this process, which is a fresh one."""
    shape = hf.read_shape(directory)
    mesh = rules = None
    buffers = [0]
    if len(jax.devices()) > 1:
        mesh = parallel.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
        rules = config.base().sharding.train.to_dict()
        tracemalloc.start()
        read = hf._read

        def counted(*args):
            part = read(*args)
            buffers.append(part.nbytes)
            return part

        hf._read = counted
    jax.block_until_ready(jax.numpy.zeros(1))
    before, start = resident("VmRSS"), time.perf_counter()
    params = hf.load_params(directory, shape, mesh, rules, dtype)
    jax.block_until_ready(params)
    return dict(
        seconds=time.perf_counter() - start,
        before=before,
        peak=resident("VmHWM"),
        params=sum(x.nbytes for x in jax.tree.leaves(params)),
        tensor=max(w.size for w in hf_format.weights(shape)) * 2,
        buffer=max(buffers),
        host_peak=tracemalloc.get_traced_memory()[1] if mesh else 0,
    )


def measure(args) -> list[harness.Table]:
    table = harness.Table("devices", "what", "GB", "over", "ratio", "seconds")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shape_of(args.size))
        for devices, wanted in (
            (1, {"peak resident memory": "peak", "before loading": "before"}),
            (8, {"largest host buffer": "buffer", "host memory at its peak": "host_peak"}),
        ):
            over = "params" if devices == 1 else "tensor"
            flags = f"--xla_force_host_platform_device_count={devices}"
            environment = dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
            m = harness.apart(load, Path(folder), args.dtype, **environment)
            for what, key in wanted.items():
                ratio, seconds = f"{m[key] / m[over]:.3f}", f"{m['seconds']:.1f}"
                table.row(devices, what, f"{m[key] / 1e9:.2f}", over, ratio, seconds)
    return [table]
