"""What every benchmark shares: flags, clocks, processes of their own, and the file of its result.

A benchmark is a module with a docstring, `FLAGS` (name -> Flag) and `measure(args)`, which returns
its tables. This module imports nothing heavy: jax and torch read what `prepare` sets on import.
"""

import argparse
import concurrent.futures
import datetime
import gzip
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# What torch's sides call the instruction set. XLA's libraries look at the processor all the same.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"
}  # fmt: skip


class Flag(NamedTuple):
    """A flag of a benchmark: its value without and with `--full`. A tuple takes several words."""

    quick: Any
    full: Any
    help: str = ""
    choices: Sequence[Any] | None = None


class Table:
    """A result: rows are printed as they come. name: of its file, '' = the benchmark's."""

    def __init__(self, *columns: str, name: str = ""):
        self.columns, self.name = columns, name
        self.rows: list[list[str]] = []
        self.notes: list[str] = []

    def row(self, *cells: Any) -> None:
        assert len(cells) == len(self.columns), (self.columns, cells)
        self.rows.append([str(cell) for cell in cells])
        print("   ".join(self.rows[-1]), flush=True)

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        print(sentence, flush=True)


def prepare(cores: int, environment: Mapping[str, str]) -> None:
    """For this process: the environment, and with `cores` its threads on that many last
    cores, and no accelerator."""
    os.environ.update(environment)
    if cores:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ["OMP_NUM_THREADS"] = str(cores)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])


def limited(isa: str) -> dict[str, str]:
    """The environment that keeps all sides to an instruction set; '' changes nothing."""
    if not isa:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={isa}"
    return AVX2 | {"XLA_FLAGS": flags.strip()}


def apart(function: Callable, *arguments, cores: int = 0, **environment: str) -> Any:
    """The result of `function(*arguments)` in a process of its own, which has all the memory of the
    device to itself and leaves nothing there."""
    with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), prepare, (cores, environment)
    ) as pool:
        return pool.submit(function, *arguments).result()


def median_seconds(turn: Callable[[], Any], repeats: int, clock=time.perf_counter) -> float:
    """Times calls by `clock`, after one that has compiled."""
    seconds = []
    for _ in range(repeats):
        started = clock()
        turn()
        seconds.append(clock() - started)
    return statistics.median(seconds)


def in_turns(
    functions: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, tuple[float, Any]]:
    """(median CPU-seconds of this process per call, last result) of each, over `repeats` turns
    after one that is not counted, since it compiles."""
    seconds, results = {name: [] for name in functions}, {}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            started = time.process_time()
            results[name] = function()
            seconds[name].append(time.process_time() - started)
    return {name: (statistics.median(t[1:]), results[name]) for name, t in seconds.items()}


def parse(name: str, module: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="the setting of the kept result")
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results/")
    parser.add_argument("--isa", choices=("", "AVX2"), default="", help="of all sides, at most")
    full = "--full" in argv
    for flag, f in module.FLAGS.items():
        default = f.full if full else f.quick
        if isinstance(default, bool):
            how: dict = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, tuple):
            how = {"nargs": "+", "type": type(default[0]), "choices": f.choices}
        else:
            how = {"type": type(default), "choices": f.choices}
        parser.add_argument(f"--{flag}", default=default, help=f.help, **how)
    return parser.parse_args(argv)


def run(name: str, module: ModuleType, packages: Sequence[str], argv: Sequence[str]) -> None:
    """Measures, prints, and with `--write` keeps the tables. packages: those that are measured."""
    args = parse(name, module, argv)
    tables = module.measure(args)
    command = " ".join(["python -m benchmarks", name, *(a for a in argv if a != "--write")])
    for table in tables if args.write else ():
        path = RESULTS / f"{table.name or name}.json"
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(as_json(result(table, old, command, packages)), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}; python -m benchmarks tables shows it")


def result(table: Table, old: Mapping[str, Any], command: str, packages: Sequence[str]) -> dict:
    """What is kept of `table`. Title, introduction and figures stay those of the `old` one."""
    return {
        "title": old.get("title", table.name or command),
        "command": command,
        "date": str(datetime.date.today()),
        "commit": commit(),
        "machine": machine(),
        "versions": {p: importlib.metadata.version(p) for p in packages},
        "about": old.get("about", ""),
        "notes": table.notes,
        "figures": old.get("figures", []),
        "columns": list(table.columns),
        "rows": table.rows,
    }


def as_json(found: Mapping[str, Any]) -> str:
    """A line for each field, row and note, so that a difference of two versions can be read."""
    lines = []
    for key, value in found.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and key != "columns":
            body = ",\n".join("  " + json.dumps(v, ensure_ascii=False) for v in value)
            text = f"[\n{body}\n ]"
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def keep(path: pathlib.Path, runs: Mapping[str, Sequence[Mapping]], tags: Collection[str]) -> None:
    """Writes what the records of each run say of these tags, a line a record, compressed."""
    lines = [
        json.dumps({"run": run} | {tag: x for tag, x in record.items() if tag in tags}) + "\n"
        for run, records in runs.items()
        for record in records
    ]
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def kept(path: pathlib.Path) -> dict[str, list[dict]]:
    """Run -> its records, of what `keep` wrote; no records of a run that it does not name."""
    runs = defaultdict(list)
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        record = json.loads(line)
        runs[record.pop("run")].append(record)
    return runs


def commit() -> str:
    """The checkout's, '' where git knows none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # an image has none
        return ""


def machine() -> str:
    """'AMD EPYC, family 25, model 17, AVX-512, 2 cores', or as much of it as is known."""
    path = pathlib.Path("/proc/cpuinfo")
    text = path.read_text().split("\n\n")[0] if path.exists() else ""
    found = dict(re.findall(r"^(.*?)\s*: (.*)$", text, re.M))
    said = [found.get("model name") or platform.processor() or platform.machine()]
    said += [f"{k.split()[-1]} {found[k]}" for k in ("cpu family", "model") if k in found]
    flags = found.get("flags", "").split()
    said += [isa for flag, isa in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags][:1]
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ", ".join([*said, f"{n} core{'s' * (n != 1)}"])
