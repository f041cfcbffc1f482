"""What every entry point shares: absl flags, config overrides, and errors as one clear line."""

import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from dapo_jax import config as config_lib

CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/quickstart.py", "Config file; fields are overridden as --config.a.b=value."
)
WORKDIR = flags.DEFINE_string("workdir", "", "Directory of the run; the same command resumes it.")


def run(main: Callable[[], int | None]) -> None:
    """Parse the command line, call `main()`, exit. Mistakes of the user (config, files, flags) end
    in one line on stderr and a non-zero code; anything else is a bug and keeps its traceback."""
    app.run(lambda _: _guarded(main), flags_parser=_parse)


def _guarded(main) -> None:
    if not flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(flags.FLAGS.verbosity)
    else:  # Orbax reports every file it touches at INFO; --verbosity=0 brings that back
        logging.set_verbosity(logging.WARNING)
    try:
        sys.exit(main() or 0)
    except (ValueError, OSError) as error:
        fail(str(error) or type(error).__name__)


def fail(message: str) -> None:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1)


def _parse(argv: Sequence[str]) -> list[str]:
    for arg in argv[1:]:
        # ml_collections would name the whole config in its complaint: look first.
        if match := re.match(r"--(?:no)?config\.([^=]+)", arg):
            name = match[1]
            if name not in config_lib.SCHEMA:
                fail(f"config.{name}: no such field{config_lib.nearest(name)}")
    try:
        rest = flags.FLAGS(list(argv))
    except flags.Error as error:
        fail(str(error).splitlines()[0])
    except (AttributeError, KeyError, TypeError, OSError) as error:
        fail(f"--config: {_first_line(error)}")
    if len(rest) > 1:
        fail(f"unexpected argument {rest[1]!r}; flags are written --name=value")
    return rest


def _first_line(error: Exception) -> str:
    text = str(error.args[0] if error.args else error).strip()
    return text.splitlines()[0] if text else type(error).__name__
