"""A short chaos run, of each kind of event one: nobody helps, and the same bits come out."""

import pathlib
import re
import subprocess
import sys

import pytest

BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/chaos.py"


@pytest.mark.slow
def test_of_everything_that_happens_on_spot_machines_one(tmp_path, request):
    events = ("preemptions", "kills", "hangs", "bucket_failures")
    seed = f"--seed={request.config.getoption('--kill_seed')}"
    command = [sys.executable, BENCHMARK, "--steps=3", *(f"--{e}=1" for e in events), seed]
    done = subprocess.run(
        [*command, f"--keep={tmp_path / 'chaos'}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the same bits as the run left alone\n")
    for kind in ("preemption", "kill", "hang"):
        assert f"| {kind} | 1 |" in done.stdout, done.stdout
    assert re.search(r"bucket that fails \([1-9]", done.stdout), done.stdout
