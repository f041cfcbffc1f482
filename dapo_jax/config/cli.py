"""What every entry point shares: flags, the config and its overrides, errors as one clear line."""

import functools
import logging as stdlib_logging
import os
import re
import resource
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

import dapo_jax
from dapo_jax import gate
from dapo_jax.config import schema
from dapo_jax.data import rows
from dapo_jax.gate import Parser, fail, tell  # noqa: F401

FILE = flags.DEFINE_string(
    "config", "configs/quickstart.py", "Config file, FILE.py or FILE.py:ARGUMENT of its get_config."
)
ALLOW_CONFIG_CHANGE = flags.DEFINE_bool(
    "allow_config_change", False, "Resume although fields have changed that decide what is learned."
)
TERMINATED_STATUS = flags.DEFINE_integer(
    "terminated_status", 0, "Exit status of training that SIGTERM cut off and saved.", 0, 255
)
PROFILE = flags.DEFINE_integer("profile", 0, "Step to trace into WORKDIR/profile; 0 = none.", 0)
WORKDIR = flags.DEFINE_string("workdir", "", "Directory of the run; the same command resumes it.")
# Flags of any command that hold paths.
_PATH_FLAGS = ("config", "workdir", "data", "data_dir", "checkpoint", "json", "out")

# What --config and the --config.field=value of the command line make together: the config `value`,
# and `overrides`, from the dotted name of a field to its value.
CONFIG = types.SimpleNamespace()


def run(
    main: Callable[..., int | None], *arguments: str, without_config: Callable = lambda: None
) -> None:
    """Parse the command line, call `main` with its positional `arguments` (their names), exit.
    without_config: makes the config if --config is not given; None = the flag's default.
    Mistakes of the user (config, files, flags) end in lines `error: ...` on stderr and a non-zero
    code; anything else is a bug and keeps its traceback."""
    app.run(
        lambda argv: _guarded(main, argv[1:]),
        flags_parser=functools.partial(_parse, arguments=arguments, without_config=without_config),
    )


def _guarded(main, given: Sequence[str]) -> None:
    if signal.getsignal(signal.SIGINT) is dapo_jax.leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not flags.FLAGS["verbosity"].present:
        # absl sets INFO, at which Orbax reports every file it touches; --verbosity=0 asks for that.
        logging.set_verbosity(logging.WARNING)
        # `checkpoint/saver.py` reports a failed save in one line; Orbax would add tracebacks, also
        # from its event loops: futures that nobody awaits, calls on a closed loop.
        shown = lambda record: "orbax" not in record.pathname and record.name != "asyncio"
        logging.get_absl_handler().addFilter(shown)
    stdlib_logging.getLogger("gcsfs").setLevel("CRITICAL")  # would print stacks before it raises
    sys.unraisablehook = _unraisable
    try:
        _check_limits()
        sys.exit(main(*given) or 0)
    except KeyboardInterrupt:
        _interrupted()
    except Exception as error:
        if not (told := mistake(error)):
            raise
        late = threading.Timer(60.0, os._exit, [1])  # Orbax's threads may never end
        late.daemon = True
        late.start()
        fail(told)


def mistake(error: Exception) -> str:
    """What to tell the user of an error that is a mistake of theirs; '': it is a bug."""
    if isinstance(error, ValueError | OSError):
        return str(error) or type(error).__name__
    *_, last = traceback.extract_tb(error.__traceback__)
    if not last.filename.endswith("xla_bridge.py"):
        return ""
    asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
    return f"{asked}: jax finds no such device here ({gate.describe(error)}); unset it"


def _check_limits() -> None:
    """ValueError: this process may have fewer open files or addresses than a run of a tiny model on
    a CPU needs; below, Orbax hangs and XLA aborts."""
    for kind, least, what, remedy in (
        (resource.RLIMIT_NOFILE, 64, "open files", "ulimit -n 1024"),
        (resource.RLIMIT_AS, 2_500_000_000, "bytes of address space", "ulimit -v unlimited"),
    ):
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY and most < least:
            raise ValueError(f"this shell allows {most:,} {what}, a run needs {least:,}: {remedy}")


def _interrupted() -> None:
    sys.stdout.flush()
    dapo_jax.leave()  # at once: the usual way waits for what is being saved


def _unraisable(what) -> None:
    """Ends the process at a Ctrl-C that came within a callback of the garbage collector, where
    Python drops it; reports other exceptions but those of tensorstore on a closed event loop."""
    if what.exc_type is KeyboardInterrupt:
        _interrupted()
    if str(what.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(what)


def _parse(argv: Sequence[str], arguments: Sequence[str], without_config) -> list[str]:
    """Set flags and CONFIG; return the program's name and the positional arguments. Exits with one
    line per mistake in overrides, flags and config file."""
    bad: list[str] = []
    try:
        argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)  # --flagfile
        argv, given = _split(argv)
        asked = set(argv[: argv.index("--")] if "--" in argv else argv)
        if asked & {"--help", "-help", "-h", "--helpshort", "--helpfields"}:
            fields = (f"{n} = {f.default!r}   {f.doc}" for n, f in schema.SCHEMA.items())
            tell(fields if "--helpfields" in asked else _help(arguments))
            sys.exit()
        CONFIG.overrides = overrides(given, bad)
        rest = flags.FLAGS(argv)
    except (flags.Error, UnicodeError, OSError) as error:
        said, flag = str(error).splitlines()[0], getattr(error, "flagname", "")
        ours = [name for name in schema.SCHEMA if flag == name.rpartition(".")[2]]
        fail("\n".join([*bad, said + f"; did you mean --config.{ours[0]}?" if ours else said]))
    if stray := rest[1 + len(arguments) :]:
        bad.append(f"unexpected argument {stray[0]!r}; flags are written --name=value")
    if missing := arguments[len(rest) - 1 :]:
        bad.append(f"{missing[0]}: missing; it is written behind the flags, in quotes")
    for name in _PATH_FLAGS:
        if name in flags.FLAGS and flags.FLAGS[name].value:
            flags.FLAGS[name].value = expand(flags.FLAGS[name].value)
    try:
        made = None if flags.FLAGS["config"].present else without_config()
        CONFIG.value = made or load(FILE.value)
        apply(CONFIG.value, CONFIG.overrides)
    except (ValueError, OSError) as error:
        bad += str(error).splitlines()
    if bad:
        fail("\n".join(bad))
    return rest


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """(arguments without the overrides, overrides as (field, text)); written --config.a.b=text,
    --config.a.b text, and for a yes or no --config.a.b, --noconfig.a.b."""
    rest, given, left = [], [], list(argv)
    while left and left[0] != "--":
        match = re.fullmatch(r"--?(no)?(\w+)\.([^=]*)(=.*)?", left[0], re.DOTALL)
        argument = left.pop(0)
        if match is None:
            rest.append(argument)
            continue
        negated, section, name, text = match.groups()
        if section != "config":
            raise flags.Error(f"no flag --{section}.{name}; did you mean --config.{name}?")
        known = schema.SCHEMA.get(name)
        if text is not None:
            given.append((f"no{name}" if negated else name, text[1:]))
        elif known and isinstance(known.default, bool):
            given.append((name, "false" if negated else "true"))
        else:
            text = left.pop(0) if known and left and not left[0].startswith("--") else None
            given.append((name, text))
    return rest + left, given


_PARSERS = {bool: flags.BooleanParser(), int: flags.IntegerParser(), float: flags.FloatParser()}


def overrides(given: Sequence[tuple[str, str | None]], bad: list[str]) -> dict[str, Any]:
    """Field -> value; mistakes are added to `bad`."""
    out = {}
    for name, text in given:
        if name not in schema.SCHEMA:
            bad.append(f"config.{name}: no such field{schema.nearest(name)}")
        elif text is None:
            bad.append(f"config.{name}: wants a value: --config.{name}=VALUE")
        else:
            kind = type(schema.SCHEMA[name].default)
            try:
                out[name] = _PARSERS[kind].parse(text) if kind in _PARSERS else text
            except (ValueError, OverflowError):
                bad.append(f"config.{name}: wants {kind.__name__}, got {text[:80]!r}")
    return out


def expand(paths: str) -> str:
    """Expand `~` at the start of each path in 'name=path,path' (bash does not, after a =)."""
    entries = map(rows.entry, paths.split(","))
    return ",".join(name + "=" * bool(name) + os.path.expanduser(path) for name, path in entries)


def _help(arguments: Sequence[str]) -> list[str]:
    """Lines of --help: the module's docstring with its example, and its flags."""
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "flags:"]
    for module, own in sorted(flags.FLAGS.flags_by_module_dict().items()):
        if module.startswith("dapo_jax.") or module == sys.argv[0]:
            for flag in own:
                default = "" if flag.default in (None, "") else f" (default: {flag.default})"
                lines.append(f"  --{flag.name:<22} {flag.help}{default}")
    lines += [f"  {name:<24} (behind the flags)" for name in arguments]
    what = "Overrides a field of the config; --helpfields lists them."
    return [*lines, f"  --config.FIELD=VALUE     {what}"]


def load(path: str) -> schema.Config:
    """The config that `get_config` of a file returns; `path` is FILE or FILE:ARGUMENT.
    ValueError: there is no such file, or any exception in it, as one line with its line number."""
    file, *argument = path.split(":", 1)
    if not os.path.isfile(file):  # which takes any text
        what = "a directory" if os.path.isdir(file) else "No such file"
        raise ValueError(f"--config={path[:200]}: {what}; give a Python file with a get_config()")
    try:
        with gate.running():
            get_config = runpy.run_path(file).get("get_config")
            if not callable(get_config):
                raise AttributeError("it defines no get_config()")
            config = get_config(*argument)
        if not isinstance(config, schema.Config):
            raise TypeError(f"get_config() returned a {type(config).__name__}, not the config")
        return config
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is a program: anything can come out
        raise ValueError(_blame(file, error)) from error


def _blame(file: str, error: BaseException) -> str:
    """'FILE line N: what is wrong'."""
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.abspath(__file__))
    by = frames[-1].filename
    if isinstance(error, ValueError) and by.startswith(package) and by != __file__:
        return str(error)  # a preset names the mistake itself
    lines = [f.lineno for f in frames if f.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    text = str(error) if isinstance(error, schema.ConfigError) else gate.describe(error)
    return f"{file} line {lines[-1]}: {text}" if lines and lines[-1] else f"{file}: {text}"


def apply(config: schema.Config, overrides: Mapping[str, Any]) -> None:
    """Set fields by their full names, and expand `~` in those that are paths."""
    config.update(overrides)
    fields = schema.leaves(config)
    config.update({name: expand(fields[name]) for name in schema.PATHS if "~" in fields[name]})
