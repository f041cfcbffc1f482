"""The one gate for bad input: what a user's file, template or config raises becomes one line.

    with gate.reading(path, "row 3"):
        value = json.loads(text)

Inside stands what reads or runs the user's input, and nothing of the project's: whatever comes out,
the BaseExceptions of extensions included, is then the input's fault and a ValueError that names the
place. Errors of the project's own code never pass here and keep their traceback.
"""

import contextlib
import functools
import os
import tempfile
import threading

_PASS = (KeyboardInterrupt, GeneratorExit)
_stderr = threading.Lock()


class ConfigError(ValueError):
    """A config value that cannot work; the message says which field, why, and what would."""


def describe(error: BaseException) -> str:
    """One line; with the kind of error, where the text alone would not say what happened."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    if isinstance(error, MemoryError):
        return "asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if type(error) in (ValueError, OSError) or isinstance(error, OSError):
        return text[:500] or type(error).__name__
    return f"{type(error).__name__}: {text}"[:500].removesuffix(": ")


@contextlib.contextmanager
def reading(*place: object, what: str = "cannot be read"):
    """Turns every error inside into ValueError('<place>: <what>: <the error in one line>')."""
    try:
        yield
    except _PASS:
        raise
    except BaseException as error:
        where = " ".join(str(p) for p in place if p != "")
        raise ValueError(f"{where}: {what}: {describe(error)}") from error


@contextlib.contextmanager
def hushed():
    """Hold back what native code writes to file descriptor 2; drop it where an error comes out:
    a Rust library prints every panic by itself before it becomes an exception."""
    with _stderr:
        held, real = _file().fileno(), os.dup(2)
        os.dup2(held, 2)
        try:
            yield
        except BaseException:
            os.ftruncate(held, 0)
            raise
        finally:
            os.dup2(real, 2)
            if size := os.fstat(held).st_size:
                os.write(real, os.pread(held, size, 0))
                os.ftruncate(held, 0)
            os.close(real)


@functools.cache
def _file():
    return tempfile.TemporaryFile("ab", buffering=0)
