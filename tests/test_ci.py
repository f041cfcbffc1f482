"""What CI promises of itself: skipped tests are told, a test that hangs fails by name."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

STAGES = {
    "fast": """
def test_runs(): pass
def test_runs_elsewhere(): __import__("pytest").skip("needs torch")
def test_never(): __import__("pytest").skip("needs libtpu")
""",
    "peers": "def test_runs_elsewhere(): pass",
    "whole": "__import__('pytest').skip('no moon tonight', allow_module_level=True)",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of three stages, as pytest writes them; the first two are of the same file."""
    folder = tmp_path_factory.mktemp("ci")
    for stage, text in STAGES.items():
        file = folder / stage / ("test_a.py" if stage != "whole" else "test_b.py")
        file.parent.mkdir()
        file.write_text(text)
        run_pytest(file, f"--junitxml={folder}/{stage}.xml")
    return folder


def run_pytest(file, *flags) -> subprocess.CompletedProcess:
    """With no plugin but that of the limit: to import those that are installed takes a second."""
    command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "-ppytest_timeout"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*command, *flags, file], cwd=file.parent, env=env, capture_output=True, text=True
    )


def told(results, *flags) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / "skipped.py", results, *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_no_stage_ran_is_listed_with_its_reason(results):
    done = told(results)
    assert done.returncode == 0 and "NOT EXPLAINED" not in done.stdout
    assert "needs libtpu: 1 skipped\n    test_a.test_never\n" in done.stdout
    assert "no moon tonight: 1 skipped\n    test_b\n" in done.stdout
    assert "test_runs_elsewhere" not in done.stdout
    assert "2 were skipped in every stage" in done.stdout


def test_a_skip_that_nothing_explains_is_an_error(results):
    done = told(results, "--strict", "--explained=libtpu")
    assert done.returncode == 1 and done.stdout.count("NOT EXPLAINED") == 1
    assert "NOT EXPLAINED: no moon tonight: 1 skipped\n" in done.stdout
    assert done.stderr == "error: 1 skipped without a reason that this machine explains\n"
    assert told(results, "--strict", "--explained=libtpu", "--explained=moon").returncode == 0


def test_no_results_are_no_success(tmp_path):
    done = told(tmp_path)
    assert done.returncode == 1 and "no results in" in done.stderr


def test_lists_of_test_files_name_files():
    """Those that Python 3.12 leaves out, those that are begun first and those soon compiled."""
    there = {file.stem for file in (ROOT / "tests").rglob("test_*.py")}
    once = re.search(r"once=\(\n(.*?)\n\)", (ROOT / ".ci" / "run").read_text(), re.S)[1].split()
    conftest = (ROOT / "tests/conftest.py").read_text()
    listed = lambda name: re.search(rf"^{name} = \((.*?)\)", conftest, re.S | re.M)[1]
    first, soon = (re.findall(r'"(\w+)"', listed(name)) for name in ("LONGEST", "SOON"))
    assert len(once) > 10 and {f"test_{name}" for name in once} < there
    assert len(first) > 10 and set(first) < there
    assert len(soon) > 10 and set(soon) < there


def test_a_test_that_hangs_fails_with_its_stack(tmp_path):
    """By pyproject.toml's own settings, but for the length; the next test still runs."""
    file = tmp_path / "test_hangs.py"
    file.write_text("import time\ndef test_a(): time.sleep(100)\ndef test_b(): pass\n")
    done = run_pytest(file, f"-c{ROOT}/pyproject.toml", f"--rootdir={tmp_path}", "-otimeout=2")
    assert "Timeout (>2.0s)" in done.stdout and "time.sleep(100)" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
