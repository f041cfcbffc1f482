"""Measures: python -m benchmarks NAME [--full] [--write] [--isa=AVX2] [flags], at the root.

Without `--full` a benchmark takes its smallest setting, which shows that it works; kept results are
of `--full`. `--write` keeps a result in benchmarks/results/NAME.json; `tables` makes the pages of
docs/results/ and README.md's table from all of them.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import harness, tables

PEERS = ("jax", "google-tunix", "transformers", "torch")


class Benchmark(NamedTuple):
    packages: tuple[str, ...] = ("jax",)  # whose versions stand beside its result
    cores: int = 0  # that it is pinned to; 0: all


BENCHMARKS = {
    "arms": Benchmark(("jax", "flax")),
    "attention_kernel": Benchmark(("jax", "libtpu")),
    "cache_dtype": Benchmark(),
    "chaos": Benchmark(),
    "credit": Benchmark(("jax", "flax")),
    "diagnose": Benchmark(),
    "drafts": Benchmark(cores=1),
    "gpu": Benchmark(("jax",)),
    "gpu_kernels": Benchmark(("jax",)),
    "gpu_memory": Benchmark(("jax",)),
    "half_billion": Benchmark(("jax", "transformers", "torch")),
    "ladder": Benchmark(("jax", "flax")),
    "mechanisms": Benchmark(("jax", "flax")),
    "pod_plan": Benchmark(("jax", "libtpu")),
    "pod_step": Benchmark(),
    "quickstart_time": Benchmark(),
    "race": Benchmark((*PEERS, "jaxlib", "flax", "trl", "accelerate")),
    "run_costs": Benchmark(("jax", "orbax-checkpoint"), cores=1),
    "rungs": Benchmark(("jax", "flax")),
    "rungs_recipes": Benchmark(("jax", "flax")),
    "sampler": Benchmark(PEERS, cores=1),
    "score": Benchmark(("jax", "flax", "scipy")),
    "start": Benchmark(),
    "update": Benchmark(("jax", "google-tunix"), cores=1),
}


def first_line(name: str) -> str:
    """Returns the first line of the docstring, without importing the module."""
    source = (harness.ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


def main(argv: Sequence[str]) -> None:
    name, *rest = argv or [""]
    if name == "tables":
        return tables.write()
    if name not in BENCHMARKS:
        print(__doc__)
        print("\n".join(f"  {n:18}{first_line(n)}" for n in BENCHMARKS))
        sys.exit(f"error: no benchmark {name!r}" if name and name != "--help" else 0)
    early = argparse.ArgumentParser(add_help=False)  # what must be known before the module is
    early.add_argument("--isa", default="")
    harness.prepare(BENCHMARKS[name].cores, harness.limited(early.parse_known_args(rest)[0].isa))
    module = importlib.import_module(f"benchmarks.{name}")
    harness.run(name, module, BENCHMARKS[name].packages, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
