"""What `plan --compile` says of the shipped configs on pods: the table of RESULTS.md.

    python benchmarks/pod_plan.py                          all rows; needs pip install 'jax[tpu]'
    python benchmarks/pod_plan.py --only=v5p-256 --level=O0 --json=out.json       quickly
    python benchmarks/pod_plan.py --json=out.json          rows that are in the file already are not
                                                           compiled again: delete it after a change
    python benchmarks/pod_plan.py --write                  and put the table into RESULTS.md
    python benchmarks/pod_plan.py --preempt_hours=6 --only=v5p-256 [--write]
                                                           what preemptions cost; nothing compiles
    python benchmarks/pod_plan.py --staleness [--only=32b] [--json=out.json] [--write]
                                                           what rollout.staleness gains, on one mesh
                                                           and on two; nothing compiles

A config runs as shipped on the pod it was made for, and with the planner's first suggestion on the
others. XLA:TPU compiles the run's own programs one by one; nothing is run. "In memory" is the
compiler's peak of a program and what a step keeps on the chip beside it. At the default level a 32B
row takes 4-10 minutes on two cores, at O0 two.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import results

HEADING = "## Whole runs on pods, compiled"
VALUES = "## Whole runs on pods, with a value model"
PREEMPTED = "## Whole runs on pods, preempted"
AGED = "## Whole runs on pods, responses that outlive steps"
LENGTHS = ("--mean_response=5000", "--mean_prompt=200")
ROOT = pathlib.Path(__file__).parent.parent


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
AGED_ROWS = (ROWS[0], ROWS[2], ROWS[5])  # of `--staleness`
WITHOUT = {"vapo:32B": "dapo_qwen2_5_32b"}  # value model: the same model and batch


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
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
        if not out.exists():
            sys.exit(f"{' '.join(command)}: no result")
        return json.loads(out.read_text())


def measure_beside(row: Row, level: str, old: dict | None) -> dict:
    """`measure`; of a run with a value model also the step of the one without."""
    got = measure(row, level, old)
    if row.config in WITHOUT:
        without = plan(row._replace(config=WITHOUT[row.config]), level, *got["flags"])
        got["without_values"] = without["step"]
    return got


def measure(row: Row, level: str, old: dict | None) -> dict:
    """As shipped where the config can run there, else with the first suggestion. What the compiler
    said is taken from `old` where that is of the same row, flags, level and versions; the
    arithmetic is done anew."""
    first = plan(row, level)
    flags = first["suggestions"][0]["flags"].split() if first["mistakes"] else []
    if old and old["flags"] == flags and _same_compiler(old["compiled"], level):
        return plan(row, level, *flags) | {"flags": flags, "compiled": old["compiled"]}
    return plan(row, level, "--compile", *flags) | {"flags": flags}


def _same_compiler(compiled: dict, level: str) -> bool:
    return compiled["level"] == (level or "default") and all(
        importlib.metadata.version(p) == v for p, v in compiled["versions"].items()
    )


def minutes(r: dict) -> str:
    """'61 (50-76)', of a step at the planner's default lengths."""
    if "step" not in r:
        return "-"
    return "{:.3g} ({:.3g}-{:.3g})".format(
        *(r["step"][x] / 60 for x in ("expected_s", "low_s", "high_s"))
    )


def table(heading: str, measured: list[tuple[Row, dict]]) -> str:
    gb = lambda n: f"{n / 1e9:.1f}"
    one = measured[0][1]["compiled"]
    versions = ", ".join(f"{k} {v}" for k, v in one["versions"].items())
    flags = " --only=vapo" if heading == VALUES else ""
    flags += f" --level={one['level']}" if one["level"] != "default" else ""
    lines = [
        heading,
        "",
        f"`python benchmarks/pod_plan.py{flags}`, {datetime.date.today()}, {versions}, optimization"
        f" level {one['level']}. Decimal GB a chip: the compiler's peak + what lies beside it = in"
        " memory, of the phase's largest program. By arithmetic: `plan` without compiling.",
        "",
        "| config | pod | data x fsdp x tensor | slots (cache) | sampling in memory |"
        " by arithmetic | updating in memory | by arithmetic | limit | verdict | compile s |"
        " expected step, min |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, r in measured:
        programs, limit = r["compiled"]["programs"], gb(r["pod"]["chip"]["hbm"])
        cells = []
        for phase, names in (
            ("sampling", ("decode weights", "prefill", "decode_")),
            ("updating", ("old log-probs", "update", "values")),
        ):
            known = [
                x for n, x in programs.items() if n.startswith(names) and x["total"] is not None
            ]
            top = max(known, key=lambda x: x["total"], default=None)
            text = "not compiled"
            if top:
                peak = top["total"] - top["resident"]
                text = f"{gb(peak)} + {gb(top['resident'])} = {gb(top['total'])}"
            cells.append(f"{text} | {gb(r['peaks'][phase])}")
        share = f"{r['cache_fraction']:g}"
        lines.append(
            f"| {row.config} | {row.slice} |"
            f" {' x '.join(str(n) for n in r['mesh'].values())} | {r['slots']:,} ({share}) |"
            f" {' | '.join(cells)} | {limit} |"
            f" {'fits' if r['compiled']['fits'] else 'does not fit'} |"
            f" {sum(x['seconds'] for x in programs.values()):.0f} | {minutes(r)} |"
        )
    lines += [
        "",
        "Inside loops, a device; Involuntary full rematerializations; TFLOP of matrices:",
        "",
    ]
    lines += [
        "| config | pod | decode: 8 tokens | update: a micro-batch | rematerialized | update |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row, r in measured:
        programs = r["compiled"]["programs"]

        def moved(name, programs=programs):
            kinds = programs.get(name, {}).get("collectives_in_loops", {})
            return ", ".join(f"{k} {v['bytes'] / 1e9:.3g} GB" for k, v in kinds.items()) or "-"

        count = sum(x.get("rematerialized", 0) for x in programs.values())
        updates = (programs[n] for n in ("update", "update of values") if n in programs)
        work = " + ".join(f"{x['flops'] / 1e12:,.0f}" for x in updates) or "-"
        lines.append(
            f"| {row.config} | {row.slice} | {moved('decode_full')} |"
            f" {moved('update')} | {count} | {work} |"
        )
    return "\n".join([*lines, *_steps(measured)]) + "\n"


def _steps(measured: list[tuple[Row, dict]]) -> list[str]:
    """Of runs with a value model: what it adds to a step."""
    both = [(row, r) for row, r in measured if "step" in r and "without_values" in r]
    if not both:
        return []
    lines = [
        "",
        "The expected step by its parts, in seconds, at the planner's default lengths, against the"
        " run without a value model and the same flags:",
        "",
        "| config | pod | step | sampling | old log-probs | update | values | update of values |"
        " others |",
        "|---" * 9 + "|",
    ]
    for row, r in both:
        without = row._replace(config=WITHOUT[row.config])
        for name, step in ((without, r["without_values"]), (row, r["step"])):
            of = dict(step["parts"])
            sampling = sum(of.pop(x) for x in ("prefill", "decode", "tail", "host"))
            names = ("old log-probs", "update", "values", "update of values")
            shown = [step["expected_s"], sampling, *(of.pop(x, 0.0) for x in names)]
            cells = " | ".join(f"{s:,.0f}" for s in [*shown, sum(of.values())])
            lines.append(f"| {name.config} | {name.slice} | {cells} |")
    return lines


def preempted(planned: list[tuple[Row, dict]]) -> str:
    """Expected goodput, and what a preemption costs. planned: with `--preempt_hours`."""
    hours = planned[0][1]["run"]["preempted"]["hours"]
    parts = list(planned[0][1]["run"]["preempted"]["lost_s"])
    lines = [
        PREEMPTED,
        "",
        f"`python benchmarks/pod_plan.py --preempt_hours={hours:g}`, {datetime.date.today()}: by"
        f" the simulated schedule ({' '.join(LENGTHS)}) and pods/constants.py, of which nothing was"
        f" measured on a TPU; a preemption every {hours:g} h of wall time. Goodput as"
        " `time/goodput`: steps and their evaluations. The last columns are seconds per"
        " preemption.",
        "",
        "| config | pod | changed | goodput | without preemptions | "
        + " | ".join([*parts, "all"])
        + " |",
        "|---" * (6 + len(parts)) + "|",
    ]
    for row, r in planned:
        p = r["run"]["preempted"]
        for what, x in {"": p, **p["instead"]}.items():
            lost = [*x["lost_s"].values(), sum(x["lost_s"].values())]
            lines.append(
                f"| {row.config} | {row.slice} | {what} | {x['goodput']:.1%} |"
                f" {x['goodput_undisturbed']:.1%} | {' | '.join(f'{s:,.0f}' for s in lost)} |"
            )
    return "\n".join(lines) + "\n"


def fitted(row: Row, *more: str) -> dict:
    """As shipped where the config can run there, else with the first suggestion."""
    first = plan(row, "", *more)
    flags = first["suggestions"][0]["flags"].split() if first["mistakes"] else []
    return plan(row, "", *more, *flags) if flags else first


def aged(planned: list[tuple[Row, dict]]) -> str:
    """Steps whose responses outlive them. planned: with `--staleness`."""
    head = "config, pod, S, slots, minutes, of S = 0, slots busy, sampling s, of it prefill"
    head += ", age in steps, oldest, M tokens parked, two meshes minutes, devices that sample, gain"
    rows = [tuple(head.split(", "))]
    for row, r in planned:
        plain, *_ = r["step"]["staleness"]
        for x in r["step"]["staleness"]:
            sampled = sum(x["phases"][what] for what in ("prefill", "decode", "tail", "host"))
            cells = [*row, x["staleness"], f"{x['slots']:,}", f"{x['seconds'] / 60:.1f}"]
            cells += [f"{x['seconds'] / plain['seconds']:.2f}", f"{x['occupancy']:.0%}"]
            cells += [f"{sampled:.0f}", f"{x['phases']['prefill']:.0f}"]
            if best := x["apart"]:
                cells += [f"{x['mean']:.2f}", x["oldest"], f"{x['parked'] / 1e6:.1f}"]
                cells += [f"{best['seconds'] / 60:.1f}", f"{best['share']:.0%}"]
                cells += [f"{x['seconds'] / best['seconds']:.2f}x"]
            rows.append((*cells, *["-"] * (len(rows[0]) - len(cells))))
    said = (
        f"`python benchmarks/pod_plan.py --staleness`, {datetime.date.today()}: by the run's own"
        f" clock and schedule ({' '.join(LENGTHS)}) and pods/constants.py, of which nothing was"
        " measured on a TPU. S: rollout.staleness; a pod's cache is the same in all its rows."
        " Sampling: prefill, decoding, host. Two meshes: the same step where a part of the devices"
        " samples while the others train, at best (pods/cost.py: apart), and what is gained."
    )
    return f"{AGED}\n\n{said}\n\n{results.table(*rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows of this: 32b, or 7b-v6e-16")
    parser.add_argument("--level", default="", help="JAX_OPTIMIZATION_LEVEL, e.g. O0")
    parser.add_argument("--json", type=pathlib.Path, help="write the planner's results here")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    parser.add_argument("--preempt_hours", type=float, default=0.0, help="a table of preemptions")
    parser.add_argument("--staleness", action="store_true", help="a table of that")
    args = parser.parse_args()
    rows = [r for r in (AGED_ROWS if args.staleness else ROWS) if args.only in "-".join(r)]
    if not rows:
        parser.error(f"--only: one of {', '.join('-'.join(r) for r in ROWS)}")
    if args.staleness:
        known = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
        for row in rows:
            known["-".join(row)] = known.get("-".join(row)) or fitted(row, "--staleness", *LENGTHS)
            if args.json:
                args.json.write_text(json.dumps(known, indent=1))
        section = aged([(row, known["-".join(row)]) for row in rows])
        print(section)
        if args.write:
            results.write(AGED, section)
        return
    if args.preempt_hours:
        hours = f"--preempt_hours={args.preempt_hours:g}"
        planned = [(row, plan(row, "", hours, *LENGTHS)) for row in rows]
        section = preempted([x for x in planned if "run" in x[1]])
        print(section)
        if args.write:
            results.write(PREEMPTED, section)
        return
    measured, kept = [], {}
    if args.json and args.json.exists():
        kept = {Row(x["config"], x["slice"]): x for x in json.loads(args.json.read_text())}
    for row in rows:
        print(f"{row.config} on {row.slice} ...", flush=True)
        measured.append((row, measure_beside(row, args.level, kept.get(row))))
        kept[row] = row._asdict() | measured[-1][1]
        if args.json:  # what there is, should a later row fail
            args.json.write_text(json.dumps(list(kept.values()), indent=1))
    for heading in (HEADING, VALUES):
        part = [x for x in measured if (x[0].config in WITHOUT) == (heading == VALUES)]
        if not part:
            continue
        section = table(heading, part)
        print("\n" + section)
        if args.write:
            results.write(heading, section)


if __name__ == "__main__":
    main()
