"""What reading the cache costs a TPU core, counted in libtpu's own code. Needs no TPU.

    python -m benchmarks attention_kernel --full              # v5p and v6e, 32B over 8 devices
    python -m benchmarks attention_kernel --chip v6e --heads=12 --kv_heads=2 --tokens=2000

Compiles the kernel of model/paged_kernel.py and JAX's paged_attention for a described chip, has
libtpu write the instruction bundles of both, and plays a call over rows of equal length through
them: a bundle takes a cycle, a copy of pages arrives `--latency` after it is asked for and not
faster than HBM (a chip's cores share it evenly), and a block is worked on when it is there. What
this cannot see: banks, refresh, waits inside the core; so times are lower bounds, and good for
comparing kernels. Clock and cores of a chip are those of plan/constants.txt.
"""

import functools
import json
import sys

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax.model import paged, paged_kernel
from dapo_jax.plan import kernels
from dapo_jax.plan.constants import VALUES
from dapo_jax.pods import slices

CHIPS = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v5e": "v5e:2x2"}
PAGE, DIM, ROW_PAGES, POOL_PAGES = 128, 128, 176, 11264
JAX_PAGES = 4, 8, 16  # pages a block of JAX's kernel
FLAGS = {
    "chip": Flag(("v6e",), ("v5p", "v6e"), choices=tuple(CHIPS)),
    "rows": Flag(8, 128),
    "tokens": Flag(1000, 5000, "of each row"),
    "heads": Flag(5, 5, "query heads of a device"),
    "kv_heads": Flag(1, 1),
    "latency": Flag((0.5, 1.0), (0.5, 1.0), "microseconds"),
}


def call_seconds(
    blocks, before: int, ahead: int, latency: float, bytes_per_s: float, clock: float
) -> float:
    """Plays a call on a core. blocks: (bytes, cycles) of each, whose copies are asked for when the
    block `ahead` places before is begun; `before`: cycles until the first are."""
    now = before / clock
    asked = [now] * ahead
    line_free, arrivals = 0.0, []
    for i, (_, cycles) in enumerate(blocks):
        asked.append(now)  # block i + ahead
        while len(arrivals) < min(len(asked), len(blocks)):
            begun = max(asked[len(arrivals)] + latency, line_free)
            line_free = begun + blocks[len(arrivals)][0] / bytes_per_s
            arrivals.append(line_free)
        now = max(now, arrivals[i]) + cycles / clock
    return now


def ours(program: kernels.Loop, rows: int, tokens: int, page_bytes: int):
    """(bytes, cycles) of each block, cycles before the first, and how many are asked for ahead."""
    n, B = kernels.parts(program), paged_kernel._BLOCK_TOKENS // PAGE
    whole, last = divmod(-(-tokens // PAGE) - 1, B)
    tail = (last + 1) * page_bytes, n.row + (last + 1) * n.page
    blocks = [(B * page_bytes, n.block)] * whole + [tail]
    return blocks * rows, n.start, paged_kernel._AHEAD


def theirs(program: kernels.Loop, rows: int, tokens: int, page_bytes: int, pages: int):
    (row,) = program.inner
    (block,) = row.inner
    count = -(-tokens // (PAGE * pages))
    first = (pages * page_bytes, block.own + row.own)
    return ([first] + [(pages * page_bytes, block.own)] * (count - 1)) * rows, program.own, 1


def compile_theirs(spec: dict) -> None:
    """JAX's kernel, in a process of its own: `kernels.dumped`."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    from dapo_jax.pods import topology

    device = topology.devices(CHIPS[spec["chip"]])[0]
    one = jax.sharding.SingleDeviceSharding(device)
    array = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=one)
    S, H, K = spec["rows"], spec["heads"], spec["kv_heads"]
    pool = array(K, POOL_PAGES, PAGE, DIM)
    length_S, table = (array(*n, dtype=jnp.int32) for n in ((S,), (S, ROW_PAGES)))
    split = "batch" if spec["both_cores"] else None
    sizes = dict(pages_per_compute_block=spec["pages"], megacore_mode=split)
    call = jax.jit(functools.partial(paged_attention, **sizes))
    call.lower(array(S, H, DIM), pool, pool, length_S, table).compile()


def played(spec: dict, latencies: list[float]) -> list:
    """Cells of a row: bundles and modelled time of one kernel on one chip. latencies: seconds."""
    command = [sys.executable, "-m", __spec__.name, json.dumps(spec)]
    if not spec["pages"]:
        pool = paged.Geometry("kernel", PAGE, ROW_PAGES, POOL_PAGES, 1, 1, 1, spec["kv_heads"], DIM)
        given = [spec["chip"], "bfloat16", (spec["rows"], spec["heads"], DIM), pool]
        command = [sys.executable, "-m", kernels.__name__, json.dumps(given)]
    try:
        found = kernels.dumped(command)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    name = "paged_attention" if spec["pages"] else kernels.KERNEL
    program = next(x for of, x in found.items() if name in of)
    clock, cores = (VALUES[f"{x}.{spec['chip']}"] for x in ("clock", "cores"))
    used = int(cores) if spec["both_cores"] else 1
    page_bytes = 2 * PAGE * DIM * 2
    rows = spec["rows"] * spec["kv_heads"] // used
    args = (program, rows, spec["tokens"], page_bytes)
    blocks, before, ahead = theirs(*args, spec["pages"]) if spec["pages"] else ours(*args)
    hbm = slices.CHIPS[spec["chip"]].bandwidth
    live = spec["rows"] * spec["kv_heads"] * spec["tokens"] * 2 * DIM * 2
    cells = [blocks[-2][1], f"{1e6 * (before + sum(x for _, x in blocks)) / clock:.0f}"]
    for latency in latencies:
        seconds = call_seconds(blocks, before, ahead, latency, hbm / cores, clock)
        cells += [f"{1e6 * seconds:.0f}", f"{live / seconds / hbm:.0%}"]
    return cells


def measure(args) -> list[harness.Table]:
    head = [x for us in args.latency for x in (f"us at {us:g} us latency", "of the chip's HBM")]
    table = harness.Table("chip", "kernel", "bundles a block", "us of bundles", *head)
    for chip in args.chip:
        for pages in (0, *JAX_PAGES):
            for both in (False, True) if pages and chip == "v5p" else (chip == "v5p",):
                spec = dict(chip=chip, pages=pages, both_cores=both)
                spec |= {k: getattr(args, k) for k in ("rows", "tokens", "heads", "kv_heads")}
                kernel = f"JAX's, {pages} pages" if pages else "ours"
                kernel += ", both cores" if both else ", one core"
                table.row(chip, kernel, *played(spec, [1e-6 * us for us in args.latency]))
    return [table]


if __name__ == "__main__":  # a process that libtpu dumps
    compile_theirs(json.loads(sys.argv[1]))
