"""Tables of cases, JSON lines in tests/data; and files of rows as users have them."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq


def cases(name: str) -> list[dict]:
    """The rows of tests/data/NAME.jsonl."""
    file = Path(__file__).parent / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in file.open(encoding="utf-8")]


def write_rows(path: Path, rows: list) -> Path:
    """Rows as jsonl, json, csv, one of them with .gz, or parquet, by the name's end. A row given as
    bytes stands in a jsonl file as it is."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if kind == "csv":
        pyarrow.csv.write_csv(pa.Table.from_pylist(rows), text := io.BytesIO())
        data = text.getvalue()
    elif kind == "json":
        data = json.dumps(rows).encode()
    else:
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        data = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
