"""Retries of reads from a disk or a bucket that may be unavailable for a while."""

import re
import sys
from collections.abc import Callable
from time import sleep
from typing import TypeVar

import jax

from dapo_jax import gate

T = TypeVar("T")

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


def passing(error: BaseException | None) -> bool:
    """Whether an error means that reading or writing failed for now, so that a retry may succeed;
    it then says nothing about the content."""
    if error is None or isinstance(error, _OF_CONTENT):
        return False
    client = type(error).__module__.split(".")[0] in _CLIENTS
    return (
        client
        or isinstance(error, OSError)
        or bool(isinstance(error, ValueError | RuntimeError) and _AWAY.search(str(error)))
        or passing(error.__cause__)
    )


def read(what: str, action: Callable[[], T]) -> T:
    """The value of `action()`, retried after each passing error. OSError: all tries failed."""
    for wait in (*WAITS_S, None):
        try:
            return action()
        except Exception as error:
            if not passing(error):
                raise
            wrong = gate.describe(error)
            if wait is None:
                raise OSError(
                    f"{what}: cannot be read, {len(WAITS_S) + 1} times in a row ({wrong}); that is"
                    " no damage, nothing was changed: the same command tries again"
                ) from error
        print(
            f"warning: process {jax.process_index()}: {what}: cannot be read ({wrong}); again in"
            f" {wait} s",
            file=sys.stderr,
            flush=True,
        )
        sleep(wait)
    raise AssertionError
