"""Kernels of an update on a GPU and the least time that they take, by XLA:GPU, which needs no GPU.

    python -m benchmarks gpu_kernels --full     wants jax[cuda13], or its compiler alone; 2 minutes

Each kernel of a pass takes the longer of its bytes at BANDWIDTH and its FLOPs at PRODUCTS: about
what kernels of an H100 reach, not what is published. FLOPs are of cuBLAS's products; kernels of
attention count by their bytes. Sizes and MFU as in gpu.py. Measured: docs/results/gpu.md, with jax
0.11.2, before all that the notes of the kept table name.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import gpu, gpu_memory
from benchmarks.gpu_memory import Case
from benchmarks.harness import Flag, Table
from dapo_jax import plan
from dapo_jax.log import hardware
from dapo_jax.plan import hlo
from dapo_jax.pods import slices

BANDWIDTH, PRODUCTS = 3.0e12, 700e12  # bytes a second, and FLOPs
CARD = "NVIDIA H100"
ROW = gpu.Setting().row  # of the head's chunks: logits are kept
CASES = (  # and the tokens/s that were measured, 0 = none
    (Case("7B", "none", 2, rank=32, head_chunk=ROW), 15_868),
    (Case("7B", "none", 4, rank=32, head_chunk=ROW), 0),
    (Case("7B", "dots_attention", 2, rank=32, head_chunk=ROW), 14_827),
    (Case("1.5B", "dots_attention", 8, head_chunk=ROW), 45_782),
    (Case("0.5B", "none", 16, head_chunk=ROW), 110_760),
)
FLAGS = {"cases": Flag(1, len(CASES), "the first ones of the table")}


class Kernel(NamedTuple):
    """What one does each time that it is started."""

    name: str
    bytes: int
    flops: float

    @property
    def seconds(self) -> float:
        return max(self.bytes / BANDWIDTH, self.flops / PRODUCTS)


def kernels(text: str) -> tuple[list[tuple[int, Kernel]], list[Kernel]]:
    """((times, kernel) of a pass, kernels around all passes) of an update's compiled text."""
    known, entry = hlo.computations(text)
    sizes = {name: hlo.arrays(line) for body in known.values() for name, line in body.items()}
    of = lambda lines: _of(lines, sizes, known)
    inside = [(n, kernel) for n, lines in hlo.in_loops(text) for kernel in of(lines)]
    return inside, list(of(known[entry].values()))


def _of(lines, sizes, known) -> Iterator[Kernel]:
    for line in lines:
        head = re.match(r"(?:ROOT )?%?([\w.-]+) = .*? (fusion|custom-call|copy)\((.*?)\)", line)
        if not head:
            continue
        name, _, given = head.groups()
        given, out = re.findall(r"%([\w.-]+)", given), sizes[name]
        if called := re.search(r"calls=%?([\w.-]+)", line):
            moved = _read(known[called[1]], sizes) + sum(n for n, _ in out)
        else:
            moved = sum(n for x in [*(sizes[x] for x in given), out] for n, _ in x)
        moved *= "dynamic-update-slice" not in str(called and known[called[1]])
        product = "cublas" in line and [sizes[x][0][1] for x in given[:2]] + [out[0][1]]
        yield Kernel(name, moved, 2 * math.sqrt(math.prod(product)) if product else 0)


def _read(fused: dict[str, str], sizes) -> int:
    """Bytes that a fusion reads: of an array of which it takes slices alone, those."""
    users: dict[str, list[tuple[str, str]]] = {}
    for name, line in fused.items():
        for x in re.findall(r"%([\w.-]+)", line.partition(" = ")[2].partition(")")[0]):
            users.setdefault(x, []).append((name, re.search(r" ([\w-]+)\(", line)[1]))

    def read(name: str) -> int:
        uses, whole = users.get(name, []), sizes[name][0][0] if sizes[name] else 0
        cut = lambda x: sizes[x][0][0]
        parts = {"slice": cut, "dynamic-slice": cut, "gather": cut, "bitcast": read}
        if not uses or any(kind not in parts for _, kind in uses):
            return whole
        return min(whole, sum(parts[kind](x) for x, kind in uses))

    return sum(read(name) for name, line in fused.items() if " parameter(" in line)


def measure(args) -> list[Table]:
    """SystemExit: XLA:GPU is not installed."""
    said = gpu_memory.compiler("gpu_kernels")
    table = Table(
        "Qwen2.5", "products, ms", "the rest, ms", "a pass, ms", "MFU", "measured, ms", "MFU"
    )
    s = gpu.Setting()
    for case, rate in CASES[: args.cases]:
        inside, around = kernels(gpu_memory.text(case, "update"))
        products = sum(n * x.seconds for n, x in inside if x.flops)
        rest = sum(n * x.seconds for n, x in inside if not x.flops)
        rest += sum(x.seconds for x in around) * case.rows / s.rows
        shape = plan.published(f"Qwen/Qwen2.5-{case.size}")
        needed = hardware.forward_flops(shape, [s.row] * case.rows) * (2 if case.rank else 3)
        mfu = lambda ms: f"{needed / ms * 1e3 / slices.peak_flops(CARD):.1%}"  # noqa: B023
        ms = 1e3 * (products + rest)
        cells = f"{1e3 * products:.1f}", f"{1e3 * rest:.1f}", f"{ms:.1f}", mfu(ms)
        took = 1e3 * case.rows * s.row / rate if rate else 0
        table.row(case, *cells, *((f"{took:.1f}", mfu(took)) if rate else ("", "")))
    table.note(said)
    return [table]
