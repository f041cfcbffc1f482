"""The plan for people: lines of text and tables, from the JSON values of planner.py."""

from collections.abc import Iterable
from typing import Any

from dapo_jax.plan.footprint import GB


def table(head: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A heading, and rows in columns: the first to the left, the others to the right. Nothing
    where there are no rows."""
    rows, lines = list(rows), [head]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        right = (f"  {x:>{n}}" for x, n in zip(cells, widths[1:], strict=True))
        lines.append(f"  {name:{widths[0]}}{''.join(right)}".rstrip())
    return lines if rows else []


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 10 else f"{x:.2g}"


def clock(s: float) -> str:
    return f"{s:,.1f} s" if s < 100 else f"{s / 60:.1f} min"


def report(r: dict[str, Any]) -> list[str]:
    """All of `planner.plan`."""
    pod, limit, a = r["pod"], r["pod"]["chip"]["hbm"], r["assumed"]
    value = f" and {n:,} of a value model" if (n := r.get("value_parameters")) else ""
    several = f" x {pod['slices']}" if pod["slices"] > 1 else ""
    lines = [
        f"{r['parameters']:,} parameters{value} on {pod['cloud']} = {pod['topology']}{several}:"
        f" {pod['chips']} chips of {limit / GB:.2f} GB",
        *(f"cannot run: {mistake}" for mistake in r["mistakes"]),
    ]
    if "bytes" in r:
        lines += _memory(r, limit)
    if r["fits"]:
        lines += [*_step(r["step"], a), *_staleness(r["step"]["staleness"]), *_run(r["run"])]
    if "bytes" in r:
        lines += table(
            f"LOWER bounds of a step, if every response had {a['response']:,} tokens after"
            f" {a['prompt']:,} of prompt and every group were accepted (published peaks of the"
            " chip, matrix products and HBM only; the real times are longer):",
            ((what, f"> {s:.2f} s") for what, s in r["lower_bounds_s"].items()),
        )
    lines += table(
        f"what fits with {a['room']:.0%} to spare, best first:",
        ((x["flags"], f"{x['peak'] / GB:.1f} GB", clock(x["step"])) for x in r["suggestions"]),
    )
    if not r["suggestions"]:
        other = r["smallest_that_fits"]
        larger = f"the smallest of its family that does is {other}" if other else ""
        no = "no mesh, micro-batch or number of slots fits this pod"
        lines.append(f"{no}; {larger or 'no larger one does'}")
    return [*lines, "What this cannot know:", *(f"  - {x}" for x in r["cannot_know"])]


def _memory(r: dict[str, Any], limit: int) -> list[str]:
    items = [(p, what, n) for p, of in r["bytes"].items() for what, n in of.items() if n]
    items += [(p, f"TOTAL, {n / limit:.0%} of the chip", n) for p, n in r["peaks"].items()]
    return [
        "mesh: " + " x ".join(f"{axis} {n}" for axis, n in r["mesh"].items()),
        *table(
            "GB a device (10^9 bytes):",
            ((f"{phase:9s} {what}", f"{n / GB:.2f}") for phase, what, n in items),
        ),
        "FITS, by arithmetic" if r["fits"] else "DOES NOT FIT",
        *(
            f"sequences of the {what} length ({f['tokens']:,} tokens): {f['sequences']:,} in"
            f" flight, {f['waves']} waves a batch"
            for what, f in r["in_flight"].items()
        ),
    ]


def _step(step: dict[str, Any], a: dict[str, Any]) -> list[str]:
    micro = step["micro_batch"]
    update = {x: micro["update"][x] for x in ("products", "elementwise", "attention", "waits")}
    uncertain = sorted(step["uncertain"].items(), key=lambda x: x[1][0] - x[1][1])[:3]
    of_update = (
        f"an update's {micro['rows']} rows ({micro['hfu']:.0%} of the chip's peak, counting what is"
        " computed again)"
    )
    lines = [
        f"EXPECTED step: {clock(step['expected_s'])} ({clock(step['low_s'])} to"
        f" {clock(step['high_s'])}), if responses have {a['response']:,} tokens (log-normal, sigma"
        f" {a['sigma']:g}) after {a['prompt']:,} of prompt and {a['accept']:.0%} of the groups"
        " are accepted.",
        f"{step['rounds']:.2f} rounds, {step['responses']:,.0f} responses, slots"
        f" {step['occupancy']:.0%} busy, {step['evicted']} rows evicted, rows of the update"
        f" {step['filled_cells']:.0%} full",
    ]
    for what, seconds in (
        ("the step", step["parts"]),
        ("decode and tail", step["decoding"]),
        (of_update, update),
    ):
        lines += table(f"seconds of {what}:", ((k, number(s)) for k, s in seconds.items() if s))
    lines += table(
        "most uncertain, seconds:",
        ((name, number(low), f"+{number(high)}") for name, (low, high) in uncertain),
    )
    return lines + table(
        "off by default, each at a price in samples; the step with it:",
        ((what, clock(s)) for what, s in step["options"].items()),
    )


def _staleness(aged: list[dict[str, Any]]) -> list[str]:
    """`--staleness`."""
    rows = [("", "step", "slots busy", "mean age", "oldest", "tokens parked", "apart")]
    for x in aged:
        apart = x["apart"] and f"{clock(x['apart']['seconds'])} by {x['apart']['share']:.0%}"
        name = f"rollout.staleness={x['staleness']} rollout.slots={x['slots']}"
        cells = clock(x["seconds"]), f"{x['occupancy']:.0%}", f"{x['mean']:.2f}", str(x["oldest"])
        rows.append((name, *cells, f"{x['parked'] / 1e6:.1f} M", apart or "-"))
    head = (
        "responses that outlive steps, over the same cache, with fewer host visits; ages of trained"
        " tokens in steps; apart: at best, where that share of the devices samples and the others"
        " train:"
    )
    return table(head, rows if aged else [])


def _run(run: dict[str, Any]) -> list[str]:
    n = run.get("pretrain_steps")
    alone = f", the first {n:,} of them the value model's alone" if n else ""
    gb = lambda name: f"{run[name] / GB:,.1f} GB"
    return [
        f"a run of {run['steps']:,} steps{alone}: {run['expected_s'] / 86400:.1f} days,"
        f" {run['chip_hours']:,.0f} chip-hours",
        f"first compilation {clock(run['first_compilation_s'])}; a checkpoint"
        f" {gb('checkpoint_bytes')}, room for {gb('checkpoints_bytes')}; a host:"
        f" {gb('host_disk_bytes')} of disk for the weights, {gb('host_memory_bytes')} of memory for"
        " a batch",
    ]
