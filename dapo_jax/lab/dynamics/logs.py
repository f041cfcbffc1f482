"""Training logs as series of numbers: our workdirs, verl's console and CSV, plain CSV, JSON lines.

    run = logs.read("runs/quickstart")          # or gs://bucket/run
    theirs = logs.read("verl_console.log")      # verl's names become ours: dynamics/verl.py
    steps, values = run.series["policy/entropy"]

The content of a file shows its format. Files come from elsewhere, so they are parsed and nothing in
them is run; a file that is not a log raises a ValueError of one line that names file and line.
"""

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dapo_jax.lab.dynamics import verl
from dapo_jax.lab.dynamics.verl import Series

METRICS = "metrics.jsonl"
# What a log calls its rollout step; the first that is there counts.
STEP_NAMES = ("step", "Step", "_step", "global_step", "training/global_step", "train_global_steps")
_LARGEST = 1 << 30  # bytes of a log, unpacked


class Run(NamedTuple):
    """series: tag -> (rollout steps int [n] ascending, values float [n]; NaN where the run had no
    finite number). path: where it was read. of: tag -> what a foreign log's number describes,
    where ours describes all that was drawn."""

    name: str
    series: dict[str, Series]
    path: str = ""
    of: Mapping[str, str] = {}


def read(path: str, name: str = "", names: Mapping[str, str] | None = None) -> Run:
    """One run. `name`: how figures call it, by default the file's or directory's name; of a file
    that holds several runs, the one to read. `names`: a CSV's own names -> our tags.

    ValueError: nothing is there, it is no log, or it holds several runs and none is called `name`.
    """
    runs = read_all(path, names)
    chosen = [r for r in runs if r.name == name] or runs
    if len(chosen) > 1:
        known = ", ".join(r.name for r in runs[:4])
        raise ValueError(f"{path}: holds {len(runs)} runs ({known}, ...); name one, or `read_all`")
    return chosen[0]._replace(name=name or chosen[0].name)


def read_all(path: str, names: Mapping[str, str] | None = None) -> list[Run]:
    """Every run of a log: one, unless a text column `run` tells several apart."""
    file = place(path)
    if attempt(path, file.is_dir):
        if not attempt(path, (file / METRICS).exists):
            raise ValueError(f"{path}: no {METRICS} in it; give a run's directory or a log file")
        rows = _json_lines(f"{path}/{METRICS}", text_of(file / METRICS, path))
    elif not attempt(path, file.exists):
        raise ValueError(f"{path}: no such file or directory")
    else:
        rows = parse(text_of(file, path), path)
    split: dict[str, list] = {}
    for step, row in rows:
        split.setdefault(row.get("run") if isinstance(row.get("run"), str) else "", []).append(
            (step, row)
        )
    if not split:
        raise ValueError(f"{path}: no step in it")
    default = re.sub(r"\.(gz|csv|jsonl|log|txt|out)", "", file.name) or str(path)
    return [
        _run(key or default, str(path), series(part), names or {}) for key, part in split.items()
    ]


def compare(paths: Iterable[str]) -> list[Run]:
    """All runs of several logs, under names that differ: the paths where the short ones do not."""
    runs = [run for path in paths for run in read_all(path)]
    names = [r.name for r in runs]
    return [r._replace(name=r.path if names.count(r.name) > 1 else r.name) for r in runs]


def last_step(run: Run) -> int:
    return max((int(steps[-1]) for steps, _ in run.series.values() if len(steps)), default=0)


def _run(name: str, path: str, found: dict[str, Series], names: Mapping[str, str]) -> Run:
    of: dict[str, str] = {}
    if verl.is_verl(found):
        found, of = verl.translate(found)
    return Run(name, {names.get(n, n): s for n, s in found.items()}, path, of)


def histograms(path: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tag -> (steps int [n], counts float [n, bins]) of a workdir. Steps whose number of bins is
    not the last step's (another group size) are left out."""
    found: dict[str, dict[int, list]] = {}
    file = place(path) / METRICS
    if not attempt(path, file.exists):
        return {}
    for step, row in _json_lines(f"{path}/{METRICS}", text_of(file, path)):
        for tag, value in row.items():
            if isinstance(value, list) and value and all(_is_number(x) for x in value):
                found.setdefault(tag, {})[step] = value
    out = {}
    for tag, rows in found.items():
        bins = len(rows[max(rows)])
        kept = sorted(step for step, row in rows.items() if len(row) == bins)
        out[tag] = np.array(kept), np.array([rows[s] for s in kept], float)
    return out


def alarms(path: str) -> list[tuple[int, str]]:
    """(step, words) of every alarm of a workdir."""
    file = place(path) / METRICS
    if not attempt(path, file.exists):
        return []
    rows = _json_lines(f"{path}/{METRICS}", text_of(file, path))
    lists = [(step, row["alarms"]) for step, row in rows if isinstance(row.get("alarms"), list)]
    return [(step, words) for step, said in lists for words in said if isinstance(words, str)]


# ------------------------------------------------------------------------------------------------
# Places
# ------------------------------------------------------------------------------------------------


def place(path: str) -> epath.Path:
    """A path on a disk or in a bucket (gs://...; needs gcsfs)."""
    if not str(path):
        raise ValueError("the path of a log is empty")
    try:
        return attempt(path, lambda: epath.Path(path).expanduser())
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


def text_of(file: epath.Path, path: str) -> str:
    """Content of a file, gzip or not; bytes that are no UTF-8 become replacement characters."""
    raw = attempt(path, file.read_bytes)
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(_LARGEST + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip ({first_line(error)})") from error
    if len(raw) > _LARGEST:
        raise ValueError(f"{path}: more than {_LARGEST >> 20} MiB; no log of a run")
    return raw.decode("utf-8", errors="replace").removeprefix("\N{BYTE ORDER MARK}")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------------------------
# Formats: each yields (step, {name: value}) rows
# ------------------------------------------------------------------------------------------------

LogRows = Iterator[tuple[int, dict[str, Any]]]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Behind a progress bar, '(TaskRunner pid=7)' or a time stamp: step:12 - actor/lr:1e-06 - ...
_CONSOLE = re.compile(r"(?:^|[\s)\]])step:(\d+) - (\S.*)")
_ITEM = re.compile(r"(.+?):(?:np\.\w+\()?([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan))\)?(?:\s.*)?")


def parse(text: str, path: str) -> LogRows:
    """LogRows of a log, by what its text looks like. ValueError: like no known format."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    if first.lstrip().startswith("{") and _object(first) is not None:
        return _json_lines(path, text)
    if rows := list(_console_lines(text)):
        return iter(rows)
    header = {name.strip().strip('"') for name in first.split(",")}
    if len(header) > 1 and header & set(STEP_NAMES):
        return _csv_rows(path, text)
    raise ValueError(
        f"{path}:1: neither JSON lines, nor verl's 'step:N - name:value - ...', nor CSV with a"
        f" column {STEP_NAMES[0]!r}"
    )


def _console_lines(text: str) -> LogRows:
    for line in text.replace("\r", "\n").split("\n"):
        if match := _CONSOLE.search(_ANSI.sub("", line)):
            items = map(_ITEM.fullmatch, (part.strip() for part in match[2].split(" - ")))
            if row := {item[1]: float(item[2]) for item in items if item}:
                yield int(match[1]), row


def _csv_rows(path: str, text: str) -> LogRows:
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = [(reader.line_num, row) for row in reader if any(x.strip() for x in row)]
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: {error}") from error
    header = [name.strip() for name in rows[0][1]]
    if len(set(header)) < len(header):
        raise ValueError(f"{path}:1: two columns have the same name")
    cut = rows[-1][0] if not text.endswith("\n") else -1  # a line that is still being written
    table = [(line, row) for line, row in rows[1:] if line != cut or len(row) == len(header)]
    for line, row in table:
        if len(row) != len(header):
            raise ValueError(f"{path}:{line}: {len(row)} columns; the first line has {len(header)}")
    # A column without one number is text, such as the name of the run.
    words = {
        name
        for i, name in enumerate(header)
        if name not in STEP_NAMES and all(_number(row[i]) is None for _, row in table)
    }
    for line, row in table:
        out: dict[str, Any] = {}
        for name, cell in zip(header, row, strict=True):
            if name in words:
                out[name] = cell
            elif cell.strip():
                if (value := _number(cell)) is None:
                    raise ValueError(f"{path}:{line}: {name} is {cell[:40]!r}, no number")
                out[name] = value
        yield _step(path, line, out), out


def _json_lines(path: str, text: str) -> LogRows:
    lines = [(i, x) for i, x in enumerate(text.split("\n"), 1) if x.strip()]
    for line, content in lines:
        row = _object(content)
        if row is None:
            if line == lines[-1][0] and not text.endswith("\n"):
                return  # cut off while it was written
            raise ValueError(f"{path}:{line}: no JSON object")
        yield _step(path, line, row), row


def _object(line: str) -> dict | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _step(path: str, line: int, row: Mapping[str, Any]) -> int:
    name = next((n for n in STEP_NAMES if n in row), None)
    if name is None:
        raise ValueError(f"{path}:{line}: no {STEP_NAMES[0]!r}")
    value = row[name]
    if not _is_number(value) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{path}:{line}: {name} is {str(value)[:40]!r}, no step (0, 1, 2, ...)")
    return int(value)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------------
# Series
# ------------------------------------------------------------------------------------------------


def series(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Series]:
    """LogRows -> tag -> (steps, values). Where a step comes twice (a resumed run) the later value
    counts; null and numbers that are not finite become NaN; text and lists are left out."""
    found: dict[str, dict[int, float]] = {}
    for step, row in rows:
        for tag, value in row.items():
            if tag not in STEP_NAMES and (value is None or _is_number(value)):
                found.setdefault(tag, {})[step] = _finite(value)
    out = {}
    for tag, points in found.items():
        steps = sorted(points)
        out[tag] = np.array(steps, np.int64), np.array([points[s] for s in steps], float)
    return out


def _finite(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
