"""Clocks of the benchmarks: seconds of calls, of rollout steps, of functions that take turns."""

import functools
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


class Clock:
    """CPU and wall seconds of each call of what it wraps, while `on`."""

    on = True  # of all clocks

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time):
        self.cpu, self.wall, self._cpu_clock = [], [], cpu_clock

    def start(self) -> None:
        self._started = self._cpu_clock(), time.perf_counter()

    def stop(self) -> None:
        if Clock.on:
            self.cpu.append(self._cpu_clock() - self._started[0])
            self.wall.append(time.perf_counter() - self._started[1])

    def around(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.start()
            try:
                return function(*args, **kwargs)
            finally:
                self.stop()

        return timed


class Steps(Clock):
    """Of the rollout steps of a run, and the state after the last; two of `train.Hooks`."""

    state = None

    def phase(self, name: str) -> None:
        if name == "rollout":
            self.start()

    def step(self, state, record) -> None:
        self.stop()
        self.state = state
