"""What a start of several processes takes from the hub and from disk, and who compiles.

    python benchmarks/start.py [--size=1.5B] [--processes=4] [--write]

Writes a random bfloat16 checkpoint of Qwen2.5's shape (1.5B: 3.1 GB, removed afterwards), which a
stand-in for the hub gives out, and starts processes on loopback three times: first with nothing,
then once more, then where there is a checkpoint to go on from. They do what a run does before its
first step: meet, find the model, lay its weights out over all of them.
"""

import argparse
import collections
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import huggingface_hub
import jax
import load_memory
import results
from jax._src import cache_key, compiler

from dapo_jax import config, parallel, plan
from dapo_jax.checkpoint import workdir
from dapo_jax.hosts import start
from dapo_jax.model import hf

HEADING = "## A start of several processes"
COLUMNS = ("hub_calls", "hub_bytes", "weight_bytes", "programs_compiled", "seconds")


def child(hub: Path, folder: str, address: str, index: int, total: int) -> dict:
    """Runs in a process of its own."""
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
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, __file__, "--child", str(hub), folder, address]
    running = [
        subprocess.Popen(
            [*command, str(i), str(total)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for i in range(total)
    ]
    return [json.loads(p.communicate()[0].splitlines()[-1]) for p in running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=load_memory.SIZES, default="1.5B")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    given = parser.parse_args()
    lines = [
        HEADING,
        "",
        f"`python benchmarks/start.py`, {datetime.date.today()}, jax {jax.__version__}: random"
        f" bfloat16 weights of Qwen2.5-{given.size}, {given.processes} processes on loopback of"
        " one machine, a stand-in for the hub; a number per process. Seconds are of this machine"
        " and what else runs on it; the rest is counted.",
        "",
        f"| start | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        hub, run = Path(folder, "hub"), str(Path(folder, "run"))
        (hub / "Qwen/stand-in").mkdir(parents=True)
        load_memory.write(hub / "Qwen/stand-in", plan.qwen2_5(given.size))
        for what in ("first start", "second start", "with a checkpoint"):
            if what == "with a checkpoint":
                Path(run, "checkpoints", "1").mkdir(parents=True)
            counts = starts(hub, run, given.processes)
            cells = (", ".join(f"{c[column]:,}" for c in counts) for column in COLUMNS)
            lines.append(f"| {what} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if given.write:
        results.write(HEADING, "\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        hub, folder, address, index, total = sys.argv[2:]
        print(json.dumps(child(Path(hub), folder, address, int(index), int(total))))
    else:
        main()
