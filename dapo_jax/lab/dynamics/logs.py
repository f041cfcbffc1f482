"""Training logs as series of numbers: our workdirs, verl's console and CSV, plain CSV, JSON lines.

    run = logs.read("runs/quickstart")          # or gs://bucket/run
    theirs = logs.read("verl_console.log")      # verl's names become ours: dynamics/verl.py
    steps, values = run.series["policy/entropy"]

The content of a file shows its format. Files come from elsewhere, so they are parsed and nothing in
them is run; a file that is not a log raises a ValueError of one line that names file and line.
"""

import collections
import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dapo_jax.config import schema
from dapo_jax.lab.dynamics import verl
from dapo_jax.lab.dynamics.verl import Series

METRICS = "metrics.jsonl"
# What a log calls its rollout step; the first that is there counts.
STEP_NAMES = ("step", "Step", "_step", "global_step", "training/global_step", "train_global_steps")


class Run(NamedTuple):
    """series: tag -> (rollout steps int [n] ascending, values float [n]; NaN where the run had no
    finite number). path: where it was read. of: tag -> what a foreign log's number describes,
    where ours describes all that was drawn."""

    name: str
    series: dict[str, Series]
    path: str = ""
    of: Mapping[str, str] = {}


def read(path: str) -> Run:
    """ValueError: nothing is there, or it is no log."""
    rows = records(path)
    if not rows:
        raise ValueError(f"{path}: no step in it")
    found, of = series(rows), {}
    if verl.is_verl(found):
        found, of = verl.translate(found)
    name = re.sub(r"\.(csv|jsonl|log|txt|out)$", "", place(path).name) or str(path)
    return Run(name, found, str(path), of)


def compare(paths: Iterable[str]) -> list[Run]:
    """Several runs, under names that differ: the paths where the short ones do not."""
    runs = [read(path) for path in paths]
    names = [r.name for r in runs]
    return [r._replace(name=r.path) if names.count(r.name) > 1 else r for r in runs]


def config_of(path: str) -> schema.Config | None:
    """The config of a workdir, as this version reads it; None: it has no config.json. ValueError:
    not a run's."""
    file = place(path) / "config.json"
    if not attempt(path, file.exists):
        return None
    try:
        return schema.of_run(text_of(file, path))
    except ValueError as error:
        raise ValueError(f"{path}/config.json: {first_line(error)}") from error


def last_step(run: Run) -> int:
    return max((int(steps[-1]) for steps, _ in run.series.values() if len(steps)), default=0)


def histograms(path: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tag -> (steps int [n], counts float [n, bins]) of a workdir. Steps whose number of bins is
    not the last step's (another group size) are left out."""
    found: dict[str, dict[int, list]] = collections.defaultdict(dict)
    for step, row in records(path):
        for tag, value in row.items():
            if isinstance(value, list) and value and all(map(is_number, value)):
                found[tag][step] = value
    out = {}
    for tag, rows in found.items():
        steps = [step for step in sorted(rows) if len(rows[step]) == len(rows[max(rows)])]
        out[tag] = np.array(steps), np.array([[*map(_finite, rows[step])] for step in steps], float)
    return out


def alarms(path: str) -> list[tuple[int, str]]:
    """(step, words) of every alarm of a workdir."""
    lists = ((step, x) for step, row in records(path) if isinstance(x := row.get("alarms"), list))
    return [(step, str(words)) for step, found in lists for words in found]


def place(path: str) -> epath.Path:
    """A path on a disk or in a bucket (gs://...; needs gcsfs)."""
    if not str(path):
        raise ValueError("the path of a log is empty")
    try:
        return attempt(path, lambda: epath.Path(os.path.expanduser(path)))
    except KeyError as error:
        raise ValueError(f"{path}: give a path on a disk, or gs://...") from error


def attempt(path: str, ask):
    """What `ask()` returns; ValueError of one line where a disk or bucket refuses."""
    try:
        return ask()
    except ImportError as error:
        raise ValueError(f"{path}: {error} (pip install 'dapo_jax[gcs]')") from error
    except (OSError, NotImplementedError) as error:
        raise ValueError(f"{path}: cannot be read ({first_line(error)})") from error


def numbered(path: str, folder: str) -> dict[int, epath.Path]:
    """Step -> its file step_NNNNNN.jsonl in a folder of a workdir, ascending."""
    where = place(path) / folder
    there = attempt(path, lambda: list(where.iterdir()) if where.is_dir() else [])
    named = ((re.fullmatch(r"step_(\d{1,15})\.jsonl", file.name), file) for file in there)
    found = {int(match[1]): file for match, file in named if match}
    return {step: found[step] for step in sorted(found)}


def text_of(file: epath.Path, path: str) -> str:
    """Content of a file; bytes that are no UTF-8 become replacement characters."""
    return attempt(path, file.read_bytes).decode(errors="replace").removeprefix("\ufeff")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


LogRows = Iterator[tuple[int, dict[str, Any]]]  # of any format: (step, {name: value})

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Behind a progress bar, '(TaskRunner pid=7)' or a time stamp: step:12 - actor/lr:1e-06 - ...
_CONSOLE = re.compile(r"(?:^|[\s)\]])step:(\d+) - (\S.*)")
_ITEM = re.compile(r"(.+?):(?:np\.\w+\()?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan))\)?(?:\s.*)?")


def records(path: str) -> list[tuple[int, dict[str, Any]]]:
    """(step, record) of a workdir's metrics.jsonl or of another log. ValueError: it is neither."""
    file = place(path)
    if attempt(path, (file / METRICS).exists):
        return list(_json_lines(text_of(file / METRICS, path), f"{path}/{METRICS}"))
    if attempt(path, file.is_dir):
        raise ValueError(f"{path}: no {METRICS} in it; give a run's directory or a log file")
    if not attempt(path, file.exists):
        raise ValueError(f"{path}: no such file or directory")
    return list(parse(text_of(file, path), path))


def parse(text: str, path: str) -> LogRows:
    """Rows of a log, by what its text looks like. ValueError: like no known format."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    if first.lstrip().startswith("{") and json_object(first) is not None:
        return _json_lines(text, path)
    if rows := list(_console_lines(text)):
        return iter(rows)
    header = {name.strip().strip('"') for name in first.split(",")}
    if len(header) > 1 and header & set(STEP_NAMES):
        return _csv_rows(text, path)
    known = "neither JSON lines, nor verl's 'step:N - name:value - ...', nor CSV with a column"
    raise ValueError(f"{path}:1: {known} 'step'")


def _console_lines(text: str) -> LogRows:
    for line in text.replace("\r", "\n").split("\n"):
        if match := _CONSOLE.search(_ANSI.sub("", line)):
            items = map(_ITEM.fullmatch, (part.strip() for part in match[2].split(" - ")))
            if row := {item[1]: float(item[2]) for item in items if item}:
                yield int(match[1]), row


def _csv_rows(text: str, path: str) -> LogRows:
    """Cells are numbers or, where they are none, text; a last line that is cut off is left out."""
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", skipinitialspace=True)
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row.values() or "" in row:
                if not text.endswith("\n") and reader.line_num > text.count("\n"):
                    return
                raise ValueError(f"{where}: not as many columns as the first line has")
            cells = {name.strip(): cell.strip() for name, cell in row.items() if cell.strip()}
            out = {name: _number(cell) for name, cell in cells.items()}
            yield _step(out, where), out
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}") from error


def _json_lines(text: str, path: str) -> LogRows:
    lines = [(i, x) for i, x in enumerate(text.split("\n"), 1) if x.strip()]
    for line, content in lines:
        row = json_object(content)
        if row is None:
            if line == lines[-1][0] and not text.endswith("\n"):
                return  # cut off while it was written
            raise ValueError(f"{path}:{line}: no JSON object")
        yield _step(row, f"{path}:{line}"), row


def json_object(line: str) -> dict | None:
    """The object that a line holds; None: it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _step(row: Mapping[str, Any], where: str) -> int:
    name = next((n for n in STEP_NAMES if n in row), None)
    if name is None:
        raise ValueError(f"{where}: no 'step'")
    value = row[name]
    if not is_number(value) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{where}: {name} is {str(value)[:40]!r}, no step (0, 1, 2, ...)")
    return int(value)


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float | None) -> float:
    """NaN in place of what is no finite float: null, an integer of hundreds of digits."""
    return float(value) if value is not None and abs(value) <= sys.float_info.max else math.nan


def series(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Series]:
    """Tag -> (steps, values). Where a step comes twice (a resumed run) the later value counts; null
    and numbers that are not finite become NaN; text and lists are left out."""
    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for step, row in rows:
        for tag, value in row.items():
            if tag not in STEP_NAMES and (value is None or is_number(value)):
                found[tag][step] = _finite(value)
    out = {}
    for tag, points in found.items():
        steps = sorted(points)
        out[tag] = np.array(steps, np.int64), np.array([points[step] for step in steps])
    return out
