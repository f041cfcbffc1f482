"""What hangs prints all stacks and leaves with the status that is started again."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dapo_jax import config
from dapo_jax.hosts import watchdog

# Seconds of a clock that the tests turn.
LIMITS = SimpleNamespace(hang_factor=3.0, hang_floor_s=5.0, hang_end_s=40.0, hang_first_s=6000.0)


class Left:
    """In place of the end of the process."""

    def __init__(self):
        self.event, self.said, self.status = threading.Event(), "", None

    def __call__(self, message, status):
        self.said, self.status = message, status
        self.event.set()


class Clock:
    """In place of the module `time`."""

    def __init__(self, left):
        self.now, self.reads, self.left = 1000.0, 0, left

    def monotonic(self) -> float:
        self.reads += 1
        return self.now

    def turn(self, seconds: float) -> None:
        """By so much, and until the watchdog has looked at it and done what it does."""
        self.now += seconds
        seen, deadline = self.reads, time.monotonic() + 60
        while self.reads < seen + 2 and not self.left.event.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def dog(tmp_path, monkeypatch):
    """`dog(**limits)`: (the watchdog, its clock, what it did, the file with what it said)."""

    def make(**limits):
        guard, left = SimpleNamespace(**vars(LIMITS) | limits), Left()
        clock = Clock(left)
        monkeypatch.setattr(watchdog, "time", clock)
        monkeypatch.setattr(watchdog, "_GIL_S", 3600.0)  # of the real clock
        file = (tmp_path / "stacks").open("w+")
        watch = watchdog.Watchdog(guard, left, file, tick_s=0.01)
        return watch, clock, left, tmp_path / "stacks"

    return make


def test_a_phase_that_hangs_prints_all_stacks_and_leaves_with_75(dog):
    watch, clock, left, file = dog()
    release = threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()

    def hangs():
        clock.turn(4.9)
        assert file.read_text() == ""
        clock.turn(1.1)
        assert (
            "watchdog: 'save' has lasted for 6 s, usually 1.0 s; all stacks:\n" in file.read_text()
        )
        clock.turn(33.9)
        assert not left.event.is_set()
        clock.turn(0.2)

    with watch:
        for _ in range(3):
            watch.phase("save")
            clock.turn(1.0)
            watch.phase("rollout")
        watch.phase("save")
        hangs()
    release.set()
    other.join()
    assert left.status == os.EX_TEMPFAIL == 75
    assert (
        left.said.startswith("a hang: 'save' has lasted for 40 s") and "goes on from" in left.said
    )
    said = file.read_text()
    assert said.count("in hangs") == 2 and said.count("Thread 0x") >= 2


def test_the_first_of_a_kind_has_a_limit_of_its_own(dog):
    watch, clock, left, file = dog(hang_first_s=60.0)
    with watch:
        for name in ("rollout", "chunk"):
            watch.phase(name)
            clock.turn(45)  # longer than what is known may take
        assert not left.event.is_set() and file.read_text() == ""
        watch.phase("update")
        clock.turn(61)
    assert "'update'" in left.said and "for the first time" in file.read_text()


def test_what_usually_takes_long_may(dog):
    watch, clock, left, file = dog(hang_factor=10.0)
    with watch:
        for _ in range(2):
            watch.phase("chunk")
            clock.turn(10)
        clock.turn(50)  # within ten times the usual
        watch.phase("save")
    assert not left.event.is_set() and file.read_text() == ""


@pytest.mark.parametrize(
    ("limits", "phases", "said"),
    [
        ({"hang_end_s": 0.0}, ["save"] * 3, True),
        ({"hang_first_s": 0.0}, ["save"], False),
    ],
)
def test_off(dog, limits, phases, said):
    """Without an end it is only said; without a first limit nothing holds of a first phase."""
    watch, clock, left, file = dog(**limits)
    with watch:
        for name in phases:
            watch.phase(name)
        clock.turn(10**6)
    assert not left.event.is_set() and ("all stacks" in file.read_text()) == said


def test_without_a_factor_nobody_looks(dog):
    watch, clock, left, file = dog(hang_factor=0.0)
    with watch:
        watch.phase("save")
        clock.now += 10**6
        time.sleep(0.1)
    assert not left.event.is_set() and file.read_text() == "" and clock.reads == 0


def test_nothing_is_left_armed(dog):
    watch, clock, left, _ = dog()
    with watch:
        watch.phase("save")
        watch.phase("save")
    time.sleep(0.1)
    clock.now += 10**6
    time.sleep(0.1)
    assert not left.event.is_set()


def test_shipped_limits_are_generous():
    guard = config.base().guard
    assert guard.hang_end_s >= 1800 and guard.hang_first_s >= 7200 and guard.hang_factor >= 10


STUCK = """
import ctypes
from types import SimpleNamespace
from dapo_jax.hosts import watchdog
watchdog._GIL_S = 0.5
guard = SimpleNamespace(hang_factor=1.0, hang_floor_s=0.1, hang_end_s=0.2, hang_first_s=0.2)
with watchdog.Watchdog(guard, tick_s=100.0) as watch:
    ctypes.PyDLL(None).sleep(600)  # holds Python's lock
"""


def test_a_process_that_holds_pythons_lock_ends_too():
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Timeout" in done.stderr
