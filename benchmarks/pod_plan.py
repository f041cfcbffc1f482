"""What `plan` says of the shipped configs on pods: memory by the compiler, preemptions, staleness.

    python -m benchmarks pod_plan --full                    all rows; needs pip install 'jax[tpu]'
    python -m benchmarks pod_plan --full --only=v5p-256 --level=O0 --json=out.json       quickly
    python -m benchmarks pod_plan --full --table=preempted --only=v5p-256
    python -m benchmarks pod_plan --full --table=staleness [--only=32b] [--json=out.json]

    compiled    XLA:TPU compiles the run's own programs one by one; nothing is run. "In memory" is
                the compiler's peak of a program and what a step keeps on the chip beside it. At the
                default level a 32B row takes 4-10 minutes on two cores, at O0 two
    preempted   what preemptions cost, every `--hours`; nothing compiles
    staleness   what rollout.staleness gains, on one mesh and on two; nothing compiles

A config runs as shipped on the pod it was made for, and with the planner's first suggestion on the
others. Rows that are in `--json` already are not compiled or planned again where flags, level and
versions are the same: delete it after a change.
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

LENGTHS = ("--mean_response=5000", "--mean_prompt=200")


class Row(NamedTuple):
    config: str  # a file of configs/, NAME or NAME:ARGUMENT
    slice: str  # Cloud's name

    @property
    def name(self) -> str:
        return "-".join(self)


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
AGED_ROWS = (ROWS[0], ROWS[2], ROWS[5])
WITHOUT = {"vapo:32B": "dapo_qwen2_5_32b"}  # value model: the same model and batch
FLAGS = {
    "table": Flag("compiled", "compiled", choices=("compiled", "preempted", "staleness")),
    "only": Flag("0_5b", "", "rows of this: 32b, or 7b-v6e-16"),
    "level": Flag("O0", "", "JAX_OPTIMIZATION_LEVEL"),
    "hours": Flag(6.0, 6.0, "between preemptions"),
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


def suggested(first: dict) -> list[str]:
    """No flags where the config can run as shipped, else those of the first suggestion."""
    return first["suggestions"][0]["flags"].split() if first["mistakes"] else []


def compiled(row: Row, level: str, old: dict | None) -> dict:
    """The plan with the compiler's word, which is taken from `old` where that is of the same flags,
    level and versions; with a value model also the step of the run without one."""
    first = plan(row, level)
    flags = suggested(first)
    if old and old["flags"] == flags and _same_compiler(old["compiled"], level):
        got = plan(row, level, *flags) | {"compiled": old["compiled"]}
    else:
        got = plan(row, level, "--compile", *flags)
    if row.config in WITHOUT:
        without = row._replace(config=WITHOUT[row.config])
        got["without_values"] = plan(without, level, *flags)["step"]
    return got | {"flags": flags}


def _same_compiler(compiled: dict, level: str) -> bool:
    return compiled["level"] == (level or "default") and all(
        importlib.metadata.version(p) == v for p, v in compiled["versions"].items()
    )


def planned(row: Row, *more: str) -> dict:
    """The plan without a compiler, as shipped or with the first suggestion."""
    first = plan(row, "", *more)
    flags = suggested(first)
    return plan(row, "", *more, *flags) if flags else first


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def gb(n: float) -> str:
    return f"{n / 1e9:.1f}"


def memory_table(name: str) -> Table:
    head = ("config", "pod", "data x fsdp x tensor", "slots (cache)", "sampling in memory")
    head += ("by arithmetic", "updating in memory", "by arithmetic", "limit", "verdict")
    return Table(*head, "compile s", "expected step, min", name=name)


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


def traffic_table(name: str) -> Table:
    head = ("config", "pod", "decode: 8 tokens", "update: a micro-batch", "rematerialized")
    return Table(*head, "update", name=name)


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


def steps_table() -> Table:
    head = ("config", "pod", "step", "sampling", "old log-probs", "update", "values")
    return Table(*head, "update of values", "others", name="pod_steps_values")


def step_parts(row: Row, step: dict) -> list[str]:
    """Seconds of the expected step."""
    of = dict(step["parts"])
    sampling = sum(of.pop(x) for x in ("prefill", "decode", "tail", "host"))
    names = ("old log-probs", "update", "values", "update of values")
    shown = [step["expected_s"], sampling, *(of.pop(x, 0.0) for x in names)]
    return [*row, *(f"{s:,.0f}" for s in [*shown, sum(of.values())])]


def preempted_table(parts: list[str]) -> Table:
    head = ("config", "pod", "changed", "goodput", "without preemptions", *parts, "all")
    return Table(*head, name="pod_preempted")


def preempted(row: Row, p: dict) -> list[list[str]]:
    """A row as shipped, and one for each changed setting. The last cells: seconds a preemption."""
    return [
        [*row, what, f"{x['goodput']:.1%}", f"{x['goodput_undisturbed']:.1%}"]
        + [f"{s:,.0f}" for s in (*x["lost_s"].values(), sum(x["lost_s"].values()))]
        for what, x in {"": p, **p["instead"]}.items()
    ]


def staleness_table() -> Table:
    head = ("config", "pod", "S", "slots", "minutes", "of S = 0", "slots busy", "sampling s")
    head += ("of it prefill", "age in steps", "oldest", "M tokens parked", "two meshes minutes")
    return Table(*head, "devices that sample", "gain", name="pod_staleness")


def aged(row: Row, settings: list[dict]) -> list[list[str]]:
    """A row per setting; the first, S = 0, is what the others are compared with."""
    rows, plain = [], settings[0]
    for x in settings:
        sampled = sum(x["phases"][what] for what in ("prefill", "decode", "tail", "host"))
        cells = [*row, x["staleness"], f"{x['slots']:,}", f"{x['seconds'] / 60:.1f}"]
        cells += [f"{x['seconds'] / plain['seconds']:.2f}", f"{x['occupancy']:.0%}"]
        cells += [f"{sampled:.0f}", f"{x['phases']['prefill']:.0f}"]
        beside = ["-"] * 6
        if best := x["apart"]:
            beside = [f"{x['mean']:.2f}", x["oldest"], f"{x['parked'] / 1e6:.1f}"]
            beside += [f"{best['seconds'] / 60:.1f}", f"{best['share']:.0%}"]
            beside += [f"{x['seconds'] / best['seconds']:.2f}x"]
        rows.append([*cells, *beside])
    return rows


# ------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------


def measure_compiled(rows: list[Row], level: str, kept: dict, keep) -> list[Table]:
    """Runs without a value model, and those with one, in tables of their own."""
    tables = {}
    for row in rows:
        r = keep(row, compiled(row, level, kept.get(row.name)))
        suffix = "_values" if row.config in WITHOUT else ""
        if suffix not in tables:
            tables[suffix] = [
                memory_table(f"pod_plan{suffix}"),
                traffic_table(f"pod_traffic{suffix}"),
            ]
            tables[suffix] += [steps_table()] if suffix else []
        tables[suffix][0].row(*memory(row, r))
        tables[suffix][1].row(*traffic(row, r))
        if suffix and "step" in r:
            without = row._replace(config=WITHOUT[row.config])
            tables[suffix][2].row(*step_parts(without, r["without_values"]))
            tables[suffix][2].row(*step_parts(row, r["step"]))
    return [table for of in tables.values() for table in of]


def measure(args) -> list[Table]:
    rows = AGED_ROWS if args.table == "staleness" else ROWS
    rows = [row for row in rows if args.only in row.name]
    if not rows:
        sys.exit(f"--only: one of {', '.join(row.name for row in ROWS)}")
    file = pathlib.Path(args.json) if args.json else None
    kept = json.loads(file.read_text()) if file and file.exists() else {}

    def keep(row: Row, found: dict) -> dict:
        kept[row.name] = found
        if file:  # what there is, should a later row fail
            file.write_text(json.dumps(kept, indent=1))
        return found

    if args.table == "compiled":
        return measure_compiled(rows, args.level, kept, keep)
    if args.table == "staleness":
        table = staleness_table()
        for row in rows:
            r = kept.get(row.name) or keep(row, planned(row, "--staleness", *LENGTHS))
            for cells in aged(row, r["step"]["staleness"]):
                table.row(*cells)
        return [table]
    found = [(row, plan(row, "", f"--preempt_hours={args.hours:g}", *LENGTHS)) for row in rows]
    found = [(row, r["run"]["preempted"]) for row, r in found if "run" in r]
    table = preempted_table(list(found[0][1]["lost_s"]))
    for row, p in found:
        for cells in preempted(row, p):
            table.row(*cells)
    return [table]
