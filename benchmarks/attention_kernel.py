"""What reading the cache costs a TPU core, counted in libtpu's own code. Needs no TPU.

    python benchmarks/attention_kernel.py                     # v5p and v6e, 32B over 8 devices
    python benchmarks/attention_kernel.py --chip=v6e --heads=12 --kv_heads=2 --tokens=2000

Compiles the kernel of model/paged_kernel.py and JAX's paged_attention for a described chip, has
libtpu write the instruction bundles of both, and plays a call over rows of equal length through
them: a bundle takes a cycle, a copy of pages arrives `--latency` after it is asked for and not
faster than HBM (a chip's cores share it evenly), and a block is worked on when it is there. What
this cannot see: banks, refresh, waits inside the core; so times are lower bounds, and good for
comparing kernels. Clock: 1.75 GHz of both chips (public peak FLOPs and MXU sizes).
"""

import argparse
import json
import sys

from dapo_jax.model import paged_kernel
from dapo_jax.plan import kernels

CLOCK = 1.75e9  # Hz
CHIPS = {"v5p": ("v5p:2x2x1", 2765e9), "v6e": ("v6e:2x2", 1640e9), "v5e": ("v5e:2x2", 819e9)}
PAGE, DIM, ROW_PAGES, POOL_PAGES = 128, 128, 176, 11264
JAX_PAGES = 4, 8, 16  # pages a block of JAX's kernel


def call_seconds(blocks, before: int, ahead: int, latency: float, bytes_per_s: float) -> float:
    """Of one core. blocks: (bytes, cycles) of each in order, whose copies are asked for when the
    block `ahead` places before is begun; `before`: cycles until the first are."""
    now = before / CLOCK
    asked = [now] * ahead
    line_free, arrivals = 0.0, []
    for i, (_, cycles) in enumerate(blocks):
        asked.append(now)  # block i + ahead
        while len(arrivals) < min(len(asked), len(blocks)):
            begun = max(asked[len(arrivals)] + latency, line_free)
            line_free = begun + blocks[len(arrivals)][0] / bytes_per_s
            arrivals.append(line_free)
        now = max(now, arrivals[i]) + cycles / CLOCK
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


def compile_one(spec: dict) -> None:
    """Runs in a process of its own: `kernels.dumped`."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    from dapo_jax.pods import topology

    device = topology.devices(CHIPS[spec["chip"]][0])[0]
    one = jax.sharding.SingleDeviceSharding(device)
    array = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=one)
    S, H, K = spec["rows"], spec["heads"], spec["kv_heads"]
    pool = array(K, POOL_PAGES, PAGE, DIM)
    number = lambda *size: array(*size, dtype=jnp.int32)

    def our_kernel(keys, values, q, new, turn, length, table):
        work = paged_kernel.work(length, table, turn, device.num_cores)
        return paged_kernel.attend(q, *new, (keys, values), jnp.int32(0), work, DIM)

    def jax_kernel(keys, values, q, new, turn, length, table):
        del new, turn
        split = "batch" if spec["both_cores"] else None
        sizes = dict(pages_per_compute_block=spec["pages"], megacore_mode=split)
        return paged_attention(q, keys, values, length, table, **sizes)

    call = jax_kernel if spec["pages"] else our_kernel
    donated = () if spec["pages"] else (0, 1)
    new = (array(S, K, DIM),) * 2
    turn = array(S, 3 * DIM, dtype=jnp.float32)
    arguments = (pool, pool, array(S, H, DIM), new, turn, number(S), number(S, ROW_PAGES))
    jax.jit(call, donate_argnums=donated).lower(*arguments).compile()


def measure(spec: dict) -> dict:
    """Bundles and modelled seconds of one kernel on one chip."""
    try:
        found = kernels.dumped([sys.executable, __file__, "--compile", json.dumps(spec)])
    except ValueError as error:
        raise SystemExit(str(error)) from None
    name = "paged_attention" if spec["pages"] else kernels.KERNEL
    program = next(x for of, x in found.items() if name in of)
    cores = 2 if spec["chip"] == "v5p" else 1
    used = cores if spec["both_cores"] else 1
    page_bytes = 2 * PAGE * DIM * 2
    rows = spec["rows"] * spec["kv_heads"] // used
    args = (program, rows, spec["tokens"], page_bytes)
    blocks, before, ahead = theirs(*args, spec["pages"]) if spec["pages"] else ours(*args)
    hbm = CHIPS[spec["chip"]][1]
    bundles = (before + sum(x for _, x in blocks)) / CLOCK
    live = spec["rows"] * spec["kv_heads"] * spec["tokens"] * 2 * DIM * 2
    seconds = {
        latency: call_seconds(blocks, before, ahead, latency, hbm / cores)
        for latency in spec["latencies"]
    }
    return {
        "a block": blocks[-2][1],
        "us of bundles": 1e6 * bundles,
        "of HBM by bundles": live / bundles / hbm,
        "us": {k: 1e6 * v for k, v in seconds.items()},
        "of HBM": {k: live / v / hbm for k, v in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=CHIPS, nargs="*", default=["v5p", "v6e"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=5000, help="of each row")
    parser.add_argument("--heads", type=int, default=5, help="query heads of a device")
    parser.add_argument("--kv_heads", type=int, default=1)
    parser.add_argument("--latency", type=float, nargs="*", default=[0.5, 1.0], help="microseconds")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        return compile_one(json.loads(args.compile))
    us = args.latency
    print("| chip | kernel | bundles a block | us of bundles |", end="")
    print("".join(f" us at {x:g} us latency | of the chip's HBM |" for x in us))
    print("|---" * (4 + 2 * len(us)) + "|")
    for chip in args.chip:
        kernels = [(0, True), *((n, both) for n in JAX_PAGES for both in (False, True))]
        for pages, both in kernels:
            if pages and both and chip != "v5p":
                continue
            spec = dict(chip=chip, pages=pages, both_cores=both and chip == "v5p")
            spec |= {k: getattr(args, k) for k in ("rows", "tokens", "heads", "kv_heads")}
            spec["latencies"] = [1e-6 * x for x in us]
            found = measure(spec)
            kernel = f"JAX's, {pages} pages" if pages else "ours"
            kernel += ", both cores" if spec["both_cores"] else ", one core"
            line = [chip, kernel, found["a block"], f"{found['us of bundles']:.0f}"]
            for x in spec["latencies"]:
                line += [f"{found['us'][x]:.0f}", f"{found['of HBM'][x]:.0%}"]
            print("| " + " | ".join(map(str, line)) + " |", flush=True)


if __name__ == "__main__":
    main()
