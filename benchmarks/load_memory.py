"""Host memory that loading a checkpoint takes (Linux: it reads /proc).

    python benchmarks/load_memory.py [--size=0.5B] [--dtype=float32]

Writes a random bfloat16 checkpoint of Qwen2.5's shape in sharded files to a temporary directory
(1.5B: 3.1 GB, removed afterwards) and loads it in fresh processes:

    on 1 CPU device    peak resident memory, in units of the parameters' own bytes
    on 8 CPU devices   the largest host buffer, and the most host memory alive at a time (both
                       without the simulated devices' own memory), in units of the largest tensor
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from dapo_jax import config, parallel, plan
from dapo_jax.model import hf, hf_format
from dapo_jax.model.qwen2 import Shape, param_count

SIZES = ("0.5B", "1.5B", "3B")


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


def load(directory: Path, dtype: str) -> dict:
    """Runs in a process of its own."""
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
        largest_tensor=max(w.size for w in hf_format.weights(shape)) * 2,
        largest_buffer=max(buffers),
        host_peak=tracemalloc.get_traced_memory()[1] if mesh else 0,
    )


def measure(directory: Path, devices: int, dtype: str) -> dict:
    command = [sys.executable, __file__, f"--load={directory}", f"--dtype={dtype}"]
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.5B", choices=SIZES)
    parser.add_argument("--dtype", default="bfloat16", help="dtype to load to")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(Path(args.load), args.dtype)))
        return

    shape, GB = plan.qwen2_5(args.size), 1e9
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), shape)
        print(f"{args.size}: {param_count(shape):,} parameters, bfloat16 -> {args.dtype}")
        m = measure(Path(directory), 1, args.dtype)
        print(
            f"1 device:  peak RSS {m['peak'] / GB:.2f} GB = {m['peak'] / m['params']:.3f} x the"
            f" parameters' {m['params'] / GB:.2f} GB ({m['before'] / GB:.2f} GB of it before"
            f" loading); {m['seconds']:.1f} s"
        )
        m = measure(Path(directory), 8, args.dtype)
        print(
            f"8 devices: largest host buffer {m['largest_buffer'] / GB:.3f} GB ="
            f" {m['largest_buffer'] / m['largest_tensor']:.3f} x the largest tensor's"
            f" {m['largest_tensor'] / GB:.3f} GB; host memory at its peak"
            f" {m['host_peak'] / GB:.3f} GB = {m['host_peak'] / m['largest_tensor']:.3f} x;"
            f" {m['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
