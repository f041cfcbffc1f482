"""Small files are there whole or not at all; what is damaged in them costs its line."""

import errno
import json
import os
import pathlib

import pytest

from dapo_jax.data import files


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "config.json"
    files.write_json(path, {"a": list(range(100))})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": list(range(100))}
    files.write_json(path, {"b": 1})
    assert json.loads(path.read_text()) == {"b": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    (link := tmp_path / "link").symlink_to("config.json")
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDWR)
    for place in (link, pipe):  # they stay what they are
        files.write(place, "3")
    assert link.is_symlink() and path.read_text() == "3" and os.read(reader, 9) == b"3"
    assert pipe.is_fifo() and len([*tmp_path.iterdir()]) == 3


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/x\.json'"):
        files.write_json(tmp_path / "x.json", {})


def test_lines_that_hold_no_object(tmp_path):
    path = tmp_path / "x.jsonl"
    bad = [b"\x00garbage", b"[1]", b"null", b"[" * 99_999, b"{'a': 1}", b"\xff\xfe", b'{"a": 1']
    path.write_bytes(b'{"a": 0}\n\n' + b"\n".join(bad) + b'\n{"a": NaN}\r\n{"a": 2}\n{"a": 3')
    found = dict(files.json_lines(path))
    assert [n for n, row in found.items() if row is None] == list(range(3, 10))
    assert found[1] == {"a": 0} and found[11] == {"a": 2} and len(found) == 10
    path.write_bytes(b'{"a": 1}\n{"a": 2}')  # whole, though without its end
    assert len(list(files.json_lines(path))) == 2
    path.write_bytes(b"")
    assert list(files.json_lines(path)) == []
