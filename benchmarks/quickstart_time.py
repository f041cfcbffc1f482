"""The quickstart from start to end: with nothing compiled, with all compiled, and on one core.

    python -m benchmarks quickstart_time --full

Each run is the command that launch/quickstart.sh ends in, base model included, in a folder of its
own. An empty cache is one of XLA's programs; Python's own files are compiled in either case.
"""

import os
import pathlib
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection

from benchmarks import harness
from benchmarks.harness import Flag

FLAGS = {"runs": Flag(1, 2, "of each"), "steps": Flag(2, 60, "rollout steps")}


def once(cache: pathlib.Path, cores: Collection[int], steps: int) -> tuple[float, float]:
    """(wall, CPU) seconds of one run on these cores."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--dry-run", f"--workdir={folder}/run", f"--config.steps={steps}"]
        script = ["bash", str(harness.ROOT / "launch" / "quickstart.sh"), *words]
        told = subprocess.run(script, check=True, capture_output=True, text=True).stdout
        variables, _, arguments = told.partition(" -m dapo_jax.train ")
        command = [*shlex.split(variables)[:-1], f"JAX_COMPILATION_CACHE_DIR={cache}"]
        command += [sys.executable, "-m", "dapo_jax.train", *shlex.split(arguments)]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            command, cwd=harness.ROOT, check=True, capture_output=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def measure(args) -> list[harness.Table]:
    table = harness.Table("what", "empty cache", "warm cache")
    cores = sorted(os.sched_getaffinity(0))
    cell = lambda found: ", ".join(f"{x:.1f}" for x in found)
    with tempfile.TemporaryDirectory() as folder:
        caches = [pathlib.Path(folder) / str(i) for i in range(args.runs)]
        run = lambda cache, on: once(cache, on, args.steps)
        empty, warm = ([run(cache, cores)[0] for cache in caches] for _ in range(2))
        table.row(f"{len(cores)} idle cores, seconds", cell(empty), cell(warm))
        alone = [[run(cache / "one", cores[-1:])[1] for cache in caches] for _ in range(2)]
        table.row("pinned to one core, CPU-seconds", *map(cell, alone))
    return [table]
