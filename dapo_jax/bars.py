"""Progress bars that a log can keep."""

import sys
from collections.abc import Iterable
from types import SimpleNamespace

from tqdm import tqdm

_EVERY_S = 30.0


def bar(of: Iterable | None = None, show: bool = True, **options) -> tqdm:
    """tqdm on a terminal. In a log: a line every 30 s, and none if all of it takes less."""
    if not sys.stderr.isatty():
        times = dict.fromkeys(("delay", "mininterval", "maxinterval"), _EVERY_S)
        # tqdm draws a bar over the one before, by carriage returns; here each has its line.
        write = lambda text, log=sys.stderr: text.strip() and log.write(text.strip() + "\n")
        options |= times | dict(file=SimpleNamespace(write=write), dynamic_ncols=False)
    return tqdm(of, disable=not show, **dict(dynamic_ncols=True) | options)
