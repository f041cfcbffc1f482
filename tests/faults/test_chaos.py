"""A short chaos run, of each kind of event one: nobody helps, and the same bits come out."""

import os
import re
import subprocess
import sys

import pytest
import typed
from scripts import ROOT


@pytest.mark.slow
@pytest.mark.nightly  # test_several and test_launch_cluster have each event alone
def test_of_everything_that_happens_on_spot_machines_one(tmp_path, request):
    events = ("preemptions", "kills", "hangs", "bucket_failures")
    command = [sys.executable, "-m", "benchmarks", "chaos", "--steps=8"]
    command += [f"--{e}=1" for e in events]
    wanted = [rf"^{kind}   1   " for kind in ("preemption", "kill", "hang")]
    wanted += [r"bucket that fails \([1-9]"]
    for attempt in range(5):  # a run may be at its end before the last moment has come
        seed = request.config.getoption("--kill_seed") + attempt
        keep = f"--keep={tmp_path / f'chaos_{attempt}'}"
        done = subprocess.run(
            [*command, f"--seed={seed}", keep],
            cwd=ROOT, env=os.environ | {"XLA_FLAGS": typed.SOON}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("The same bits as the run left alone.\n")
        if all(re.search(what, done.stdout, re.M) for what in wanted):
            return
    pytest.fail(done.stdout)
