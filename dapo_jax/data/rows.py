"""Raw rows of parquet, JSON lines, JSON and CSV files, found by path, pattern or hub name.

    mine.jsonl   data/*.parquet   openai/gsm8k:main/train-*   OWNER/NAME@REVISION:FILE
    verifiers:ID, tinker:MODULE:NAME (environments.py)

Text files may be compressed (.gz). A name OWNER/NAME that is no local file is the hub's (hub.py).
"""

import csv
import difflib
import glob
import gzip
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo_jax import gate
from dapo_jax.data import environments, hub

SUFFIXES = (".parquet", *(kind + gz for kind in (".jsonl", ".json", ".csv") for gz in ("", ".gz")))
BAR = dict(delay=2, leave=False, unit_scale=True)  # a progress bar, if it takes more than 2 s

Row = bytes | dict | list | Exception  # an undecoded line; a row; the error of a bad row


class Foreign(ValueError):
    """The whole file is refused; the message names it."""


class BadRow(ValueError):
    """One row is refused. Arguments: field, value, reason."""


def require_text(field: str, value: object, text: str) -> None:
    """BadRow: no file can hold `text`, a part of the value."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise BadRow(field, value, "holds half of a surrogate pair, which is not text") from e


def entry(text: str) -> tuple[str, str]:
    """(name, path) of NAME=PATH, else ("", path): behind a slash an = is the path's own."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and "/" not in name else ("", text)


def find(name: str | Path) -> list[Path]:
    """The files that a name stands for. ValueError: no file matches the pattern; as `hub.fetch`."""
    name = str(name)
    if name.startswith(environments.PREFIX):
        return [environments.rows(name)]
    if hub.named(name, SUFFIXES):
        return hub.fetch(name, SUFFIXES)
    path = Path(os.path.expanduser(name))
    if glob.has_magic(name) and not path.exists():
        if found := sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file()):
            return [Path(p) for p in found]
        raise ValueError(f"{name}: no file of that pattern")
    return [path]


def read(path: Path, wanted: Callable, needs: str) -> Iterator[tuple[int, Row]]:
    """Yields (row number from 1, row); in JSON lines and CSV the number is that of the line.

    wanted: maps the column names of a parquet file to those to read; none: the file is refused,
      since it lacks what `needs` says.
    ValueError: no such file, another kind of file, a damaged file."""
    if not path.is_file():
        what, folder = ("a folder", path) if path.is_dir() else ("no such file", path.parent)
        names = sorted(p.name for p in folder.glob("*") if p.name.endswith(SUFFIXES))
        near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.3) or names[:3]
        what += f"; near it: {', '.join(str(folder / n) for n in near)}" if near else ""
        raise ValueError(f"{path}: {what}")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: not a problem file; expected {', '.join(SUFFIXES)}")
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    number = 0
    try:
        jsonl = lambda path: ((n, line) for n, line in enumerate(_lines(path), 1) if line.strip())
        readers = {"jsonl": jsonl, "json": _json, "csv": _csv}
        found = readers[kind](path) if kind in readers else _parquet(path, wanted, needs)
        for number, row in found:
            yield number, row
    except Foreign:
        raise
    except Exception as e:  # pyarrow, gzip and the system each raise errors of their own
        after = f" after row {number}" if number else ""
        why = f"is it damaged or cut short? {gate.describe(e)}"
        raise ValueError(f"{path}: cannot be read{after}, {why}") from e


def _lines(path: Path) -> Iterator[bytes]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
        yield from lines


def parse(data: bytes) -> Any:
    """The JSON value of UTF-8 text. ValueError, RecursionError: none, or two fields of one name."""
    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if name := _twice([name for name, _ in pairs]):
        raise ValueError(f"two fields have the name {name}")
    return dict(pairs)


def _json(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows of a JSON list, or of the only list in a JSON object."""
    try:
        value = parse(b"".join(_lines(path)))
    except (ValueError, RecursionError) as e:
        lines = "; call a file with a row on each line .jsonl" * ("Extra data" in str(e))
        raise Foreign(f"{path}: not valid JSON: {gate.describe(e)}{lines}") from e
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
    _once(path, rows.fieldnames or ())
    for row in rows:
        if None in row or None in row.values():
            row = ValueError(f"does not have the {len(rows.fieldnames)} fields of the first line")
        yield rows.line_num, row


def _once(path: Path, names: Sequence[str]) -> None:
    if name := _twice(names):
        raise Foreign(f"{path}: two columns have the name {name}; rename one of them")


def _twice(names: Sequence[str]) -> str:
    """A name that stands twice, in quotes; '' if there is none."""
    once = len(set(names)) == len(names)
    return "" if once else f"{Counter(names).most_common(1)[0][0]!r:.80}"


def _parquet(path: Path, wanted, needs: str) -> Iterator[tuple[int, Row]]:
    import pyarrow.parquet as pq  # not needed for text files

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _once(path, names)
        if not (columns := wanted(names)):
            raise Foreign(f"{path}: has the columns {', '.join(names)[:300]}; {needs}")
        # Only what is needed, a few thousand rows at a time: DAPO-Math-17k has 1.79M of them.
        batches = file.iter_batches(4096, columns=columns)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
