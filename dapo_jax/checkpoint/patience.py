"""Reading from a disk or a bucket that may be away for a while: tried again, with patience."""

import re
import sys
from collections.abc import Callable
from time import sleep
from typing import TypeVar

import jax

from dapo_jax import gate

T = TypeVar("T")

WAITS_S = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)  # between tries; five minutes in all

# What a file's content or absence raises, of all that the operating system does.
_OF_CONTENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# tensorstore's errors are ValueErrors that begin with a status; 401, 403, 408, 429 and 5xx and the
# errors of a disk become these. What it makes of changed bytes has others.
_AWAY = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|RESOURCE_EXHAUSTED|UNAUTHENTICATED"
    r"|PERMISSION_DENIED|UNKNOWN): "
)
_CLIENTS = ("gcsfs", "aiohttp", "requests", "google")  # of a bucket; not all are OSErrors


def passing(error: BaseException | None) -> bool:
    """Whether an error says that something could not be read or written, and nothing of what is
    there: another try may succeed."""
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
    """`action()`, tried again after each passing error. OSError: it did not pass."""
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
