"""Programs compiled for a TPU pod without one: their memory per chip and their exact matmul work.

    mesh = topology.laid(topology.devices("v5p:4x4x8"), dict(data=1, fsdp=16, tensor=8))
    traced = program.trace(*parallel.sharded(abstract_arguments, shardings))
    compiled, log = topology.compile_watched(traced.lower())
    topology.memory(compiled).peak, topology.matmul_flops(traced.jaxpr.jaxpr)

XLA:TPU and its memory assignment run here; nothing is executed, so no time comes out.
"""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.extend
from jax.experimental import topologies
from jax.sharding import Mesh

from dapo_jax.parallel import AXES, arrange


class Memory(NamedTuple):
    """Bytes a device of one compiled program."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs, in the place of donated arguments
    temporaries: int
    peak: int  # most of the HBM that is live at one time; held against the limit
    vector: int  # more that XLA:TPU keeps in vector memory: all of a toy's temporaries, say

    @property
    def live(self) -> int:
        """Arguments, results and temporaries as if all lived together: never less than the peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def available() -> bool:
    """Whether XLA:TPU's compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def devices(name: str, slices: int = 1) -> list:
    """The devices of topology `name`, 'v5p:4x4x8' or 'v6e:16x16' (family:chips along each side of
    the torus), or of several. ValueError: libtpu refuses the name. ImportError: no libtpu."""
    if not available():
        raise ImportError("compiling for a TPU pod needs libtpu: pip install 'jax[tpu]'")
    if jax.default_backend() != "tpu":
        # libtpu looks for the machine's own TPU: tell it where it stands. Several processes may.
        for key, value in dict(
            TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5p-8", TPU_WORKER_ID="0",
            TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            TPU_STDERR_LOG_LEVEL="1",  # warnings: of the sharding pass, for `compile_watched`
        ).items():  # fmt: skip
            os.environ.setdefault(key, value)
    options = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    options |= {"num_slices": slices} if slices > 1 else {}
    if name.endswith(":1x1"):  # a machine of one chip; libtpu takes it for one of four
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        with tempfile.TemporaryFile() as file, _stderr_to(file):  # libtpu misses its machine
            described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        names = "family:AxB or family:AxBxC in chips, as v5e:16x16 or v5p:4x4x8 (Cloud's v5p-256)"
        raise ValueError(f"topology {name!r}: libtpu knows no such pod, only {names}") from error
    return described.devices


def laid(described: list, sizes: Mapping[str, int]) -> Mesh:
    """Devices, described or not, as a run's mesh of `sizes`. ValueError: another number of them."""
    return Mesh(arrange(tuple(sizes[a] for a in AXES), described), AXES)


def versions() -> dict[str, str]:
    """What the verdicts of this machine's compiler hold for."""
    return {p: importlib.metadata.version(p) for p in ("jax", "libtpu")}


@contextlib.contextmanager
def _stderr_to(file):
    """XLA writes to the descriptor, not to sys.stderr."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def compile_watched(lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program and what XLA said to stderr meanwhile, where warnings of the sharding
    pass end up ("Involuntary full rematerialization": an activation was gathered whole)."""
    with tempfile.TemporaryFile() as file:
        with _stderr_to(file):
            compiled = lowered.compile()
        file.seek(0)
        return compiled, file.read().decode(errors="replace")


def memory(compiled) -> Memory:
    """What XLA's memory assignment gave one device. XLA's own peak counts vector memory too, where
    whole arrays of small programs lie; no more of the HBM is live than is assigned there."""
    m = compiled.memory_analysis()
    sizes = m.argument_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes
    found = Memory(*sizes, m.temp_size_in_bytes, peak=m.peak_memory_in_bytes, vector=0)
    peak = min(found.peak, found.live)
    return found._replace(peak=peak, vector=found.peak - peak)


def memory_line(programs: Mapping[str, Any]) -> str:
    """'memory of a device, at most: decode 3.1 GB, update 9.61 GB'. programs: name -> compiled."""
    found = {name: memory(compiled) for name, compiled in programs.items()}
    # XLA:CPU's peak leaves temporaries out.
    peaks = {n: m.peak if m.peak > m.temporaries else m.live for n, m in found.items()}
    return "memory of a device, at most: " + ", ".join(f"{n} {size(p)}" for n, p in peaks.items())


def size(n: int) -> str:
    """Bytes in decimal units, three digits: 9.61 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n} B"


def matmul_flops(jaxpr, while_trips: int = 1) -> int:
    """Floating-point operations of every matrix product in a program, over all devices.

    XLA's own count sees the body of a loop once and a Pallas kernel not at all. Here `while` loops
    (trip count unknown) count `while_trips` times, and of a `cond` the dearest branch. A kernel
    without a cost estimate counts its whole grid, splash attention no blocks above the diagonal.
    """
    total = 0
    for eqn in jaxpr.eqns:
        kind, p = eqn.primitive.name, eqn.params
        inner = [matmul_flops(j, while_trips) for j in jax.extend.core.jaxprs_in_params(p)]
        if kind == "dot_general":
            (contract, _), _ = p["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contract)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        elif kind == "scan":
            total += p["length"] * sum(inner)
        elif kind == "while":
            total += while_trips * sum(inner)
        elif kind == "cond":
            total += max(inner)
        elif kind == "shard_map":
            total += math.prod(p["mesh"].shape.values()) * sum(inner)
        elif kind == "pallas_call":
            blocks = _blocks(str(p["name"]), p["grid_mapping"].grid)
            total += p["cost_estimate"].flops if p["cost_estimate"] else blocks * sum(inner)
        else:
            total += sum(inner)
    return total


def _blocks(name: str, grid: tuple[int, ...]) -> int:
    """How many blocks of the grid a kernel computes."""
    if not name.startswith("splash"):
        return math.prod(grid)
    # Causal: (..., heads, queries, keys), and (..., keys, heads, queries) in the dK, dV kernel.
    q, k = (grid[-1], grid[-3]) if "dkv" in name else grid[-2:]
    return math.prod(grid) // (q * k) * sum(-(-(i + 1) * k // q) for i in range(q))
