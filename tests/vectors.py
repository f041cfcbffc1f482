"""Do tests that compare floats pass whatever vectors a CPU has, and how near to their bounds?

    python tests/vectors.py                     # each instruction set of SETS, minutes each
    python tests/vectors.py AVX2 -k attention   # some of them; the rest goes to pytest

Runs the fast tests of every file that compares floats, compiled as conftest.py has it, and prints
for each set how they ended and which tests came nearest to a bound: the largest |got - wanted| over
what was allowed there. Bounds above a thousandth of the largest number are not of rounding.
"""

import atexit
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
COMPARES = re.compile(r"assert_allclose|rounding\.|approx\(")
SETS = {
    "SSE4_2": "--xla_cpu_max_isa=SSE4_2",
    "AVX2": "--xla_cpu_max_isa=AVX2",
    "AVX512_256": "--xla_cpu_max_isa=AVX512 --xla_cpu_prefer_vector_width=256",
    "AVX512_512": "--xla_cpu_max_isa=AVX512 --xla_cpu_prefer_vector_width=512",
}
FOLDER = "DAPO_JAX_SHARES"  # where a process of pytest, which loads this file, writes what it saw
_largest = collections.defaultdict(float)  # test -> share of a bound
_approx = pytest.approx


def told(got, want, allowed) -> None:
    try:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        with np.errstate(invalid="ignore"):  # inf less inf
            gap = np.abs(got - want)
    except (TypeError, ValueError):  # no numbers, or another number of them
        return
    if not gap.size or np.max(allowed) > 1e-3 * np.abs(want[np.isfinite(want)]).max(initial=0.0):
        return
    share = np.divide(gap, np.where(gap > 0, allowed, 1.0)).max(initial=0.0, where=np.isfinite(gap))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    _largest[test] = max(_largest[test], float(share))


class Near:
    """`pytest.approx`, which says how much of its bound was needed."""

    __array_ufunc__ = None  # an array leaves the comparison to `__eq__` here

    def __init__(self, want, rel=None, abs=None, nan_ok=False):
        self._near, self._want = _approx(want, rel=rel, abs=abs, nan_ok=nan_ok), want
        self._rel, self._abs = 1e-6 if rel is None and abs is None else rel or 0.0, abs or 1e-12

    def __eq__(self, got):
        try:
            size = self._rel * np.abs(np.asarray(self._want, np.float64))
            told(got, self._want, np.maximum(size, self._abs))
        except (TypeError, ValueError):
            pass
        return self._near == got

    def __repr__(self):
        return repr(self._near)


def watch() -> None:
    """Comparisons of this process are told of, and written when it ends."""
    import rounding

    allclose, near = np.testing.assert_allclose, rounding.assert_near

    def assert_allclose(actual, desired, rtol=1e-7, atol=0.0, **how):
        told(actual, desired, atol + rtol * np.abs(np.asarray(desired, np.float64)))
        allclose(actual, desired, rtol, atol, **how)

    def assert_near(got, expected):
        import jax

        for x, want, far in zip(*map(jax.tree.leaves, (got, *expected)), strict=True):
            told(x, want, far)
        near(got, expected)

    np.testing.assert_allclose, pytest.approx = assert_allclose, Near
    rounding.assert_near = assert_near
    atexit.register(write)


def write() -> None:
    lines = [f"{share} {test}\n" for test, share in _largest.items()]
    (pathlib.Path(os.environ[FOLDER]) / str(os.getpid())).write_text("".join(lines))


def run(name: str, *pytest_arguments: str) -> int:
    """Runs the tests under SETS[name], prints shares of bounds, returns pytest's status."""
    files = [p for p in sorted(TESTS.glob("test_*.py")) if COMPARES.search(p.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {SETS[name]}".strip()
        env = os.environ | {"XLA_FLAGS": flags, FOLDER: folder, "PYTHONPATH": str(TESTS)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "vectors", "-m", "not slow"]
        print(f"{name}:", flush=True)
        command += [*pytest_arguments, *map(str, files)]
        code = subprocess.run(command, env=env, cwd=TESTS.parent).returncode
        lines = [x for p in pathlib.Path(folder).iterdir() for x in p.read_text().splitlines()]
    shares = ((float(share), test) for share, test in (line.split(" ", 1) for line in lines))
    for share, test in sorted(shares, reverse=True)[:8]:
        print(f"  {share:.3f} of a bound in {test}", flush=True)
    return code


if __name__ == "__main__":
    rest = [argument for argument in sys.argv[1:] if argument not in SETS]
    asked = [argument for argument in sys.argv[1:] if argument in SETS]
    sys.exit(max(run(name, *rest) for name in asked or SETS))
elif FOLDER in os.environ:
    watch()
