"""Progress bars that a log can keep."""

import sys
from collections.abc import Iterable
from typing import NamedTuple, TextIO

from tqdm import tqdm

_EVERY_S = 30.0


def bar(of: Iterable | None = None, show: bool = True, **options) -> tqdm:
    """tqdm on a terminal. In a log: a line every 30 s, and none if all of it takes less."""
    if not sys.stderr.isatty():
        times = dict.fromkeys(("delay", "mininterval", "maxinterval"), _EVERY_S)
        options |= times | dict(file=_Lines(sys.stderr), dynamic_ncols=False)
    return tqdm(of, disable=not show, **options)


class _Lines(NamedTuple):
    """tqdm draws a bar over the one before, by carriage returns; here each has its line."""

    log: TextIO

    def write(self, text: str) -> None:
        if drawn := text.strip():
            self.log.write(drawn + "\n")
