"""What every entry point shares: absl flags, config overrides, and errors as one clear line."""

import functools
import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from dapo_jax import schema

CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/quickstart.py", "Config file; fields are overridden as --config.a.b=value."
)
ALLOW_CONFIG_CHANGE = flags.DEFINE_bool(
    "allow_config_change", False, "Resume although fields have changed that decide what is learned."
)
TERMINATED_STATUS = flags.DEFINE_integer(
    "terminated_status", 0, "Exit status of training that SIGTERM cut off and saved.", 0, 255
)
WORKDIR = flags.DEFINE_string("workdir", "", "Directory of the run; the same command resumes it.")


def run(main: Callable[..., int | None], *arguments: str) -> None:
    """Parse the command line, call `main` with its positional `arguments` (their names), exit.
    Mistakes of the user (config, files, flags) end in one line on stderr and a non-zero code;
    anything else is a bug and keeps its traceback."""
    app.run(
        lambda argv: _guarded(main, argv[1:]),
        flags_parser=functools.partial(_parse, arguments=arguments),
    )


def _guarded(main, given: Sequence[str]) -> None:
    if not flags.FLAGS["verbosity"].present:
        # absl sets INFO, at which Orbax reports every file it touches; --verbosity=0 asks for that.
        logging.set_verbosity(logging.WARNING)
        # `checkpoint/saver.py` tells of a failed save in one line; Orbax would add tracebacks, also
        # by what its event loops leave behind: futures nobody awaits, calls on a closed loop.
        logging.get_absl_handler().addFilter(
            lambda record: "orbax" not in record.pathname and record.name != "asyncio"
        )
        sys.unraisablehook = _without_closed_loops
    try:
        sys.exit(main(*given) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # 128 + SIGINT; at once: the usual way waits for what is being saved
    except (ValueError, OSError) as error:
        fail(str(error) or type(error).__name__)


def _without_closed_loops(what) -> None:
    """Where tensorstore's threads report what a callback raises."""
    if str(what.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(what)


def fail(message: str) -> None:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1)


def _parse(argv: Sequence[str], arguments: Sequence[str]) -> list[str]:
    for arg in argv[1:]:
        # ml_collections would name the whole config in its complaint: look first.
        if match := re.match(r"--(?:no)?config\.([^=]+)", arg):
            name = match[1]
            if name not in schema.SCHEMA:
                fail(f"config.{name}: no such field{schema.nearest(name)}")
    try:
        rest = flags.FLAGS(list(argv))
        CONFIG.value.get("seed")  # ml_collections keeps a file's OSError until the first access
    except flags.Error as error:
        fail(_first_line(error).removeprefix("ValueError: "))  # of a get_config(argument)
    except (AttributeError, KeyError, TypeError, OSError) as error:
        fail(f"--config: {_first_line(error)}")
    n = len(arguments)
    if len(rest) - 1 > n:
        fail(f"unexpected argument {rest[n + 1]!r}; flags are written --name=value")
    if len(rest) - 1 < n:
        fail(f"{arguments[len(rest) - 1]}: missing; it is written behind the flags, in quotes")
    return rest


def _first_line(error: Exception) -> str:
    """The line that says what is wrong: the last one where ml_collections prints a traceback or the
    paths it tried before it."""
    text = str(error if isinstance(error, OSError) or not error.args else error.args[0]).strip()
    lines = text.splitlines() or [type(error).__name__]
    wrapped = "Error whilst parsing config file" in text or "earlier failure to load" in text
    return lines[-1 if wrapped else 0].strip()
