"""`plan --kernels`: how many bundles of instructions libtpu makes of the decode kernels.

One layer's attention, as the sampler calls it, is compiled for one chip of the slice by a process
of its own, with libtpu told to write down its final programs. A bundle takes a cycle or more, so a
loop's bundles over the clock are the least its turn takes, and its bytes over that time the most
that it can read. What waits for HBM is not to be seen there: that is `dma_latency` in constants.py.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax import parallel, schema
from dapo_jax.model import paged
from dapo_jax.pods import topology
from dapo_jax.pods.constants import Values
from dapo_jax.pods.slices import Pod

_BUNDLE = re.compile(r"\s*0x([0-9a-f]+)\s*(LB|PF|LH|LE|PB)?\s*:\s*(>+)?(\s*\{\})?")


class Attention(NamedTuple):
    """One device's part of a layer's attention while decoding."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


class Loop(NamedTuple):
    depth: int  # 1 = inside no other
    bundles: int  # of a turn, loops inside it included


def loops(text: str) -> list[Loop]:
    """Of a program as libtpu writes it: a line per bundle, with an address, LB where a loop begins
    and as many > as loops are around it. Empty bundles, in the shadow of a branch, have no >."""
    found: list[list[int]] = []  # depth, first, last
    open_: list[list[int]] = []
    for line in text.splitlines():
        part = _BUNDLE.match(line)
        if not part or (part[4] and not part[3]):
            continue
        at, depth = int(part[1], 16), len(part[3] or "")
        if part[2] == "LB":
            open_ = [x for x in open_ if x[0] < depth]
            open_.append([depth, at, at])
            found.append(open_[-1])
        open_ = [x for x in open_ if x[0] <= depth]
        for x in open_:
            x[2] = at
    return [Loop(depth, last - first + 1) for depth, first, last in found]


def measure(pod: Pod, part: Attention, geometry: paged.Geometry) -> dict[str, list[Loop]]:
    """Program -> its loops. geometry: the pool, of which one shard and one layer are taken.
    ValueError: the compiler refuses; its last lines are in the message."""
    geometry = geometry._replace(shards=1, kv_heads=part.kv_heads, layers=1, arrays=1)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        given = json.dumps([pod.family, part, geometry])
        command = [sys.executable, "-m", "dapo_jax.pods.kernels", given]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ValueError("\n".join(done.stderr.splitlines()[-5:]))
        out = {}
        for file in sorted(pathlib.Path(folder).glob("*final_bundles.txt")):
            name = re.sub(r"^\d+-|-?\d*-final_bundles\.txt$", "", file.name)
            if "schedule-analysis" not in file.name and (
                found := loops(file.read_text(errors="replace"))
            ):
                out[name] = found
        return out


def compile_attention(family: str, part: Attention, g: paged.Geometry) -> None:
    """One layer's writes and reads of the cache, for one chip that is not there."""
    chip = topology.devices(f"{family}:2x2" + "x1" * (family in ("v4", "v5p")))[0]
    mesh = Mesh([[[chip]]], parallel.AXES)
    rules = schema.base().sharding.decode
    number = lambda dtype, *size: jax.ShapeDtypeStruct(
        size, dtype, sharding=parallel.replicated(mesh)
    )
    S, d, R = part.rows, part.head_dim, g.row_pages
    pool = jax.eval_shape(lambda: paged.new_pool(g, part.dtype))
    pool = parallel.sharded(pool, paged.pool_sharding(g, mesh, rules))
    rows = paged.CacheRows(number(jnp.int32, S, R), number(jnp.int32, S), number(bool, S))
    heads, kv = (number(part.dtype, S, n, 1, d) for n in (part.heads, part.kv_heads))

    def attend(layer, pool, q, k, v, rows):
        with parallel.mesh_scope(mesh, rules):
            return paged.decode_attend(g, rows)(layer, pool, q, k, v)

    program = jax.jit(attend, donate_argnums=1)
    program.lower(number(jnp.int32), pool, heads, kv, kv, rows).compile()


def turns(found: dict[str, list[Loop]]) -> dict[str, int]:
    """Kernel -> bundles of a turn of its longest loop inside another, over blocks in the loop over
    rows; of its longest where none is inside another."""
    inner = lambda all_loops: [x for x in all_loops if x.depth == 2] or all_loops
    return {name: max(x.bundles for x in inner(loops)) for name, loops in found.items()}


def report(pod: Pod, turns: dict[str, int], block_bytes: float, k: Values) -> list[str]:
    """For people. block_bytes: keys and values of a turn of the attention kernel."""
    clock = k[f"clock.{pod.family}"]
    lines = [f"Bundles of decoding on {pod.family}, at least a cycle each, in a turn of the loop:"]
    for name, n in turns.items():
        line = f"  {name:24s} {n:6d} = {1e6 * n / clock:.3f} us at {clock / 1e9:g} GHz"
        if "attention" in name:
            rate = block_bytes / (n / clock)
            line += (
                f"; {block_bytes / 1e3:.0f} kB: at most {rate / 1e9:,.0f} GB/s a core,"
                f" {rate / pod.chip.bandwidth:.0%} of the chip's HBM"
            )
        lines.append(line)
    return lines


def child(given: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    family, part, geometry = json.loads(given)
    compile_attention(family, Attention(*part), paged.Geometry(*geometry))


if __name__ == "__main__":
    child(sys.argv[1])
