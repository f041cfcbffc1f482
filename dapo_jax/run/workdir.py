"""The directory of a run, on a disk or in a bucket.

A directory on a disk is used as it is; the processes of a run have to share it. Of one in a bucket
(gs://...; needs the package gcsfs) each process has a local copy without the checkpoints: process 0
fetches what is there, and sends what changed. Checkpoints go to the bucket by Orbax itself.
"""

import atexit
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import jax
from etils import epath

from dapo_jax import parallel

CHECKPOINTS = "checkpoints"


class Workdir(NamedTuple):
    name: str  # as the user gave it
    local: pathlib.Path  # where this process reads and writes small files
    remote: epath.Path | None  # the bucket's directory; None = `local` is the directory itself
    sent: dict[pathlib.PurePath, tuple]  # relative path -> (mtime, size) of what the bucket has

    @property
    def checkpoints(self) -> str:
        return str((self.remote or self.local) / CHECKPOINTS)


def is_remote(name: str | pathlib.Path) -> bool:
    return "://" in str(name)


def open_workdir(name: str | pathlib.Path) -> Workdir:
    """Make the directory and find out now, not after an hour, whether it can be written and whether
    all processes see the same one. ValueError: it cannot, or they do not."""
    if is_remote(name):
        return _open_remote(str(name).rstrip("/"))
    path = pathlib.Path(name)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--workdir={name}: is a file; give a directory")
    token = parallel.gather_json(secrets.token_hex(8))[0]
    probe = path / f".probe_{token}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        own = probe.with_name(f"{probe.name}_{jax.process_index()}")
        own.write_text("")
        own.unlink()
        if jax.process_index() == 0:
            probe.write_text("")
    except OSError as error:
        raise ValueError(f"--workdir={name}: cannot be written ({error.strerror})") from error
    parallel.gather_json(None)  # process 0 has written
    blind = [i for i, sees in enumerate(parallel.gather_json(probe.exists())) if not sees]
    if jax.process_index() == 0:
        probe.unlink()
    if blind:
        raise ValueError(
            f"--workdir={name}: process {blind[0]} does not see what process 0 wrote there; give a"
            " directory that all hosts share (NFS, or a bucket: gs://...)"
        )
    return Workdir(str(name), path, None, {})


def _open_remote(name: str) -> Workdir:
    local = pathlib.Path(tempfile.mkdtemp(prefix="dapo_jax-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    home = Workdir(name, local, epath.Path(name), {})
    if jax.process_index():
        return home
    try:
        home.remote.mkdir(parents=True, exist_ok=True)  # in a bucket of objects: nothing
        for top in home.remote.iterdir() if home.remote.exists() else ():
            for file in _files(top) if top.name != CHECKPOINTS else ():
                _fetch(home, file)
        (home.local / ".probe").write_text("")
        send(home)
        (home.local / ".probe").unlink()
        send(home)
    except ImportError as error:
        raise ValueError(f"--workdir={name}: {error} (pip install 'dapo_jax[gcs]')") from error
    except OSError as error:
        raise ValueError(f"--workdir={name}: cannot be read and written ({error})") from error
    return home


def _files(path: epath.Path) -> Iterator[epath.Path]:
    if path.is_dir():
        for child in path.iterdir():
            yield from _files(child)
    else:
        yield path


def _fetch(home: Workdir, file: epath.Path) -> None:
    relative = pathlib.PurePath(*file.parts[len(home.remote.parts) :])
    path = home.local / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.read_bytes())
    home.sent[relative] = _stamp(path)


def _stamp(path: pathlib.Path) -> tuple:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def send(home: Workdir) -> None:
    """Make the bucket hold what the local copy of process 0 holds; elsewhere nothing. OSError: the
    bucket refuses; the next call tries again."""
    if home.remote is None or jax.process_index():
        return
    there = {p.relative_to(home.local): p for p in home.local.rglob("*") if p.is_file()}
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
