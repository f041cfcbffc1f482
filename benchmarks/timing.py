"""Clocks of the benchmarks: seconds of calls, of rollout steps, of functions that take turns."""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

# What each side calls an instruction set. XLA's libraries of kernels look at the processor all the
# same, for ours and google-tunix alike.
ISA = {
    "AVX2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}


def one_core() -> None:
    """Before jax or torch is imported, which size their threads and choose their kernels then: the
    last core, one thread, and the instruction set that `--isa=` of the command line names."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for name in [a.removeprefix("--isa=") for a in sys.argv if a.startswith("--isa=")]:
        for key, value in ISA.get(name, {}).items():  # another name is for argparse to refuse
            old = os.environ.get(key, "") if key == "XLA_FLAGS" else ""
            os.environ[key] = f"{old} {value}".strip()


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
