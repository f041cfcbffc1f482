"""The directory of a run: usable, the run's own, and used by one process group at a time."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterator

from dapo_jax import parallel

# What a run creates, replaces or removes without asking.
_OURS = ("metrics.jsonl", "tensorboard", "rollouts", "checkpoints")
_LOCK = ".lock"


@contextlib.contextmanager
def hold(workdir: pathlib.Path) -> Iterator[None]:
    """Make the directory, and keep every other run out of it until the scope ends.

    The lock is the kernel's (flock) and dies with the process that has it, however that dies.
    ValueError: the directory cannot be used, is somebody else's, or another run is at work in it.
    """
    _open(workdir)
    lock = _lock(workdir) if parallel.first() else None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _open(workdir: pathlib.Path) -> None:
    """Find out now, not after an hour, whether the directory can be written."""
    if ":/" in str(workdir):
        raise ValueError(
            f"--workdir={workdir}: logs need a local directory; checkpoints can go elsewhere by"
            " --config.checkpoint.directory=gs://..."
        )
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"--workdir={workdir}: is a file; give a directory")
    _check_owner(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / f".probe_{os.getpid()}"
        probe.write_text("written")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--workdir={workdir}: cannot be written ({error.strerror})") from error


def _check_owner(workdir: pathlib.Path) -> None:
    """A model's or another program's directory must not lose its config.json or its logs to us."""
    config = workdir / "config.json"
    if config.exists():
        try:
            known = "rollout.group_size" in json.loads(config.read_bytes())
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"--workdir={workdir}: its config.json cannot be read; remove it if this is a run's"
                " directory (checkpoints carry the config too), or choose another"
            ) from error
        if not known:
            raise ValueError(
                f"--workdir={workdir}: its config.json is not a run's; choose another directory"
            )
    elif foreign := [name for name in _OURS if (workdir / name).exists()]:
        raise ValueError(
            f"--workdir={workdir}: holds {', '.join(foreign)} but no config.json of a run; choose"
            " another directory"
        )


def _lock(workdir: pathlib.Path) -> int:
    """A descriptor that holds the lock. Where the file system has no locks: one that does not."""
    path = workdir / _LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP):
            return lock
        owner = os.read(lock, 200).decode(errors="replace").strip() or "unknown process"
        os.close(lock)
        raise ValueError(
            f"--workdir={workdir}: another run is at work in it ({owner}); stop it, or choose"
            " another directory"
        ) from error
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
