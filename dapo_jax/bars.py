"""Progress bars that a log can keep."""

import sys
from collections.abc import Iterable
from typing import TextIO

from tqdm import tqdm

_EVERY_S = 30.0


def bar(of: Iterable | None = None, show: bool = True, **options) -> tqdm:
    """tqdm where a person looks at a terminal. In a log: a line every 30 s, and none at all of what
    takes less than that."""
    if not sys.stderr.isatty():
        times = dict.fromkeys(("delay", "mininterval", "maxinterval"), _EVERY_S)
        options |= times | dict(file=_Lines(sys.stderr), dynamic_ncols=False)
    return tqdm(of, disable=not show, **options)


class _Lines:
    """tqdm draws a bar over the one before, by carriage returns; here each has its line."""

    def __init__(self, log: TextIO):
        self._log = log

    def write(self, text: str) -> None:
        if drawn := text.strip():
            self._log.write(drawn + "\n")

    def flush(self) -> None:
        self._log.flush()
