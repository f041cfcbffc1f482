"""What `plan --compile` says of the shipped configs on pods, the compiler's word on memory.

    python -m benchmarks pod_plan --full                    all rows; needs pip install 'jax[tpu]'
    python -m benchmarks pod_plan --full --only=v5p-256 --level=O0 --json=out.json       quickly

XLA:TPU compiles the run's own programs one by one; nothing is run. "In memory" is the compiler's
peak of a program and what a step keeps on the chip beside it. A config runs as shipped on the pod
it was made for, and with the planner's first suggestion on the others. At the default level a 32B
row takes 4-10 minutes on two cores, at O0 two. Rows that are in `--json` already are not compiled
again where flags, level and versions are the same: delete it after a change.
"""

import importlib.metadata
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


ROWS = (
    Row("dapo_qwen2_5_32b", "v5p-256"),
    Row("dapo_qwen2_5_32b", "v5p-512"),
    Row("dapo_qwen2_5_32b", "v6e-256"),
    Row("dapo_qwen2_5_32b", "v5e-256"),
    Row("dapo_qwen2_5_7b", "v6e-16"),
    Row("dapo_qwen2_5_7b", "v6e-64"),
    Row("dapo_qwen2_5_1_5b", "v6e-16"),
    Row("dapo_qwen2_5_0_5b", "v6e-8"),
    Row("gsm8k_dapo_qwen2_5_1_5b", "v6e-8"),
    Row("vapo:32B", "v5p-256"),
    Row("vapo:32B", "v5p-512"),
)
VALUES = "vapo:"  # configs with a value model, which have tables of their own
FLAGS = {
    "only": Flag("0_5b", "", "rows of this: 32b, or 7b-v6e-16"),
    "level": Flag("O0", "", "JAX_OPTIMIZATION_LEVEL"),
    "json": Flag("", "", "file that keeps the planner's results"),
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
            f"--topology={row.slice}", f"--json={out}", *flags,
        ]  # fmt: skip
        subprocess.run(
            command, cwd=harness.ROOT, env=environment, stdout=subprocess.DEVNULL, check=False
        )
        if not out.exists():
            sys.exit(f"{' '.join(command)}: no result")
        return json.loads(out.read_text())


def compiled(row: Row, level: str, old: dict | None) -> dict:
    """The plan with the compiler's word, which is taken from `old` where that is of the same flags,
    level and versions."""
    first = plan(row, level)
    flags = first["suggestions"][0]["flags"].split() if first["mistakes"] else []
    if old and old["flags"] == flags and _same_compiler(old["compiled"], level):
        return plan(row, level, *flags) | {"flags": flags, "compiled": old["compiled"]}
    return plan(row, level, "--compile", *flags) | {"flags": flags}


def _same_compiler(compiled: dict, level: str) -> bool:
    return compiled["level"] == (level or "default") and all(
        importlib.metadata.version(p) == v for p, v in compiled["versions"].items()
    )


def gb(n: float) -> str:
    return f"{n / 1e9:.1f}"


def memory_table(suffix: str) -> Table:
    head = ("config", "pod", "data x fsdp x tensor", "slots (cache)", "sampling in memory")
    head += ("by arithmetic", "updating in memory", "by arithmetic", "limit", "verdict")
    return Table(*head, "compile s", "expected step, min", name=f"pod_plan{suffix}")


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
            peak = top["total"] - top["resident"]
            text = f"{gb(peak)} + {gb(top['resident'])} = {gb(top['total'])}"
        cells += [text, gb(r["peaks"][phase])]
    step = "-"
    if "step" in r:
        minutes = (r["step"][x] / 60 for x in ("expected_s", "low_s", "high_s"))
        step = "{:.3g} ({:.3g}-{:.3g})".format(*minutes)
    verdict = "fits" if r["compiled"]["fits"] else "does not fit"
    seconds = f"{sum(x['seconds'] for x in programs.values()):.0f}"
    mesh = " x ".join(map(str, r["mesh"].values()))
    slots = f"{r['slots']:,} ({r['cache_fraction']:g})"
    return [*row, mesh, slots, *cells, gb(r["pod"]["chip"]["hbm"]), verdict, seconds, step]


def traffic_table(suffix: str) -> Table:
    head = ("config", "pod", "decode: 8 tokens", "update: a micro-batch", "rematerialized")
    return Table(*head, "update", name=f"pod_traffic{suffix}")


def traffic(row: Row, r: dict) -> list[str]:
    """Collectives inside loops, a device; involuntary full rematerializations; TFLOP."""
    programs = r["compiled"]["programs"]

    def moved(name):
        kinds = programs.get(name, {}).get("collectives_in_loops", {})
        return ", ".join(f"{k} {v['bytes'] / 1e9:.3g} GB" for k, v in kinds.items()) or "-"

    count = sum(x.get("rematerialized", 0) for x in programs.values())
    updates = (programs[n] for n in ("update", "update of values") if n in programs)
    work = " + ".join(f"{x['flops'] / 1e12:,.0f}" for x in updates) or "-"
    return [*row, moved("decode_full"), moved("update"), count, work]


def measure(args) -> list[Table]:
    rows = [row for row in ROWS if args.only in "-".join(row)]
    if not rows:
        sys.exit(f"--only: one of {', '.join(map('-'.join, ROWS))}")
    file = pathlib.Path(args.json) if args.json else None
    kept = json.loads(file.read_text()) if file and file.exists() else {}
    tables = {}
    for row in rows:
        name = "-".join(row)
        r = kept[name] = compiled(row, args.level, kept.get(name))
        if file:  # what there is, should a later row fail
            file.write_text(json.dumps(kept, indent=1))
        suffix = "_values" if row.config.startswith(VALUES) else ""
        if suffix not in tables:
            tables[suffix] = memory_table(suffix), traffic_table(suffix)
        tables[suffix][0].row(*memory(row, r))
        tables[suffix][1].row(*traffic(row, r))
    return [table for both in tables.values() for table in both]
