"""CPU time of several functions in one process, in turns: a busy machine slows all sides alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def in_turns(
    functions: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, tuple[float, Any]]:
    """(median CPU-seconds of this process per call, last result) of each, over `repeats` turns
    after one that is not counted, since it compiles."""
    seconds, results = {name: [] for name in functions}, {}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            started = time.process_time()
            results[name] = function()
            if turn:
                seconds[name].append(time.process_time() - started)
    return {name: (statistics.median(t), results[name]) for name, t in seconds.items()}
