"""The one gate for user input: bad files and bad config values become one line each.

    with gate.reading(path, "row 3"):
        value = json.loads(text)

The block holds the code that reads or runs the user's input, and nothing else. Any exception in it,
including the BaseExceptions of extensions, is then the input's fault and becomes a ValueError that
names the place. Errors of the project's own code keep their traceback. This module imports no JAX.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.client import HTTPException
from typing import Any, ClassVar, NamedTuple, NoReturn
from urllib.error import URLError

_stderr = threading.Lock()


def describe(error: BaseException) -> str:
    """One line; with the kind of error, where the text alone would not say what happened."""
    try:
        text = visible(" ".join(str(error).split()))
    except BaseException as second:  # its __str__ is the user's code too
        text = f"its text cannot be made ({type(second).__name__})"
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    if isinstance(error, MemoryError):
        return "asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if type(error) is ValueError or isinstance(error, OSError):
        return text[:500] or type(error).__name__
    return f"{type(error).__name__}: {text}"[:500].removesuffix(": ")


def visible(text: str) -> str:
    """Characters that do not show or that steer what does (controls, escapes, turns of the writing
    direction, odd blanks, halves of surrogate pairs) as codes; lines and tabs stay."""
    return "".join(x if x in "\n\t" or x.isprintable() else f"\\u{{{ord(x):x}}}" for x in text)


def tell(lines: Iterable[str]) -> None:
    """Print lines as they come, `visible`, until a reader such as `| head` has seen enough."""
    try:
        for line in lines:
            print(visible(line), flush=True)
    except BrokenPipeError:  # leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    """Ends the command with status 1 and a line `error: ...` for each line of the message."""
    for line in visible(message).splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1)


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes end as all others do; its help keeps its lines."""

    def __init__(self, *args, formatter_class=argparse.RawDescriptionHelpFormatter, **settings):
        super().__init__(*args, formatter_class=formatter_class, **settings)

    def error(self, message: str) -> NoReturn:
        fail(f"{message}; {self.prog} --help says what there is")


@contextlib.contextmanager
def reading(*place: object, what: str = "cannot be read"):
    """Turns every error inside into ValueError('<place>: <what>: <the error in one line>')."""
    try:
        with running():
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise any, GeneratorExit too
        where = " ".join(str(p) for p in place if p != "")
        raise ValueError(f"{where}: {what}: {describe(error)}") from error


WAITS_S = (1, 5, 15, 30)  # between the tries of a download
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # whose errors are no OSErrors


def away(error: BaseException | None) -> bool:
    """Whether a download failed by the network or a busy server, and may succeed a little later."""
    if error is None or type(error).__name__ == "OfflineModeIsEnabled":  # by HF_HUB_OFFLINE
        return False
    status = getattr(getattr(error, "response", None), "status_code", getattr(error, "code", None))
    if isinstance(status, int):
        return status in (408, 429) or status >= 500
    network = isinstance(error, ConnectionError | TimeoutError | HTTPException | URLError)
    network |= type(error).__module__.split(".")[0] in _CLIENTS
    return network or away(error.__cause__ or error.__context__)


def download(what: str, fetch: Callable[[], Any]) -> Any:
    """The value of `fetch()`, tried again for a minute while the network is away, a line a time."""
    for wait_s in WAITS_S:
        try:
            return fetch()
        except Exception as error:
            if not away(error):
                raise
            print(f"warning: {what}: {describe(error)}; again in {wait_s} s", file=sys.stderr)
        time.sleep(wait_s)
    return fetch()


_here = threading.local()


@contextlib.contextmanager
def running():
    """In this scope the user's code runs: its `os._exit` and `os.exec*`, which would end a run
    without a word, are errors as `sys.exit` is. Other threads and forked processes may end so."""
    before, _here.process = getattr(_here, "process", 0), os.getpid()
    try:
        yield
    finally:
        _here.process = before


def _guarded(name: str, leave: Callable, *words, **named) -> None:
    if getattr(_here, "process", 0) == os.getpid():
        raise SystemExit(f"os.{name}({', '.join(map(str, words[:1]))})")
    leave(*words, **named)


for _name in ("_exit", "execv", "execve"):  # all of os.exec* call the last two
    setattr(os, _name, functools.partial(_guarded, _name, getattr(os, _name)))


def function(place: str, named: str, modules: dict, known: Iterable[str] = ()) -> Callable:
    """The function that 'FILE.py:NAME' names. modules: path -> module, those imported so far.
    known: other names that are allowed there. ValueError: no such file or function."""
    file, _, name = named.rpartition(":")
    path = pathlib.Path(os.path.expanduser(file))  # a user who is not there stays
    if not name.isidentifier() or path.suffix != ".py":
        form = f"not of the form FILE.py:NAME, and none of {', '.join(known)}"
        raise ValueError(f"{place} {named!r} is {form}")
    if not path.is_file():
        raise ValueError(f"{place} {file}: no such file")
    if path not in modules:
        # Dataclasses and pickle look their module up; by its bare name it might hide another.
        spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
        modules[path] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with reading(place, file):
            spec.loader.exec_module(modules[path])
    if not callable(found := getattr(modules[path], name, None)):
        raise ValueError(f"{place} {file} has no function {name!r}")
    return found


@contextlib.contextmanager
def hushed():
    """Hold back what native code writes to file descriptor 2; drop it where an error comes out:
    a Rust library prints every panic by itself before it becomes an exception."""
    with _stderr:
        held, real = _file().fileno(), os.dup(2)
        os.lseek(held, 0, os.SEEK_SET)  # ftruncate leaves it where it was
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


_file = functools.cache(lambda: tempfile.TemporaryFile("ab", buffering=0))  # noqa: SIM115


# --- Typed settings ---

# Larger numbers are typing errors, or need more memory than any machine has.
TOKENS, ROWS = 2**22, 2**20
LARGEST = {int: 2**31 - 1, float: 1e12}  # of fields without a bound of their own


class ConfigError(ValueError, AttributeError):
    """A value that cannot work or an unknown name; the message says field, reason and remedy."""


class Field(NamedTuple):
    """Default, meaning and allowed values of one field."""

    default: Any
    doc: str
    low: float | None = None  # smallest allowed number
    high: float | None = None  # largest allowed number
    choices: tuple[str, ...] = ()  # allowed strings; () = any
    path: bool = False  # one path, or several with commas between; the command line expands `~`

    def mistake(self, name: str, value: Any) -> str | None:
        """One line if `value`, of the field's type, lies outside the bounds or choices."""
        kind, place = type(self.default), f"config.{name}:"
        if kind is float and not math.isfinite(value):
            return f"{place} wants a finite number, got {value}"
        if self.choices and value not in self.choices:
            return f"{place} {_shown(value)} is not one of {', '.join(self.choices)}"
        if self.low is not None and value < self.low:
            return f"{place} {_shown(value)} is too small, at least {self.low:g} ({self.doc})"
        high = LARGEST.get(kind) if self.high is None else self.high
        if high is not None and value > high:
            most = high if kind is int else f"{high:g}"
            return f"{place} {_shown(value)} is too large, at most {most} ({self.doc})"
        return None


def _shown(value: Any) -> str:
    long = type(value) is int and value.bit_length() > 200  # str() refuses very long ones
    return "a number of that size" if long else repr(value)[:60]


def setting(default, doc: str, low=None, high=None, choices=(), *, path=False) -> Any:
    """A field of a `Section`; the arguments are those of `Field`."""
    about = Field(default, doc, low, high, choices, path)
    return dataclasses.field(default=default, metadata={"field": about})


class Section:
    """Base class of the config's sections, dataclasses which stand beside the code that reads them.

    place: the section's dotted name in the config, "" for the root. Assigning another type than the
    field's raises ConfigError, as does an unknown name; a whole number is accepted as a float.
    Bounds and choices are checked later, all together, by `config.validate`.
    """

    _place: ClassVar[str] = ""
    # Text ", did you mean ...?" for an unknown name; set by config/schema.py, which knows all.
    nearest: ClassVar[Callable[[str], str]] = staticmethod(lambda name: "")

    def __init_subclass__(cls, place: str = "") -> None:
        cls._place = f"{place}." if place else ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise self._unknown(name)
        kind = self.__dataclass_fields__[name].type
        if kind is float and type(value) is int:
            value = float(max(min(value, 10**300), -(10**300)))  # float() refuses larger ones
        if type(value) is not kind:
            wants = "a section of fields" if issubclass(kind, Section) else kind.__name__
            got = f"got {_shown(value)} ({type(value).__name__})"
            raise ConfigError(f"config.{self._place}{name}: wants {wants}, {got}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:  # called for names that do not exist only
        if name.startswith("_"):  # Python and libraries look for optional methods
            raise AttributeError(name)
        raise self._unknown(name)

    def __getitem__(self, name: str) -> Any:  # tables of sharding rules are read so
        return getattr(self, name)

    def _unknown(self, name: str) -> ConfigError:
        full = f"{self._place}{name}"
        return ConfigError(f"config.{full}: no such field{Section.nearest(full)}")

    def update(self, fields: Mapping[str, Any]) -> None:
        """Set several fields. Names are dotted ("lora.rank"), or the mapping is nested."""
        for name, value in fields.items():
            first, _, rest = str(name).partition(".")
            node = getattr(self, first) if rest or isinstance(value, Mapping) else None
            if isinstance(node, Section):
                node.update({rest: value} if rest else value)
            elif rest:
                raise self._unknown(name)
            else:
                setattr(self, first, value)

    to_dict = dataclasses.asdict  # the fields as a plain dict, nested where the sections are

    def mistakes(self) -> list[str]:
        """One line per pair of fields in one section, this or a nested one, that contradict."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [line for v in values if isinstance(v, Section) for line in v.mistakes()]


def wrong(*rules: tuple[Any, str]) -> list[str]:
    """The lines of those (condition, line) whose condition holds: for `Section.mistakes`."""
    return [line for condition, line in rules if condition]


def walk(section: Section) -> Iterator[tuple[str, Field, Any]]:
    """(full dotted name, field, value) of every field in `section`, in the order of declaration."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from walk(value)
        else:
            yield section._place + field.name, field.metadata["field"], value


def leaves(section: Section) -> dict[str, Any]:
    """Full dotted name -> value of every field in `section`."""
    return {name: value for name, _, value in walk(section)}
