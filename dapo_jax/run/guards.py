"""What a run is watched for: numbers out of bounds, nothing to learn, steps that do not end."""

import collections
import contextlib
import faulthandler
import statistics
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from dapo_jax.run.checkpoint import State


def alarms(guard, log: dict[str, float]) -> list[str]:
    """The configured bounds that the metrics of a step break, in words. `guard`: config.guard."""
    bounds = (
        ("policy/entropy", guard.entropy_min, guard.entropy_max, "entropy"),
        ("response/length_mean", guard.length_min, guard.length_max, "mean response length"),
        ("sampling/accept_frac", guard.accept_min, 0.0, "share of problems with mixed groups"),
    )
    out = []
    for tag, low, high, name in bounds:
        value = log.get(tag)
        if value is None:
            continue
        if low and not value >= low:  # NaN is out of any bounds
            out.append(f"{name} {value:.3g} is below {low:g}")
        if high and not value <= high:
            out.append(f"{name} {value:.3g} is above {high:g}")
    return out


def count_alarms(c, state: State, log: dict[str, float], say) -> tuple[State, list[str]]:
    """Say which bounds of `config.guard` this step broke, and count such steps in a row."""
    broken = alarms(c.guard, log)
    in_row = state.alarms_in_row + 1 if broken else 0
    if in_row & (in_row - 1) == 0:  # 1, 2, 4, 8, ...: it may last
        for alarm in broken:
            say(f"alarm: step {state.step}: {alarm} (step {in_row} in a row)")
    return state._replace(alarms_in_row=in_row), broken


def shortage(c, log: dict[str, float]) -> str:
    """What to say when dynamic sampling did not fill the batch; '' when it did."""
    found = log["sampling/batch_groups"]
    if not c.sampling.dynamic or found >= c.rollout.groups:
        return ""
    consequence = (
        "stopping"
        if c.sampling.on_exhausted == "stop"
        else "training on them"
        if found
        else "no update"
    )
    return (
        f"{found} of {c.rollout.groups} groups have right and wrong responses after"
        f" {log['sampling/rounds']} rounds ({log.get('sampling/all_wrong_frac', 0):.0%} of the"
        f" problems all wrong, {log.get('sampling/all_correct_frac', 0):.0%} all right);"
        f" {consequence}"
    )


def why_stop(c, state: State, log: dict[str, float]) -> str:
    """The configured policy that ends the run here; '' to go on."""
    if state.empty_steps >= c.sampling.max_empty_steps:
        return (
            f"nothing to learn: {state.empty_steps} steps in a row without one group that has right"
            f" and wrong responses ({state.samples} responses drawn in {state.rounds} rounds);"
            " give easier or harder problems, more responses a problem, or a better start"
        )
    if c.sampling.on_exhausted == "stop" and log and shortage(c, log):
        return f"dynamic sampling used up its {c.sampling.max_rounds} rounds"
    if state.skipped_in_row >= c.optim.max_skipped:
        return f"{state.skipped_in_row} non-finite gradients in a row; lower optim.lr"
    if c.guard.stop_after and state.alarms_in_row >= c.guard.stop_after:
        return f"{state.alarms_in_row} steps in a row out of the bounds of config.guard"
    return ""


class Watchdog:
    """Prints the Python stacks of all threads when something takes `factor` times as long as it
    usually does, and at least `floor_s` seconds. It only prints: a slow disk is no reason to die.

    The first time of each kind, which compiles, is not watched. faulthandler's own thread needs no
    Python lock, so it also speaks when Python is stuck. `factor` 0: off.
    """

    def __init__(self, factor: float, floor_s: float, file: TextIO | None = None):
        self._factor, self._floor_s = factor, floor_s
        self._file = file or sys.__stderr__
        self._usual = collections.defaultdict(lambda: collections.deque(maxlen=9))

    @contextlib.contextmanager
    def watch(self, kind: str) -> Iterator[None]:
        known, started = self._usual[kind], time.monotonic()
        if self._factor and known:
            limit = max(self._floor_s, self._factor * statistics.median(known))
            faulthandler.dump_traceback_later(limit, repeat=True, file=self._file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        known.append(time.monotonic() - started)
