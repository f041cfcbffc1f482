"""`plan --kernels`: how many bundles of instructions libtpu makes of the decode kernel.

One layer's attention, as the sampler calls it, is compiled for one chip of the slice by a process
of its own, with libtpu told to write down its final programs. A bundle takes a cycle or more, so a
loop's bundles over the clock are the least its turn takes. Waiting for HBM is not seen there: that
is `dma_latency` and `keys_hbm` in constants.txt; benchmarks/attention_kernel.py plays whole calls.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dapo_jax import parallel
from dapo_jax.config import schema, validation
from dapo_jax.model import paged, rope
from dapo_jax.plan.constants import VALUES
from dapo_jax.plan.footprint import cache, parts as split
from dapo_jax.plan.report import filled_in
from dapo_jax.plan.roofline import BLOCK_TOKENS, Scene
from dapo_jax.plan.shapes import network
from dapo_jax.pods import topology
from dapo_jax.pods.slices import FAMILIES, Pod

_BUNDLE = re.compile(r"\s*0x[0-9a-f]+\s*(?:(LB|PF|LH|LE|PB)\s*)?:\s*(>*)\s*(\{\}|\{)")
KERNEL = "decode_attention"


class Loop(NamedTuple):
    """Bundles of a loop's body without the loops inside it, which follow in order."""

    own: int
    inner: list["Loop"]


class Parts(NamedTuple):
    """Bundles of model/paged_kernel.py, by what they are for."""

    start: int  # of a call, before it asks for its first pages
    block: int  # a whole block of keys
    row: int  # a row and head: the new token, its last block, the result
    page: int  # of a row's last block, beside

    @property
    def beside(self) -> float:
        """Cost of a row beside its blocks, which count as whole; the last has 1 to 8 pages."""
        return self.row + 4.5 * self.page - self.block


def loops(text: str) -> Loop:
    """The tree of loops of a program in libtpu's dump of final bundles, the program at its root."""
    stack = [Loop(0, [])]

    def close(depth):
        while len(stack) > depth:
            done = stack.pop()
            stack[-1].inner.append(done)

    for found in filter(None, map(_BUNDLE.match, text.splitlines())):
        # The wait for a branch is made of empty bundles, which are printed without a depth.
        begins, depth = found[1] == "LB", len(stack) - 1 if found[3] == "{}" else len(found[2])
        close(depth if begins else depth + 1)
        while len(stack) <= depth:  # into a new loop, or back into one after a bundle outside
            stack.append(Loop(0, []) if begins else stack[-1].inner.pop())
        stack[-1] = stack[-1]._replace(own=stack[-1].own + 1)
    close(1)
    return stack[0]


def parts(program: Loop) -> Parts:
    """Parts of the decode kernel, whose loops are: first blocks; rows (blocks, pages to ask for,
    pages to wait for); results on their way. Where a row has several queries its last blocks are a
    loop too, mostly of one turn. ValueError: it has others."""
    begin, row = (x for x in program.inner if x.inner)
    block, *rest = row.inner
    tail = rest[0] if len(rest) == 1 else Loop(0, rest)
    ask, wait = tail.inner
    (ask_ahead,) = block.inner
    page = wait.own + max(ask.own, ask_ahead.own)
    return Parts(program.own + begin.own, block.own, row.own + tail.own, page)


def dumped(command: list[str]) -> dict[str, Loop]:
    """Program -> its loops, of what a process compiles. It must import libtpu itself, which reads
    its settings once. ValueError: the process fails; its last lines are in the message."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | dict(JAX_PLATFORMS="cpu", LIBTPU_INIT_ARGS=flags)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ValueError("\n".join(done.stderr.splitlines()[-5:]))
        files = sorted(pathlib.Path(folder).glob("*final_bundles.txt"))
        name = lambda x: re.sub(r"^\d+-|-?\d*-final_bundles\.txt$", "", x.name)
        found = (x for x in files if "schedule-analysis" not in x.name)
        return {name(x): loops(x.read_text(errors="replace")) for x in found}


def counted(config, pod: Pod) -> dict[str, Any]:
    """The bundles of the sampler's decode kernel, and lines about them for people. ValueError: the
    compiler refuses."""
    shape, sizes = network(config), validation.resolve_mesh(config, pod.devices)
    s = Scene(config, shape, sizes, pod)
    heads = shape.num_heads // split("heads", config.sharding.decode, sizes)
    counts = s.sizes.slots // s.sizes.shards, heads, shape.head_dim
    pool = cache(config, shape, sizes)._replace(shards=1, kv_heads=s.kv_heads, layers=1, arrays=1)
    pool = pool._replace(queries=1 + config.rollout.draft_tokens)
    given = json.dumps([pod.family, config.model.dtype, counts, pool])
    programs = dumped([sys.executable, "-m", "dapo_jax.plan.kernels", given])
    found = parts(next(x for name, x in programs.items() if KERNEL in name))
    clock, cores = VALUES[f"clock.{pod.family}"], int(VALUES[f"cores.{pod.family}"])
    rate = cores * BLOCK_TOKENS * s.key_bytes / (found.block / clock)
    text = filled_in("bundles.txt", pod=pod, found=found, clock=clock, cores=cores, rate=rate)
    return {"versions": topology.versions(), "bundles": found._asdict(), "text": text}


def child(family: str, dtype: str, counts: list[int], geometry: list) -> None:
    """Compile one layer's writes and reads of the cache for one chip that is not there. counts:
    rows, query heads, head dim."""
    jax.config.update("jax_platforms", "cpu")
    chip = topology.devices(f"{family}:2x2" + "x1" * (len(FAMILIES[family].shapes[0]) > 2))[0]
    (S, H, d), g = counts, paged.Geometry(*geometry)._replace(cores=chip.num_cores)
    mesh = Mesh([[[chip]]], parallel.AXES)
    rules = schema.base().sharding.decode
    whole = parallel.replicated(mesh)
    array = lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype, sharding=whole)
    pool = jax.eval_shape(lambda: paged.new_pool(g, dtype))
    pool = parallel.sharded(pool, paged.pool_sharding(g, mesh, rules))
    rows = paged.CacheRows(array(jnp.int32, S, g.row_pages), array(jnp.int32, S), array(bool, S))
    q, kv = (array(dtype, S, n, 1, d) for n in (H, g.kv_heads))

    def attend(layer, pool, q, k, v, rows):
        with parallel.mesh_scope(mesh, rules):
            angles = rope.angles(rows.position_S[:, None], d, 1e6)
            return paged.decode_attend(g, rows)(angles)(layer, pool, q, k, v)

    program = jax.jit(attend, donate_argnums=1)
    program.lower(array(jnp.int32), pool, q, kv, kv, rows).compile()


if __name__ == "__main__":
    child(*json.loads(sys.argv[1]))
