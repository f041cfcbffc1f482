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

LIMITS = SimpleNamespace(hang_factor=3.0, hang_floor_s=0.05, hang_end_s=0.4, hang_first_s=60.0)


class Left:
    """In place of the end of the process."""

    def __init__(self):
        self.event, self.said, self.status = threading.Event(), "", None

    def __call__(self, message, status):
        self.said, self.status = message, status
        self.event.set()


@pytest.fixture
def dog(tmp_path):
    """`dog(**limits)`: (the watchdog, what it did, the file with what it said)."""

    def make(**limits):
        guard, left = SimpleNamespace(**vars(LIMITS) | limits), Left()
        file = (tmp_path / "stacks").open("w+")
        return watchdog.Watchdog(guard, left, file, tick_s=0.01), left, tmp_path / "stacks"

    return make


def hang_until(event):
    assert event.wait(30)


def test_a_phase_that_hangs_prints_all_stacks_and_leaves_with_75(dog):
    watch, left, file = dog()
    release = threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()
    with watch:
        for _ in range(3):
            watch.phase("save")
            time.sleep(0.01)
            watch.phase("rollout")
        watch.phase("save")
        began = time.monotonic()
        hang_until(left.event)
        assert time.monotonic() - began > 0.35
    release.set()
    other.join()
    assert left.status == os.EX_TEMPFAIL == 75
    assert left.said.startswith("a hang: 'save' has lasted for ") and "goes on from" in left.said
    said = file.read_text()
    assert "watchdog: 'save' has lasted for 0 s, usually 0.0 s; all stacks:\n" in said
    assert said.count("in hang_until") == 2 and said.count("Thread 0x") >= 2


def test_the_first_of_a_kind_has_a_limit_of_its_own(dog):
    watch, left, file = dog(hang_first_s=0.6)
    with watch:
        for name in ("rollout", "chunk"):
            watch.phase(name)
            time.sleep(0.45)  # longer than what is known may take
        assert not left.event.is_set() and file.read_text() == ""
        watch.phase("update")
        hang_until(left.event)
    assert "'update'" in left.said and "for the first time" in file.read_text()


def test_what_usually_takes_long_may(dog):
    watch, left, file = dog(hang_factor=10.0)
    with watch:
        for _ in range(2):
            watch.phase("chunk")
            time.sleep(0.1)
        time.sleep(0.5)  # within ten times the usual
        watch.phase("save")
    assert not left.event.is_set() and file.read_text() == ""


@pytest.mark.parametrize(
    ("limits", "phases", "said"),
    [
        ({"hang_factor": 0.0}, ["save"] * 3, False),
        ({"hang_end_s": 0.0}, ["save"] * 3, True),
        ({"hang_first_s": 0.0}, ["save"], False),
    ],
)
def test_off(dog, limits, phases, said):
    """Without a factor nothing is said; without an end it is only said."""
    watch, left, file = dog(**limits)
    with watch:
        for name in phases:
            watch.phase(name)
        time.sleep(0.6)
    assert not left.event.is_set() and ("all stacks" in file.read_text()) == said


def test_nothing_is_left_armed(dog):
    watch, left, _ = dog()
    with watch:
        watch.phase("save")
        watch.phase("save")
    time.sleep(0.6)
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
    ctypes.PyDLL(None).sleep(60)  # holds Python's lock
"""


def test_a_process_that_holds_pythons_lock_ends_too():
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Timeout" in done.stderr and time.monotonic() - began < 50


def test_a_sampler_tells_its_chunks():
    """And does all else as before."""

    class Engine:
        slots = 7

        def generate(self, params, requests, draw, progress, cut=None):
            for n in requests:
                progress(n)
            return params, cut

    from typing import NamedTuple

    class Machine(NamedTuple):
        engine: Engine

    told, finished = [], []
    machine = watchdog.pulsed(Machine(Engine()), told.append)
    assert machine.engine.slots == 7
    got = machine.engine.generate("params", [1, 2], None, progress=finished.append, cut="cut")
    assert got == ("params", "cut") and finished == [1, 2] and told == ["chunk", "chunk"]
    assert machine.engine.generate("params", [3], None) == ("params", None)
