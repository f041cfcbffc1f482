"""Rows of files as they are: parquet, JSON lines, JSON and CSV, by path, pattern or hub name.

    mine.jsonl   data/*.parquet   openai/gsm8k:main/train-*   OWNER/NAME@REVISION:FILE

Text files may be compressed (.gz). A name OWNER/NAME that is no file here is a data set of the
Hugging Face hub; its files are downloaded once and then found in the hub's cache. Behind the colon
stands which of them, as a pattern; it may be left out where there is one alone.
"""

import csv
import difflib
import fnmatch
import glob
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

from dapo_jax import bars, gate

SUFFIXES = (".parquet", *(kind + gz for kind in (".jsonl", ".json", ".csv") for gz in ("", ".gz")))
BAR = dict(delay=2, leave=False, unit_scale=True)  # a progress bar, if it takes more than 2 s
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::(.+))?")

Row = bytes | dict | list | Exception  # an undecoded line; a row; what a bad one raises


class Foreign(ValueError):
    """The whole file is refused; the message names it."""


class BadRow(ValueError):
    """One row is refused. Arguments: field, value, reason."""


# ------------------------------------------------------------------------------------------------
# Which files
# ------------------------------------------------------------------------------------------------


def find(name: str | Path) -> list[Path]:
    """The files that a name stands for. ValueError: a pattern without a file, a data set of the
    hub that cannot be had or of which it is not said which files."""
    name = str(name)
    if is_hub(name):
        return _from_hub(name, *_HUB.fullmatch(name).groups())
    path = Path(name).expanduser()
    if glob.has_magic(name) and not path.exists():
        if found := sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file()):
            return [Path(p) for p in found]
        raise ValueError(f"{name}: no file of that pattern")
    return [path]


def is_hub(name: str) -> bool:
    """Whether a name is that of a data set of the hub: of its form, and no file here."""
    match = _HUB.fullmatch(name)
    if not match or name.startswith((".", "~")):
        return False
    plain = not match[3] and name.endswith(SUFFIXES)
    return not plain and not Path(name).exists()


def _from_hub(name: str, repo: str, revision: str | None, pattern: str | None) -> list[Path]:
    import huggingface_hub  # here: reading local files needs no network's library

    about = dict(repo_id=repo, repo_type="dataset", revision=revision)
    with gate.reading(name, what="no such file, and not to be had as a data set of the hub"):
        if pattern and not glob.has_magic(pattern):  # found in the cache without a network
            return [Path(huggingface_hub.hf_hub_download(filename=pattern, **about))]
        every = huggingface_hub.HfApi().list_repo_files(**about)
    files = sorted(f for f in every if f.endswith(SUFFIXES))
    chosen = [f for f in files if fnmatch.fnmatchcase(f, pattern)] if pattern else files
    if not chosen or (len(chosen) > 1 and not pattern):
        raise ValueError(
            f"{name}: say which file, as {repo}:FILE or {repo}:PATTERN; the data set has"
            f" {', '.join(files)[:500] or 'none that can be read'}"
        )
    with gate.reading(name):
        return [Path(huggingface_hub.hf_hub_download(filename=f, **about)) for f in chosen]


def _nearest(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    names = sorted(p.name for p in folder.glob("*") if p.name.endswith(SUFFIXES))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.3) or names[:3]
    return f"; near it: {', '.join(str(folder / n) for n in near)}" if near else ""


# ------------------------------------------------------------------------------------------------
# Their rows
# ------------------------------------------------------------------------------------------------


def read(path: Path, wanted) -> Iterator[tuple[int, Row]]:
    """(row number from 1; in json lines and CSV that of the line, row). wanted: is given the names
    of the columns of a parquet file and returns those to read; raises `Foreign` to refuse it."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}{_nearest(path)}")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: not a problem file; expected {', '.join(SUFFIXES)}")
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    number = 0
    try:
        readers = {"jsonl": _jsonl, "json": _json, "csv": _csv}
        for number, row in readers[kind](path) if kind in readers else _parquet(path, wanted):
            yield number, row
    except Foreign:
        raise
    except Exception as e:  # of pyarrow, gzip, the system: what a damaged file raises is anybody's
        after = f" after row {number}" if number else ""
        raise ValueError(
            f"{path}: cannot be read{after}, is it damaged or cut short? {gate.describe(e)}"
        ) from e


def _lines(path: Path) -> Iterator[bytes]:
    bar = bars.bar(total=path.stat().st_size, desc=path.name, unit="B", **BAR)
    with open(path, "rb") as raw, bar:
        for line in gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw:
            bar.update(raw.tell() - bar.n)
            yield line


def _jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, line


def _json(path: Path) -> Iterator[tuple[int, Row]]:
    """A list of rows, or an object that holds one."""
    try:
        value = json.loads(b"".join(_lines(path)).decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise Foreign(f"{path}: not valid JSON: {gate.describe(e)}") from e
    lists = [v for v in value.values() if isinstance(v, list)] if isinstance(value, dict) else []
    if len(lists) == 1:
        value = lists[0]
    if not isinstance(value, list):
        raise Foreign(f"{path}: expected a list of rows, or an object that holds one list")
    yield from enumerate(value, 1)


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    text = io.StringIO(b"".join(_lines(path)).decode("utf-8-sig"), newline="")
    csv.field_size_limit(2**31 - 1)
    rows = csv.DictReader(text, strict=True)
    for row in rows:
        if None in row or None in row.values():
            row = ValueError(f"has not the {len(rows.fieldnames)} fields of the first line")
        yield rows.line_num, row


def _parquet(path: Path, wanted) -> Iterator[tuple[int, Row]]:
    import pyarrow.parquet as pq  # here: text files need it not

    with pq.ParquetFile(path) as file:
        columns = wanted(file.schema_arrow.names)
        # Only what is needed, a few thousand rows at a time: DAPO-Math-17k has 1.79M of them.
        rows = (row for batch in file.iter_batches(4096, columns=columns) for row in _dicts(batch))
        bar = bars.bar(rows, desc=path.name, total=file.metadata.num_rows, unit="row", **BAR)
        yield from enumerate(bar, 1)


def _dicts(batch) -> Iterator[dict | Exception]:
    """The rows of a pyarrow.RecordBatch; where one holds what Python has no value for (the year
    5,881,580), its error."""
    try:
        yield from batch.to_pylist()
    except Exception:
        for i in range(batch.num_rows):
            try:
                row = batch.slice(i, 1).to_pylist()[0]
            except Exception as e:
                row = e
            yield row
