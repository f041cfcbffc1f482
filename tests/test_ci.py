"""What CI promises of itself: skipped tests are told; its lists name files that are there."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

# As pytest writes them: a test that another stage ran, one that none did, a file that was skipped.
CASE = '<testcase classname="test_a" name="{}">{}</testcase>'
SKIPPED = '<skipped message="needs {}"/>'
WHOLE = """<testcase classname="" name="test_b"><skipped message="collection skipped">
('test_b.py', 1, 'Skipped: no moon tonight')</skipped></testcase>"""
STAGES = {
    "fast": CASE.format("runs", SKIPPED.format("torch")) + CASE.format("x", "")
    + CASE.format("never", SKIPPED.format("libtpu")),
    "peers": CASE.format("runs", ""),
    "whole": WHOLE,
}  # fmt: skip


def told(folder, *flags) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / "skipped.py", folder, *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_skip_that_nothing_explains_is_listed_and_an_error(tmp_path):
    done = told(tmp_path)
    assert done.returncode == 1 and "no results in" in done.stderr  # none are no success
    for stage, cases in STAGES.items():
        (tmp_path / f"{stage}.xml").write_text(f"<testsuite>{cases}</testsuite>")
    done = told(tmp_path)
    assert done.returncode == 0 and "NOT EXPLAINED" not in done.stdout
    assert "needs libtpu: 1 skipped\n    test_a.never\n" in done.stdout
    assert "test_a.runs" not in done.stdout and "2 were skipped in every stage" in done.stdout
    done = told(tmp_path, "--strict", "--explained=libtpu")
    assert done.returncode == 1 and "NOT EXPLAINED: no moon tonight: 1 skipped" in done.stdout
    assert done.stderr == "error: 1 skipped without a reason that this machine explains\n"
    assert told(tmp_path, "--strict", "--explained=libtpu", "--explained=moon").returncode == 0


def test_lists_of_test_files_name_files():
    there = {file.stem for file in (ROOT / "tests").rglob("test_*.py")} | {"faults"}
    text = (ROOT / ".ci" / "run").read_text()
    named = set(re.findall(r'"(test_\w+)"', (ROOT / "tests" / "conftest.py").read_text()))
    named |= set(re.findall(r"(?<!:)\btest_\w+", text))
    assert len(named) > 20 and named <= there
    judges = re.search(r"^judges=\((.*?)^\)", text, re.S | re.M)[1]
    folders = [f for places in re.findall(r'"(.*?):', judges) for f in places.split()]
    assert len(folders) > 20 and all(any(ROOT.glob(f + "*")) for f in folders)
