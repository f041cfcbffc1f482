"""Commands of the package as they are typed, each in a process of its own: `Shell`.

The libraries are imported once, by `python tests/typed.py`, which makes each process by a fork; the
package is imported by each command. A request on its stdin is a JSON line, and so is the answer: of
a command its process, of a process its exit code.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.metadata
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

# What takes longest of what the commands import, and reads nothing of a request's environment.
LIBRARIES = (
    "jax", "jax.experimental.multihost_utils", "jax.experimental.pallas.ops.tpu.splash_attention",
    "absl.app", "flax.nnx", "optax", "orbax.checkpoint", "tokenizers", "tqdm",
    "jinja2", "pyarrow.parquet", "matplotlib.figure", "scipy.ndimage", "scipy.stats",
)  # fmt: skip

# For runs of a few steps that are compared with each other, as whole as a machine's faults leave
# them: compiled in a third of the time. What numbers the compiler's own level makes is for other
# tests.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no other emitters
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
SOON = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
ROOT = str(pathlib.Path(__file__).resolve().parents[1])


class Shell:
    """Starts nothing before the first command; `close` ends it. program: what `serve`s; env: its
    environment, beside os.environ."""

    _server: subprocess.Popen | None = None

    def __init__(self, program: str | pathlib.Path = __file__, **env: str):
        self._program, self._env = program, env

    def python(self, *arguments, cwd=".", **env: str) -> subprocess.CompletedProcess:
        """`python ARGUMENTS`, as `start` reads them, to its end."""
        with tempfile.TemporaryDirectory() as folder:
            logs = [pathlib.Path(folder, name) for name in ("stdout", "stderr")]
            process = self.start(*arguments, cwd=cwd, logs=logs, env=env)
            process.communicate()
            said = [log.read_text() for log in logs]
            return subprocess.CompletedProcess(arguments, process.returncode, *said)

    def start(self, *arguments, logs, cwd=".", env) -> "Process":
        """Begin `python ARGUMENTS`, of the form -m MODULE ..., -c CODE ... or FILE ...; logs: what
        gets stdout and stderr; env: beside os.environ, with the repository on PYTHONPATH. JAX reads
        of it on import, but for where programs are kept and the number of CPU devices, what it is
        at the first command."""
        request = {"arguments": [*map(str, arguments)], "folder": os.path.abspath(cwd)}
        request |= {"env": os.environ | {"PYTHONPATH": ROOT} | env, "logs": [*map(str, logs)]}
        return Process(self, self.ask(request), logs)

    def ask(self, request: dict):
        """The server's answer to what `serve` hands on, or to what reaps a process of it."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, self._program], env=os.environ | self._env,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


class Process:
    """As subprocess.Popen has it, of a child of the server; `communicate` reads the first log."""

    returncode: int | None = None

    def __init__(self, shell: Shell, pid: int, logs: list[pathlib.Path]):
        self.pid, self._shell, self._logs = pid, shell, logs

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            self.returncode = self._shell.ask({"reap": self.pid, "how": how})
        return self.returncode

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        return self._reap(0)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = float("inf")) -> tuple[str, None]:
        """What it and its own children said, once all of them are done with the logs.
        TimeoutExpired: they are not after so many seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None or any(map(_is_open, self._logs)):
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return self._logs[0].read_text(), None


def _is_open(log: pathlib.Path) -> bool:
    """Whether a descriptor that `become` opened, or a child's copy of it, is there still."""
    with log.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def serve(become: Callable[..., None]) -> None:
    """Fork a process that does `become(**request)` for each request but those that reap one."""
    gc.collect()
    gc.freeze()  # no process walks what all of them share
    for request in map(json.loads, sys.stdin):
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], request["how"])
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif not (answer := os.fork()):
            with ended():
                become(**request)
        print(json.dumps(answer), flush=True)


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
    new = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # of both, where they are one file
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, log in enumerate(logs, 1):
        os.dup2(os.open(log, new, 0o600), descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # until its last copy is closed: `_is_open`
    jax = importlib.import_module("jax")
    jax.config.update("jax_compilation_cache_dir", env.get("JAX_COMPILATION_CACHE_DIR") or None)
    if devices := env.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(devices))
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
    serve(become)
