"""RESULTS.md: one section per benchmark, rewritten by `--write`."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import sys

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")


def made_by(*packages: str) -> str:
    """The command of this process, the day, the machine, and the versions of what was measured."""
    script = pathlib.Path(sys.argv[0]).name
    flags = [a for a in sys.argv[1:] if a != "--write"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    return (
        f"`{' '.join(['python', f'benchmarks/{script}', *flags])}`, {datetime.date.today()},"
        f" {cpu()}, {cores} cores; {versions}"
    )


def cpu() -> str:
    """'AMD EPYC, family 25, model 17, AVX-512', or as much of it as is known."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if "model name" not in found:
        return platform.processor() or platform.machine()
    numbers = [f"{k} {found[k]}" for k in ("cpu family", "model") if k in found]
    flags = found.get("flags", "").split()
    isa = [name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags]
    said = ", ".join([found["model name"], *numbers, *isa[:1]])
    return said.replace("cpu family", "family")


def table(*rows: tuple) -> str:
    """Markdown; the first row is the head."""
    head, *body = ([str(cell) for cell in row] for row in rows)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def write(heading: str, section: str) -> None:
    """Put `section`, which begins with `heading` ('## ...'), in place of the old one, or add it."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Measured\n"
    before, found, after = text.partition(heading + "\n")
    rest = after.partition("\n## ")
    tail = "\n## " + rest[2] if found and rest[1] else ""
    RESULTS.write_text(before.rstrip() + "\n\n" + section.rstrip() + "\n" + tail)
