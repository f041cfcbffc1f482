"""What hangs prints all stacks and leaves with the status that is started again."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dapo_jax.hosts import watchdog

# Seconds of a clock that the tests turn.
LIMITS = dict(hang_factor=3.0, hang_floor_s=5.0, hang_end_s=40.0, hang_first_s=6000.0)


class Dog(watchdog.Watchdog):
    """Its clock is turned by the test, and it looks then; not by its thread."""

    def __init__(self, file, limits):
        super().__init__(SimpleNamespace(**LIMITS | limits))
        self.now, self.file, self.left = 1000.0, file, []
        self._clock, self._file = lambda: self.now, file.open("w+")
        self._leave = lambda *how: self.left.append(how)  # (message, status) of the process's end

    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    def phases(self, names, seconds: float) -> None:
        for name in names:
            self.phase(name)
            self.turn(seconds)


@pytest.fixture
def dog(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 3600.0)
    monkeypatch.setattr(watchdog, "_GIL_S", 3600.0)
    return lambda **limits: Dog(tmp_path / "stacks", limits)


def test_a_phase_that_hangs_prints_all_stacks_and_leaves_with_75(dog):
    dog = dog()

    def hangs():
        dog.turn(4.9)
        assert dog.file.read_text() == ""
        dog.turn(1.1)
        usual = "watchdog: 'save' has lasted for 6 s, usually 1.0 s; all stacks:\n"
        assert usual in dog.file.read_text()
        dog.turn(33.9)
        assert not dog.left
        dog.turn(0.2)

    with dog:
        for _ in range(3):
            dog.phases(["save"], 1.0)
            dog.phase("rollout")
        dog.phase("save")
        hangs()
    ((message, status),) = dog.left
    assert status == os.EX_TEMPFAIL == 75 and "goes on from" in message
    assert message.startswith("a hang: 'save' has lasted for 40 s")
    said = dog.file.read_text()
    assert said.count("in hangs") == 2 and said.count("Thread 0x") >= 2  # its own, too


def test_the_first_of_a_kind_has_a_limit_of_its_own(dog):
    dog = dog(hang_first_s=60.0)
    with dog:
        dog.phases(["rollout", "chunk"], 45)  # longer than what is known may take
        assert not dog.left and dog.file.read_text() == ""
        dog.phases(["update"], 61)
    assert "'update'" in dog.left[0][0] and "for the first time" in dog.file.read_text()


@pytest.mark.parametrize(
    ("limits", "phases", "after_s", "printed"),
    [
        ({"hang_factor": 10.0}, ["chunk"] * 2, 50, False),  # within ten times the usual
        ({"hang_end_s": 0.0}, ["save"] * 3, 10**6, True),  # without an end it is only said
        ({"hang_first_s": 0.0}, ["save"], 10**6, False),  # nothing holds of a first phase
    ],
)
def test_no_end(dog, limits, phases, after_s, printed):
    dog = dog(**limits)
    with dog:
        dog.phases(phases, 10)
        dog.turn(after_s)
        dog.phase("rollout")
    assert not dog.left and ("all stacks" in dog.file.read_text()) == printed


@pytest.mark.parametrize("factor", [0.0, 3.0])
def test_off_or_closed_it_does_nothing(dog, factor, monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.001)
    dog, looked = dog(hang_factor=factor), threading.Event()
    dog.look = looked.set
    with dog:
        assert looked.wait(60 if factor else 0.1) == bool(factor)
    time.sleep(0.1)  # a last look may be under way
    looked.clear()
    assert not looked.wait(0.1)


STUCK = """
import ctypes
from types import SimpleNamespace
from dapo_jax.hosts import watchdog
watchdog._GIL_S, watchdog.TICK_S = 0.5, 100.0
guard = SimpleNamespace(hang_factor=1.0, hang_floor_s=0.1, hang_end_s=0.2, hang_first_s=0.2)
with watchdog.Watchdog(guard):
    ctypes.PyDLL(None).sleep(600)  # holds Python's lock
"""


def test_a_process_that_holds_pythons_lock_ends_too():
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Timeout" in done.stderr
