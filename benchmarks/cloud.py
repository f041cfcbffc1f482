"""A cloud in a folder, for chaos.py: hosts whose trainings are real processes, a gcloud, a bucket.

CLOUD/request and node_K are Cloud's states, host_K_W the home folder of host W of slice K, b/ is
gs://b. The hosts' python (stand_ins/client) is a client of `serve`, which has imported all and
forks a process for each training; that process dies with the client, as the client with its host.
CLOUD/pid_I is the training of process I, CLOUD/life_I.jsonl what it does.
"""

import functools
import hashlib
import json
import os
import pathlib
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAND_INS = ROOT / "benchmarks" / "stand_ins"
SLICES, HOSTS = 2, 2


def build(cloud: pathlib.Path) -> dict[str, str]:
    """Make the cloud and its tools; the environment of launch/tpu_vm.sh there."""
    tools = cloud / "tools"
    tools.mkdir(parents=True)
    (cloud / "b").mkdir()
    for tool in ("gcloud", "uv"):
        shutil.copy(STAND_INS / tool, tools)
    client = (STAND_INS / "client").read_text()
    (tools / "client").write_text(f"#!{sys.executable} -ISu\n{client}")
    (tools / "client").chmod(0o755)
    return os.environ | {
        "CLOUD": str(cloud),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "DAPO_POLL_SECONDS": "0.2",
        "DAPO_TPU_PYTHON": "{}.{}".format(*sys.version_info),
    }


def serve(cloud: pathlib.Path, port: int) -> None:
    """Fork a training for each client that comes, until standard input closes. One thread: nothing
    of JAX may run before a fork."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(cloud / "socket"))
    listening.listen()
    chosen, running = selectors.DefaultSelector(), {}  # pid -> its client
    for what in (listening, sys.stdin):
        chosen.register(what, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for ready, _ in chosen.select(0.05):
            if ready.fileobj is sys.stdin:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            if ready.fileobj is listening:
                client, _ = listening.accept()
                data, files, _, _ = socket.recv_fds(client, 1 << 16, 2)
                pid = os.fork()
                if not pid:
                    _train(cloud, port, json.loads(data), files)
                for file in files:
                    os.close(file)
                running[pid] = client
                chosen.register(client, selectors.EVENT_READ, pid)
                client.send(str(pid).encode())
            else:  # a client says nothing: it is gone
                chosen.unregister(ready.fileobj)
                os.kill(ready.data, signal.SIGKILL)
        for pid, client in list(running.items()):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                del running[pid]
                if client in chosen.get_map():
                    chosen.unregister(client)
                    client.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
                client.close()


class Unreachable(Exception):
    """As gcsfs raises a 503."""


Unreachable.__module__ = "gcsfs.retry"


class Failing:
    """Makes some operations on the bucket, or restores of a checkpoint, fail, several in a row."""

    def __init__(self, note: pathlib.Path, tell):
        self._skip, self._left = -1, 0
        if note.exists():
            self._skip, self._left = map(int, note.read_text().split())
            note.unlink()
        self._restores, self._tell = self._left, tell

    def operation(self) -> None:
        self._skip -= 1
        if self._skip < 0 < self._left:
            self._left -= 1
            self._tell("failed", of="bucket")
            raise Unreachable("503: the bucket is away")

    def restore(self) -> None:
        if self._restores > 0:
            self._restores -= 1
            self._tell("failed", of="restore")
            raise OSError(5, "Input/output error")


def _train(cloud: pathlib.Path, port: int, request: dict, files: list[int]) -> None:
    """In the forked process; never returns."""
    import jax
    import stubbed_train
    import typed

    from dapo_jax import train
    from dapo_jax.checkpoint import remembered, seal
    from dapo_jax.config import cli
    from dapo_jax.rollout import engine

    for here, there in ((os.open(os.devnull, os.O_RDONLY), 0), (files[0], 1), (files[1], 2)):
        os.dup2(here, there)
    os.closerange(3, 1 << 12)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _, k, w = request["host"].split("_")
    index, drawn = int(k) * HOSTS + int(w), 0
    (cloud / f"pid_{index}").write_text(str(os.getpid()))
    life = os.open(cloud / f"life_{index}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(what: str, **more) -> None:
        row = {"time": time.time(), "pid": os.getpid(), "what": what, "drawn": drawn} | more
        os.write(life, (json.dumps(row) + "\n").encode())

    failing = Failing(cloud / f"fail_{index}", tell)
    _place_bucket(cloud / "b", failing)
    generate, keep = engine.Engine.generate, remembered.Responses.put

    def counted(self, *arguments, **named):
        def on_tokens(index, start, tokens, logps) -> None:
            nonlocal drawn
            drawn += len(tokens)

        return generate(self, *arguments, on_tokens=on_tokens, **named)

    def told(self, request, draw, response) -> None:
        (key,) = self._keys([request], draw)
        tell("kept", key=key.hex(), tokens=len(response.tokens))
        keep(self, request, draw, response)

    def step(state, record) -> None:
        groups = record.batch.drawn
        said = [[g.position, [r.tokens.tolist() for r in g.responses]] for g in groups]
        arrays = [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
        sums = list(seal.content(arrays).values())
        after = [said, sums, state.counters._asdict()]
        digest = hashlib.sha256(json.dumps(after).encode()).hexdigest()
        tell("step", step=state.counters.step, digest=digest)

    engine.Engine.generate, remembered.Responses.put = counted, told
    jax.config.update("jax_compilation_cache_dir", "gs://b/xla")
    found = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={SLICES * HOSTS}"]
    sys.argv = [*request["argv"], *found, f"--process_id={index}"]
    stubbed_train.know_programs_of_others(sys.argv)
    hooks = train.Hooks(phase=tell, step=step)
    with typed.ended():
        cli.run(functools.partial(train.main, score=stubbed_train.JUDGE, hooks=hooks))


def file_systems(folder: pathlib.Path, operation: Callable[[], None] = lambda: None) -> Callable:
    """What etils.epath asks for a file system: gs://NAME is a folder in this one. operation: called
    before each of a bucket."""
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Gcs(DirFileSystem):
        protocol = ("gs", "gcs")
        cachable = False

        def __init__(self, **_):
            super().__init__(folder, LocalFileSystem(auto_mkdir=True))

        @classmethod
        def _strip_protocol(cls, path):
            return str(path).removeprefix("gs://").strip("/")

        def _join(self, path):
            operation()
            return super()._join(path)

    return lambda self, name: Gcs() if name in ("gs", "gcs") else LocalFileSystem()


def _place_bucket(folder: pathlib.Path, failing: Failing) -> None:
    """gs://b is this folder for all that opens files by etils.epath; `failing` hears of it."""
    import orbax.checkpoint as ocp
    from etils.epath import backend

    restore = ocp.CheckpointManager.restore

    def restored(self, *arguments, **named):
        failing.restore()
        return restore(self, *arguments, **named)

    ocp.CheckpointManager.restore = restored
    get = file_systems(folder.parent, failing.operation)
    type(backend.fsspec_backend)._get_filesystem = get


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/faults")]
    import harness  # noqa: F401  # all that a training imports, once
    import stubbed_train  # noqa: F401

    serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
