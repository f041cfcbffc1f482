"""The directory of a run, on a disk or in a bucket; locked, so that only one run uses it.

The processes of a run share a directory on a disk. For a bucket (gs://...; needs the package gcsfs)
each process has a local copy without checkpoints and journal: process 0 fetches the files that are
there, and sends those that changed. Orbax and the journal write to the bucket themselves.
"""

import atexit
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from etils import epath

from dapo_jax import gate, parallel
from dapo_jax.checkpoint import retry

CHECKPOINTS, JOURNAL, REWOUND = "checkpoints", "journal", "rewound"
PROGRAMS = "xla"  # compiled, for all hosts (hosts/start.py)
EXPORT = "export"  # Hugging Face directories (export.py)
# Not copied from a bucket; "logs": what each host printed (hosts/until_done.py).
_LEFT_THERE = (CHECKPOINTS, f"{CHECKPOINTS}.damaged", JOURNAL, REWOUND, PROGRAMS, EXPORT)
_LEFT_THERE += ("logs", "profile")
# What a run creates, replaces or removes.
_OURS = ("metrics.jsonl", "tensorboard", "rollouts", CHECKPOINTS, JOURNAL)
_LOCK = ".lock"


class Workdir(NamedTuple):
    name: str  # as the user gave it
    local: pathlib.Path  # where this process reads and writes small files
    remote: epath.Path | None  # the bucket's directory; None = `local` is the directory itself
    sent: dict[pathlib.PurePath, tuple]  # relative path -> (mtime, size) of what the bucket has

    @property
    def top(self) -> epath.Path:
        """The run's directory, in the bucket or on the disk."""
        return self.remote or epath.Path(self.local)

    @property
    def checkpoints(self) -> str:
        return str(self.top / CHECKPOINTS)


def place(name: str, given: str) -> epath.Path:
    """`name` as a path. given: the user's text, for the error. ValueError: an unknown scheme."""
    with gate.reading(given, what="no kind of place that is known, such as gs://"):
        return epath.Path(name)


def is_remote(name: str | pathlib.Path) -> bool:
    return "://" in str(name)


@contextlib.contextmanager
def hold(name: str | pathlib.Path, checkpoints: str = "") -> Iterator[Workdir]:
    """Make the directory, and lock it and the one with its checkpoints until the scope or the
    process ends; a bucket has no lock. checkpoints: config.checkpoint.directory, if given.
    ValueError: a directory cannot be used, is of another program, or a run is at work in it."""
    home = open_workdir(name)
    directory = checkpoints or home.checkpoints
    with contextlib.ExitStack() as held:
        if parallel.is_main_process():
            _check_owner(name, home.local)
            places = {} if home.remote else {home.local.resolve(): f"--workdir={name}"}
            if not is_remote(directory):
                what = f"config.checkpoint.directory={checkpoints}" if checkpoints else directory
                places.setdefault(pathlib.Path(directory).resolve(), what)
            for path, what in places.items():
                held.callback(os.close, _lock(path, what))
        yield home


def open_workdir(name: str | pathlib.Path) -> Workdir:
    """Make the directory. ValueError: it cannot be written, or processes see different ones."""
    if is_remote(name):
        return _open_remote(str(name).rstrip("/"))
    path = pathlib.Path(name)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--workdir={name}: is a file; give a directory")
    probe = f".probe_{parallel.meet(secrets.token_hex(8))[0]}"
    own = path / f"{probe}_{jax.process_index()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        own.write_text("")
    except FileExistsError as error:  # where a disk is not mounted, say
        raise ValueError(f"--workdir={name}: {error.filename} is a link to nothing") from error
    except OSError as error:
        raise ValueError(f"--workdir={name}: cannot be written ({error.strerror})") from error
    parallel.meet(None)  # process 0 has written
    seen = parallel.meet((path / f"{probe}_0").exists())
    own.unlink()
    if not all(seen):
        blind = f"process {seen.index(False)} does not see what process 0 wrote there"
        raise ValueError(f"--workdir={name}: {blind}; give one that all share (NFS, gs://...)")
    return Workdir(str(name), path, None, {})


def _open_remote(name: str) -> Workdir:
    local = pathlib.Path(tempfile.mkdtemp(prefix="dapo_jax-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    home = Workdir(name, local, place(name, f"--workdir={name}"), {})
    if not parallel.is_main_process():
        return home
    probe = home.local / ".probe"
    try:
        # No effect in a bucket of objects.
        retry.read(name, lambda: home.remote.mkdir(parents=True, exist_ok=True))
        there = retry.read(name, home.remote.is_dir)
        for file in retry.files(home.remote, _LEFT_THERE) if there else ():
            relative = pathlib.PurePath(file.relative_to(home.remote))
            path = home.local / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(retry.read(str(file), file.read_bytes))
            home.sent[relative] = _stamp(path)
        for change in (probe.touch, probe.unlink):
            change()
            retry.read(name, lambda: send(home))
    except ImportError as error:
        raise ValueError(f"--workdir={name}: {error} (pip install 'dapo_jax[gcs]')") from error
    except OSError as error:
        raise ValueError(f"--workdir={name}: cannot be read and written ({error})") from error
    return home


_stamp = lambda path: (path.stat().st_mtime_ns, path.stat().st_size)


def send(home: Workdir) -> None:
    """Update the bucket from the local copy of process 0; without a bucket do nothing. OSError: the
    bucket refuses; the next call tries again."""
    if not (home.remote and parallel.is_main_process()):
        return
    there = {p.relative_to(home.local): p for p in home.local.rglob("*") if p.is_file()}
    try:
        for relative, path in there.items():
            stamp = _stamp(path)
            if home.sent.get(relative) != stamp:
                target = home.remote / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
                home.sent[relative] = stamp
        for relative in home.sent.keys() - there.keys():
            (home.remote / relative).unlink(missing_ok=True)
            del home.sent[relative]
    except Exception as error:  # not all errors of a bucket's client are OSErrors
        if not retry.temporary(error):
            raise
        raise OSError(gate.describe(error)) from error


def try_to_send(home: Workdir, say: Callable[[str], None]) -> None:
    """`send`, with a warning if it fails."""
    try:
        send(home)
    except OSError as error:
        say(f"warning: {home.name}: not written ({error}); trying again after the next step")


def _check_owner(name, workdir: pathlib.Path) -> None:
    """ValueError: it is another program's directory, or a model's; a run would overwrite files."""
    config = workdir / "config.json"
    if config.is_file():
        try:
            known = "rollout.group_size" in json.loads(config.read_bytes())
        except (OSError, ValueError, TypeError, RecursionError) as error:
            remedy = "remove it if this is a run's (checkpoints carry it too), or choose another"
            raise ValueError(f"--workdir={name}: no readable config.json; {remedy}") from error
        wrong = "" if known else "its config.json is not a run's"
    else:
        # A run that was killed at its start leaves directories with a lock alone.
        alone = lambda path: path.is_dir() and [p.name for p in path.iterdir()] == [_LOCK]
        there = [n for n in _OURS if (workdir / n).exists() and not alone(workdir / n)]
        wrong = there and f"holds {', '.join(there)} but no config.json of a run"
    for path in (workdir / n for n in (*_OURS, "config.json", "events.jsonl", "eval", "data")):
        if os.path.lexists(path) and not (path.is_file() if path.suffix else path.is_dir()):
            wrong = wrong or f"its {path.name} is no {'file' if path.suffix else 'folder'}"
    if wrong:
        raise ValueError(f"--workdir={name}: {wrong}; choose another directory")


def _lock(directory: pathlib.Path, what: str) -> int:
    """A descriptor that locks the directory. what: its name in errors. ValueError: it is locked."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, owner = lock(directory / _LOCK)
    except OSError as error:
        raise ValueError(f"{what}: cannot be written ({error.strerror})") from error
    if owner:
        busy = f"another run is at work in it ({owner})"
        raise ValueError(f"{what}: {busy}; stop it, or choose another directory")
    return descriptor


def lock(path: pathlib.Path, mode: int = 0o644) -> tuple[int, str]:
    """(descriptor, ''): the file is locked until the descriptor is closed, if its file system has
    locks; or (-1, the process that has locked it). OSError: it cannot be opened for writing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP):
            return file, ""
        owner = os.read(file, 200).decode(errors="replace").strip() or "unknown process"
        os.close(file)
        return -1, owner
    with contextlib.suppress(OSError):  # on a full disk the owner stays unnamed
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file, ""
