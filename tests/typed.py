"""Commands of the package as they are typed, each in a process of its own: `Shell`.

The libraries are imported once, by `python tests/typed.py`, which makes each process by a fork; the
package is imported by each command. A request on its stdin is a JSON line, the answer the code.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import threading

# What takes longest of what the commands import, and reads nothing of a request's environment.
LIBRARIES = (
    "jax", "jax.experimental.multihost_utils", "jax.experimental.pallas.ops.tpu.splash_attention",
    "absl.app", "flax.nnx", "ml_collections", "optax", "orbax.checkpoint", "tokenizers", "tqdm",
    "jinja2", "pyarrow.parquet", "matplotlib.figure", "scipy.ndimage", "scipy.stats",
)  # fmt: skip


ROOT = str(pathlib.Path(__file__).resolve().parents[1])


class Shell:
    """Starts nothing before the first command; `close` ends it."""

    _server: subprocess.Popen | None = None

    def python(self, *arguments, cwd=".", **env: str) -> subprocess.CompletedProcess:
        """`python ARGUMENTS`, of the form -m MODULE ..., -c CODE ... or FILE ...; env: beside
        os.environ, with the repository on PYTHONPATH. JAX reads of it on import what it is at the
        first command."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        with tempfile.TemporaryDirectory() as folder:
            logs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
            request = {"arguments": [*map(str, arguments)], "folder": os.path.abspath(cwd)}
            env = os.environ | {"PYTHONPATH": ROOT} | env
            request |= {"env": env, "logs": [*map(str, logs)]}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, *(p.read_text() for p in logs))

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


def serve() -> None:
    for request in map(json.loads, sys.stdin):
        if not (pid := os.fork()):
            with ended():
                become(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


@contextlib.contextmanager
def ended():
    """The process ends here as it would by itself, but for what takes longest and nobody sees: all
    libraries being taken down again."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(arguments: list[str], folder: str, env: dict[str, str], logs: list[str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, log in enumerate(logs, 1):
        os.dup2(os.open(log, new, 0o600), descriptor)
    sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)
    sys.path[0] = folder
    how, *rest = arguments
    if how == "-m":
        sys.argv[1:] = rest[1:]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = [how, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.path[0], sys.argv = os.path.dirname(how), arguments
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no process walks what all of them share
    serve()
