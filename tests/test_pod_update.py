"""The 32B update, compiled for a pod as benchmarks/pod_update.py does it."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "pod_update.py"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (jax[tpu])"
)
def test_the_32b_update_fits_its_pod(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, SCRIPT, "--only=v5p:4x4x8", "--level=O0", f"--json={out}"]
    subprocess.run(command, check=True, timeout=900)
    (r,) = json.loads(out.read_text())
    assert (r["fsdp"], r["tensor"], r["row_tokens"]) == (16, 8, 22_528)
    state = 12 * 32_763_876_352 / 128  # float32 weights and two moments, a 128th of them a chip
    assert r["arguments"] == pytest.approx(state, rel=0.02)
    assert r["aliased"] == pytest.approx(state, rel=0.001)  # updated in place
    assert r["peak"] <= 10e9 < r["limit"]
    assert 1.2 < r["work_ratio"] <= 1.38
    assert r["splash"] and not r["rematerialized"]
