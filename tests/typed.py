"""`python tests/typed.py`: commands of the package as they are typed, each in a process of its own.
All is imported once. A request on stdin is a JSON line {folder, line, log}, the answer the code.
"""

import importlib
import json
import os
import runpy
import shlex
import sys

for name in ("begin", "compare", "convert", "evaluate", "experiments.training", "plan", "train"):
    importlib.import_module(f"dapo_jax.{name}")


def main() -> None:
    for request in map(json.loads, sys.stdin):
        if not (pid := os.fork()):
            return child(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def child(folder: str, line: str, log: str) -> None:
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for here, there in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(here, there)
    python, m, module, *arguments = shlex.split(line)
    assert (python, m) == ("python", "-m")
    sys.path[0], sys.argv[1:] = folder, arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
