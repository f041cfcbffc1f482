"""One-line mistakes in the algorithm, the sampler and the resume that a named test must find.

    python tests/mutants.py [--only=WORDS] [--jobs=2]

Copies the repository to a temporary folder (one per job), puts one mistake of mutants.toml after
the other into the copy, runs the test named there, and prints what lived: exit status 1 if anything
did. The tests are run once without a mistake first, since a test that fails anyway kills nothing.
`test_mutants.py` sees to it that every line is still there. The count is in docs/results/safety.md.

    python tests/mutants.py --generated=400 [--only=dapo/] [--seed=0]

takes instead so many that generated_mutants.py makes of operators and numbers, in turn from each
file that mutants.toml has judges for, but for those that it knows to live; --only: the files of
these that have this in their names.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import queue
import shutil
import signal
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from typing import NamedTuple

import conftest  # noqa: F401  (its environment: the compiled programs that tests keep)
import generated_mutants
import typed

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ("dapo_jax", "tests", "configs", "benchmarks", "docs", "pyproject.toml", "README.md")
TABLES = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())


class Mutant(NamedTuple):
    file: str  # of the package
    old: str  # occurs in it once
    new: str
    test: str  # of tests/; kills it


MUTANTS = [Mutant(file, **m) for file, of in TABLES["mutant"].items() for m in of]
JUDGES: dict[str, list[str]] = TABLES["judges"]  # file -> tests, of those made by machine


class Case(NamedTuple):
    """A mistake to judge: a file's text with it, and the tests that may find it."""

    file: str
    text: bytes
    tests: Sequence[str]
    shown: str  # what is printed of it where it lives


def copy(to: pathlib.Path) -> pathlib.Path:
    to.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to)
    return to


shell_of = functools.cache(lambda root: typed.Shell())  # one process at a time in a copy
# Byte code is of the files without a mistake: two mutants may have one size and one time.
PYTEST = """
import os, sys, pytest
os.setsid()
sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
sys.exit(pytest.main(sys.argv[1:]))
"""


def pytest(root: pathlib.Path, tests: Sequence[str], *flags: str, **env: str) -> tuple[int, str]:
    """Its exit status and what it said."""
    command = ["-q", "-n0", "-p", "no:cacheprovider", "-rfE", "--timeout=600"]
    command += ["--timeout-method=thread", *flags]  # ends the process: hypothesis would try again
    command += [f"tests/{test}" for test in tests]
    env["PYTHONPATH"] = str(root)
    with tempfile.NamedTemporaryFile("r") as said:
        how = dict(cwd=root, logs=[said.name] * 2, env=env)
        process = shell_of(root).start("-c", PYTEST, *command, **how)
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):  # what a mistake has let live
            os.killpg(process.pid, signal.SIGKILL)
        return code, said.read()


def broken(tests: list[str], root: pathlib.Path, *flags: str) -> list[str]:
    """Tests that do not pass without a mutant."""
    status, said = pytest(root, tests, *flags)
    if status not in (0, 1):
        sys.exit(f"error: pytest's exit status {status}\n{said[-2000:]}")
    named = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [t for t in tests if any(f" tests/{t}" in line for line in named)]


def verdict(case: Case, root: pathlib.Path, *flags: str) -> str:
    """'killed', 'survived', or what else became of the tests."""
    file = root / "dapo_jax" / case.file
    text = file.read_bytes()
    file.write_bytes(case.text)
    try:
        status, said = pytest(root, case.tests, "-x", *flags, PYTHONDONTWRITEBYTECODE="1")
    finally:
        file.write_bytes(text)
    # 2 and 4: the file cannot even be imported, as a test or a test by name asks for it
    known = {0: "survived"} | dict.fromkeys((1, 2, 4), "killed")
    return known.get(status, f"exit status {status}: {said[-300:]}")


def by_hand(only: str) -> list[Case]:
    found = []
    for m in MUTANTS:
        text = (ROOT / "dapo_jax" / m.file).read_text()
        if only in " ".join(m):
            shown, changed = f"{m.file}: {m.old!r} -> {m.new!r}", text.replace(m.old, m.new)
            found.append(Case(m.file, changed.encode(), [m.test], shown))
    return found


def by_machine(only: str, number: int, seed: int) -> list[Case]:
    known = {(file, x["line"]) for file, of in TABLES["survivor"].items() for x in of}
    drawn = generated_mutants.drawn(ROOT, JUDGES, number, seed)
    drawn = [m for m in drawn if only in m.place]
    found = [m for m in drawn if (m.file, m.after) not in known]
    print(f"{len(drawn)} drawn, {len(drawn) - len(found)} of them known to live", flush=True)
    shown = "{0.file}: {0.before} -> {0.after}".format
    return [Case(m.file, m.text.encode(), JUDGES[m.place], shown(m)) for m in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose file, line or test has this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--generated", type=int, default=0, help="so many that are made by machine")
    parser.add_argument("--seed", type=int, default=0, help="which those are")
    args = parser.parse_args()
    if args.generated:
        cases = by_machine(args.only, args.generated, args.seed)
    else:
        cases = by_hand(args.only)
    if not cases:
        parser.error(f"--only={args.only}: no mutants")
    flags = ("-m", "not nightly", "--timeout=120") if args.generated else ()
    with tempfile.TemporaryDirectory() as folder:
        roots = queue.SimpleQueue()
        for i in range(args.jobs):
            roots.put(copy(pathlib.Path(folder, str(i))))

        def judged(case: Case) -> str:
            root = roots.get()
            try:
                return verdict(case, root, *flags)
            finally:
                roots.put(root)

        tests = list(dict.fromkeys(t for c in cases for t in c.tests))
        already = broken(tests, pathlib.Path(folder, "0"), *flags)
        for test in already:
            print(f"fails without a mutant: {test}", flush=True)
        good, killed = [c for c in cases if not {*c.tests} & {*already}], 0
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            for done, (case, result) in enumerate(zip(good, pool.map(judged, good), strict=True)):
                if done and done % 25 == 0:
                    print(f"{done} of {len(good)} judged, {killed} killed", flush=True)
                killed += result == "killed"
                if result != "killed":
                    print(f"{case.shown}\n    {' '.join(case.tests)}: {result}", flush=True)
    print(f"killed {killed} of {len(cases)}")
    return int(killed < len(cases))


if __name__ == "__main__":
    sys.exit(main())
