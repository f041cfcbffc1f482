"""What CI promises of itself: skipped tests are told; its lists name files that are there."""

import re
import subprocess
import sys

from scripts import ROOT, bash

# As pytest writes them: a test that another stage ran, one that none did, a file that was skipped.
FAST = """<suite><testcase name="ran"><skipped message="needs torch"/></testcase>
<testcase name="never"><skipped message="needs libtpu"/></testcase></suite>"""
PEERS = """<suite><testcase name="ran"/><testcase name="b"><skipped message="collection skipped">
('test_b.py', 1, 'Skipped: no moon tonight')</skipped></testcase></suite>"""


def test_a_skip_that_nothing_explains_is_an_error(tmp_path):
    script = [sys.executable, ROOT / ".ci" / "skipped.py", tmp_path, "--strict"]
    told = lambda *flags: subprocess.run([*script, *flags], capture_output=True, text=True)
    assert "no results in" in told().stderr  # none are no success
    (tmp_path / "fast.xml").write_text(FAST)
    (tmp_path / "peers.xml").write_text(PEERS)
    done = told("--explained=libtpu")
    assert done.returncode == 1 and "NOT EXPLAINED: no moon tonight: 1 skipped" in done.stdout
    assert done.stdout.startswith("needs libtpu: 1 skipped\n    never\nNOT EXPLAINED")
    assert told("--explained=libtpu", "--explained=moon").returncode == 0


def test_what_differs_is_judged_by_its_own_slow_tests():
    """A file that no list names by all of them; where nothing differs there is nothing to judge."""
    judges = re.search(r"^judges=\(.*?^}$", (ROOT / ".ci/run").read_text(), re.S | re.M)[0]
    ask = f'{judges}\nfor file in "$@"; do echo "$(slow_tests_of "$file")."; done'
    files = ("", "tests/test_ci.py", "dapo_jax/convert.py", "odd")
    said = bash("-euc", ask, "-", *files).stdout.splitlines()
    assert said == [".", "test_ci.py.", " test_pages test_lora test_export.", "all."]


def test_lists_of_test_files_name_files():
    there = {file.stem for file in (ROOT / "tests").rglob("test_*.py")} | {"faults"}
    text = (ROOT / ".ci" / "run").read_text()
    named = set(re.findall(r'"(test_\w+)"', (ROOT / "tests" / "conftest.py").read_text()))
    named |= set(re.findall(r"(?<!:)\btest_\w+", text))
    assert len(named) > 20 and named <= there
    for file, name in re.findall(r"(tests/\w+\.py)::(\w+)", text):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
    judges = re.search(r"^judges=\((.*?)^\)", text, re.S | re.M)[1]
    folders = [f for places in re.findall(r'"(.*?):', judges) for f in places.split()]
    assert len(folders) > 20 and all(any(ROOT.glob(f + "*")) for f in folders)
