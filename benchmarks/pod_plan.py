"""What `plan --compile` says of the shipped configs on pods, the compiler's word on memory.

    python -m benchmarks pod_plan --full                    all rows; needs pip install 'jax[tpu]'
    python -m benchmarks pod_plan --full --only=v5p-256 --level=O0       quickly

XLA:TPU compiles the run's own programs one by one; nothing is run. "In memory" is the compiler's
peak of a program and what a step keeps on the chip beside it. A config runs as shipped where it
fits by arithmetic, and with the planner's first suggestion elsewhere. At the default level a 32B
row takes 4-10 minutes on two cores, at O0 two.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import Flag, Table


class Row(NamedTuple):
    config: str  # a file of configs/, NAME or NAME:ARGUMENT
    slice: str  # Cloud's name
    end: str = ""  # of its tables' names
    flags: tuple[str, ...] = ()


LORA = ("_lora", ("--config.model.lora.rank=32",))
ROWS = (
    Row("dapo_qwen2_5_32b", "v5p-256"),
    Row("dapo_qwen2_5_32b", "v5p-512"),
    Row("dapo_qwen2_5:32B-v6e", "v6e-256"),
    Row("dapo_qwen2_5_32b", "2xv5p-256"),
    Row("dapo_qwen2_5_32b", "v5e-256"),
    Row("dapo_qwen2_5_7b", "v6e-16"),
    Row("dapo_qwen2_5_7b", "v6e-64"),
    Row("dapo_qwen2_5_1_5b", "v6e-16"),
    Row("dapo_qwen2_5_0_5b", "v6e-8"),
    Row("gsm8k_dapo_qwen2_5_1_5b", "v6e-8"),
    Row("vapo:32B", "v5p-256", "_values"),
    Row("vapo:32B", "v5p-512", "_values"),
    Row("dapo_qwen2_5_7b", "v6e-8", *LORA),
    Row("dapo_qwen2_5_7b", "v5e-8", *LORA),
)
FLAGS = {
    "only": Flag("0_5b", "", "rows of this: 32b, 7b-v6e-16, or lora"),
    "level": Flag("O0", "", "JAX_OPTIMIZATION_LEVEL"),
}


def plan(row: Row, level: str, *flags: str) -> dict:
    """The planner's JSON. A non-zero exit code with it is a verdict, without it a failure."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "plan.json")
        environment = os.environ | dict(JAX_PLATFORMS="cpu")
        environment |= dict(JAX_OPTIMIZATION_LEVEL=level) if level else {}
        name, *argument = row.config.split(":")
        config = ":".join([f"configs/{name}.py", *argument])
        command = [
            sys.executable, "-m", "dapo_jax.plan", f"--config={config}",
            f"--topology={row.slice}", f"--json={out}", *row.flags, *flags,
        ]  # fmt: skip
        subprocess.run(
            command, cwd=harness.ROOT, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        if not out.exists():
            sys.exit(f"{' '.join(command)}: no result")
        return json.loads(out.read_text())


def compiled(row: Row, level: str) -> dict:
    """The plan with the compiler's word."""
    first = plan(row, level)
    flags = [] if first.get("fits") else first["suggestions"][0]["flags"].split()
    return plan(row, level, "--compile", *flags)


def gb(n: float) -> str:
    return f"{n / 1e9:.1f}"


MEMORY = (
    "config", "pod", "data x fsdp x tensor", "slots (cache)", "sampling in memory", "by arithmetic",
    "updating in memory", "by arithmetic", "limit", "verdict", "compile s", "expected step, min",
)  # fmt: skip
TRAFFIC = (
    "config", "pod", "decode: 8 tokens", "update: a micro-batch", "rematerialized", "update",
)  # fmt: skip


def memory(row: Row, r: dict) -> list[str]:
    programs = r["compiled"]["programs"]
    cells = []
    for phase, names in (
        ("sampling", ("decode weights", "prefill", "decode_")),
        ("updating", ("old log-probs", "update", "values")),
    ):
        known = [x for n, x in programs.items() if n.startswith(names) and x["total"] is not None]
        text = "not compiled"
        if top := max(known, key=lambda x: x["total"], default=None):
            total, beside = top["total"], top["resident"]
            text = f"{gb(total - beside)} + {gb(beside)} = {gb(total)}"
        cells += [text, gb(r["peaks"][phase])]
    step = "-"
    if "step" in r:
        minutes = (r["step"][x] / 60 for x in ("expected_s", "low_s", "high_s"))
        step = "{:.3g} ({:.3g}-{:.3g})".format(*minutes)
    verdict = "fits" if r["compiled"]["fits"] else "does not fit"
    seconds = f"{sum(x['seconds'] for x in programs.values()):.0f}"
    mesh = " x ".join(map(str, r["mesh"].values()))
    slots = f"{r['slots']:,} ({r['cache_fraction']:g})"
    limit = gb(r["pod"]["chip"]["hbm"])
    return [*row[:2], mesh, slots, *cells, limit, verdict, seconds, step]


def traffic(row: Row, r: dict) -> list[str]:
    """Collectives inside loops, a device; involuntary full rematerializations; TFLOP."""
    programs = r["compiled"]["programs"]

    def moved(name):
        kinds = programs.get(name, {}).get("collectives_in_loops", {})
        return ", ".join(f"{k} {v['bytes'] / 1e9:.3g} GB" for k, v in kinds.items()) or "-"

    count = sum(x.get("rematerialized", 0) for x in programs.values())
    updates = (programs[n] for n in ("update", "update of values") if n in programs)
    work = " + ".join(f"{x['flops'] / 1e12:,.0f}" for x in updates) or "-"
    return [*row[:2], moved("decode_full"), moved("update"), count, work]


def measure(args) -> list[Table]:
    named = {f"{row.config}-{row.slice}{row.end}": row for row in ROWS}
    rows = [row for name, row in named.items() if args.only in name]
    if not rows:
        sys.exit(f"--only: one of {', '.join(named)}")
    tables = {}
    for row in rows:
        found = compiled(row, args.level)
        for kind, head, cells in (("plan", MEMORY, memory), ("traffic", TRAFFIC, traffic)):
            name = f"pod_{kind}{row.end}"
            tables.setdefault(name, Table(*head, name=name)).row(*cells(row, found))
    return list(tables.values())
