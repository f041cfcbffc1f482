"""Retries of reads from a disk or a bucket that may be unavailable for a while."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from time import sleep
from typing import Any

import jax
from etils import epath

from dapo_jax import gate

WAITS_S = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # between tries; five minutes in all

# Errors of the operating system that mean a missing file or its content: no retry.
_OF_CONTENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# tensorstore raises ValueErrors that begin with a status: one of these for 401, 403, 408, 429, 5xx
# and disk errors, others for changed bytes.
_AWAY = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|RESOURCE_EXHAUSTED|UNAUTHENTICATED"
    r"|PERMISSION_DENIED|UNKNOWN): "
)
_CLIENTS = ("gcsfs", "aiohttp", "requests", "google")  # clients of buckets; not all raise OSErrors


def temporary(error: BaseException | None) -> bool:
    """Whether reading or writing failed for now: a retry may succeed; the content may be whole."""
    if error is None or isinstance(error, _OF_CONTENT):
        return False
    return (
        type(error).__module__.split(".")[0] in _CLIENTS
        or isinstance(error, OSError)
        or bool(isinstance(error, ValueError | RuntimeError) and _AWAY.search(str(error)))
        or temporary(error.__cause__)
    )


def files(folder: epath.Path, without: Sequence[str] = ()) -> Iterator[epath.Path]:
    """All files below a folder, without these of its own files and subfolders."""
    for path, is_dir in read(f"{folder}", lambda: [(p, p.is_dir()) for p in folder.iterdir()]):
        if path.name not in without:
            yield from files(path) if is_dir else [path]


def read(what: str, action: Callable[[], Any]) -> Any:
    """The value of `action()`, retried after each temporary error. OSError: all tries failed."""
    waits, tries = iter(WAITS_S), len(WAITS_S) + 1
    while True:
        try:
            return action()
        except Exception as error:
            if not temporary(error):
                raise
            wrong, wait = f"cannot be read ({gate.describe(error)})", next(waits, None)
            if wait is None:
                calm = "that is no damage, nothing was changed: the same command tries again"
                raise OSError(f"{what}: {wrong}, {tries} times in a row; {calm}") from error
        who = f"process {jax.process_index()}"
        print(f"warning: {who}: {what}: {wrong}; again in {wait} s", file=sys.stderr, flush=True)
        sleep(wait)
