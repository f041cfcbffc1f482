"""Small files: atomic writes, and JSON lines that are read even if some are damaged."""

import itertools
import json
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Any


def write(path: pathlib.Path, content: str | bytes) -> None:
    """A reader sees the old file or the new one, never a part, also while other processes write it.
    Links stay; devices and pipes are written to. OSError: with the path. ValueError: no file's."""
    if not path.name:
        raise ValueError(f"{path}: is a folder; name a file")
    # Half a surrogate pair becomes the escape that JSON has for it.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    target = pathlib.Path(os.path.realpath(path))
    draft = target.with_name(f"{target.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            draft.write_bytes(data)
            draft.replace(target)
    except OSError as error:  # the error of a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def unused(path, between: str = "."):
    """`path`, of a disk or a bucket, or the first of path.2, path.3, ... that is not there yet.
    between: what stands before the number."""
    names = (path.name + f"{between}{n}" * (n > 1) for n in itertools.count(1))
    return next(p for p in map(path.with_name, names) if not p.exists())


def write_json(path: pathlib.Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2) + "\n")


def json_lines(path: pathlib.Path) -> Iterator[tuple[int, dict | None]]:
    """(line number from 1, its JSON object or None if it has none) for each line that is not empty.
    A last line that was cut off while it was written is left out."""
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, last], 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield number, value
            elif number <= len(lines):
                yield number, None
