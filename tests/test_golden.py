"""The runs of tests/golden.py have the bits that this machine had when they were recorded."""

import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_whole_runs_keep_their_bits():
    script = pathlib.Path(__file__).with_name("golden.py")
    done = subprocess.run([sys.executable, script, "check"], capture_output=True, text=True)
    if "no golden entry" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
