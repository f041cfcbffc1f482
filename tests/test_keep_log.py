"""A growing log file is kept in a folder of the workdir."""

import pathlib
import socket
import threading

import pytest

from dapo_jax.hosts import keep_log


@pytest.mark.parametrize("failing", [False, True])
def test_the_copy_grows_and_a_failure_is_named_once(failing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keep_log, "EVERY_S", 0.02)
    log, folder, ends = tmp_path / "run.log", tmp_path / "logs", threading.Event()
    log.write_text("one\n")
    if failing:
        folder.write_text("in the way")
    tries, read = [], pathlib.Path.read_bytes
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: tries.append(path) or read(path))
    thread = threading.Thread(target=keep_log.keep, args=[log, str(folder), ends])
    thread.start()
    while tries.count(log) < 4 or not (failing or list(folder.glob("*.log"))):
        thread.join(0.01)
    if failing:
        folder.unlink()
    log.write_text("one\ntwo\n")
    ends.set()
    thread.join(60)
    (copy,) = folder.iterdir()
    assert copy.read_text() == "one\ntwo\n" and copy.name.endswith(f"Z_{socket.gethostname()}.log")
    assert capsys.readouterr().err.count("not written") == failing
