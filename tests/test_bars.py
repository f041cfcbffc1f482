"""A bar on a terminal, lines in a log."""

import io
import time

from dapo_jax import bars


def drawn(monkeypatch, file, every_s, **options) -> str:
    monkeypatch.setattr(bars.sys, "stderr", file)
    monkeypatch.setattr(bars, "_EVERY_S", every_s)
    with bars.bar(total=5, desc="loading", **options) as bar:
        for _ in range(5):
            time.sleep(0.002)
            bar.update()
    return file.getvalue()


def test_lines_in_a_log_and_nothing_of_what_is_quick(monkeypatch):
    for leave in (True, False):
        said = drawn(monkeypatch, io.StringIO(), 0.001, leave=leave)
        assert "\r" not in said and len(said.splitlines()) >= 4
        assert all(line.startswith("loading: ") and "/5 [" in line for line in said.splitlines())
    assert drawn(monkeypatch, io.StringIO(), 30.0) == ""
    assert drawn(monkeypatch, io.StringIO(), 0.0, show=False) == ""


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    said = drawn(monkeypatch, terminal, 30.0, mininterval=0)
    assert "\rloading: " in said and "5/5" in said
