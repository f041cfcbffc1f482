"""A growing log file is kept in a folder of the workdir."""

import pathlib
import socket
import threading

from dapo_jax.hosts import keep_log


def test_the_copy_grows_and_is_whole_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(keep_log, "EVERY_S", 0.02)
    log, folder, ends = tmp_path / "run.log", tmp_path / "w/logs", threading.Event()
    log.write_text("one\n")
    thread = threading.Thread(target=keep_log.keep, args=[log, str(folder), ends])
    thread.start()
    while not list(folder.glob("*.log")):
        thread.join(0.01)
    log.write_text("one\ntwo\n")
    ends.set()
    thread.join(60)
    (copy,) = folder.iterdir()
    assert copy.read_text() == "one\ntwo\n" and copy.name.endswith(f"Z_{socket.gethostname()}.log")


def test_a_bucket_that_fails_is_named_once_and_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keep_log, "EVERY_S", 0.01)
    log, folder, ends = tmp_path / "run.log", tmp_path / "logs", threading.Event()
    log.write_text("one\n")
    folder.write_text("in the way")
    thread = threading.Thread(target=keep_log.keep, args=[log, str(folder), ends])
    tries, read = [], pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: tries.append(path) or read(path))
    thread.start()
    while tries.count(log) < 4:
        thread.join(0.01)
    folder.unlink()
    ends.set()
    thread.join(60)
    assert [p.read_text() for p in folder.iterdir()] == ["one\n"]
    assert capsys.readouterr().err.count("not written") == 1
