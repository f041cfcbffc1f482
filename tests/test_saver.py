"""A failed save is told, tried again after the next step, and takes nothing away."""

import errno
import math
import re
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.checkpoint import checkpoint, saver, seal
from dapo_jax.dapo.state import State


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full for `disk.full` tries; noticed at the last moment of a save."""
    disk, real = SimpleNamespace(full=0), seal.write

    def write(step_dir):
        if disk.full:
            disk.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(step_dir)

    monkeypatch.setattr(seal, "write", write)
    monkeypatch.setattr(saver, "_LAST_WAIT_S", 0.0)
    return disk


def state(step):
    return State({"w": jnp.full(3, step)}, {"m": jnp.zeros(2)}).count(step=step)


def open_saver(directory, said, on_saved=print, **options):
    c = config.base()
    c.checkpoint.update(options)
    return saver.Saver(directory, c, {}, said.append, on_saved)


def steps(directory):
    return checkpoint.steps(directory)[0]


def test_a_step_that_is_removed_while_it_is_read_is_not_there(tmp_path, monkeypatch):
    """By the run that writes there: it keeps the newest ones."""
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()

    def check(step_dir, also=lambda: None):
        if step_dir.name == "1":
            step_dir.rmdir()
            also()
            raise FileNotFoundError

    monkeypatch.setattr(checkpoint.seal, "check", check)
    assert checkpoint.steps(tmp_path) == ([2], {})
    (tmp_path / "2").rename(tmp_path / "1")  # the only one, until its run has saved again
    monkeypatch.setattr(checkpoint.seal, "check", lambda at: check(at, (tmp_path / "3").mkdir))
    assert checkpoint.find_step(tmp_path) == 3


def test_seals_of_other_steps_are_not_looked_at(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        (tmp_path / str(step)).mkdir()
    looked = []

    def check(step_dir):
        looked.append(step_dir.name)
        if step_dir.name == "3":
            raise seal.Damaged("cut")

    monkeypatch.setattr(seal, "check", check)
    assert checkpoint.find_step(tmp_path) == 2 and looked == ["3", "2"]
    assert checkpoint.find_step(tmp_path, 1) == 1 and looked[2:] == ["1"]
    with pytest.raises(seal.Damaged, match="step 3: damaged: cut"):
        checkpoint.find_step(tmp_path, 3)
    with pytest.raises(ValueError, match="no step 4; it has 1, 2, 3$"):
        checkpoint.find_step(tmp_path, 4)


def test_a_full_disk_costs_no_checkpoint_and_the_next_step_is_saved(tmp_path, disk):
    said, saved = [], []
    with open_saver(tmp_path / "c", said, saved.append) as s:
        s.after_step(state(1), due=True)
        s.after_step(state(2), due=True)
        s.after_step(state(3), due=False)
        assert steps(tmp_path / "c") == [2, 1] and not said
        disk.full = math.inf
        for step in range(4, 9):
            s.after_step(state(step), due=step == 4)
        assert steps(tmp_path / "c") == [2, 1]
        assert re.findall(r"failure (\d+) in a row", "".join(said)) == ["1", "2", "4"]
        assert "No space left on device" in said[0]
        s._settle()  # the save of step 8 has failed for sure
        disk.full = 0
        s.after_step(state(9), due=False)
        s.after_step(state(10), due=False)
        assert steps(tmp_path / "c") == [9, 2]
        s.after_step(state(11), due=False)  # and is content
        assert steps(tmp_path / "c") == [9, 2] and saved == [1, 2, 9]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["2", "9"]


@pytest.mark.parametrize(
    ("where", "value"), [("params", np.nan), ("params", -np.inf), ("opt_state", np.inf)]
)
def test_what_is_not_finite_is_never_saved(tmp_path, value, where):
    """It ends the run and takes no place of a good one."""
    broken = state(3)._replace(**{where: {"w": jnp.ones(3), "z": jnp.array([1.0, value])}})
    match = rf"step 3 is not saved in .*: 1 of \d arrays hold NaN or infinity, {where}.z the first"
    match += "; .* of step 2: lower optim.lr"
    for save in (saver.Saver.last, lambda s, state: s.after_step(state, due=True)):
        with pytest.raises(checkpoint.NotFinite, match=match), open_saver(tmp_path, []) as s:
            s.after_step(state(2), due=True)
            save(s, broken)
        assert steps(tmp_path) == [2]


def test_the_last_save_is_tried_several_times(tmp_path, disk):
    """What a killed save has left is removed first."""
    (tmp_path / "7.orbax-checkpoint-tmp" / "arrays").mkdir(parents=True)
    disk.full = saver._LAST_TRIES - 1
    with open_saver(tmp_path, []) as s:
        s.last(state(8))
    assert [p.name for p in tmp_path.iterdir()] == ["8"] and disk.full == 0


@pytest.mark.parametrize("full", [0, 1])
def test_a_save_that_runs_when_the_run_leaves_is_awaited_and_ends_nothing(tmp_path, disk, full):
    disk.full, said, safe = full, [], []
    with open_saver(tmp_path, said, safe.append) as saver:
        saver.after_step(state(1), due=True)
    assert len(said) == full and safe == steps(tmp_path) == [1] * (not full)


def test_a_last_save_that_fails_says_what_there_is(tmp_path, disk):
    match = "step 3 could not be saved in .* is of step 1; make room"
    with pytest.raises(OSError, match=match), open_saver(tmp_path, []) as s:
        s.after_step(state(1), due=True)
        s.after_step(state(2), due=False)
        disk.full = saver._LAST_TRIES
        s.last(state(3))
    assert disk.full == 0
    assert steps(tmp_path) == [1]
    given = state(4)
    given.params["w"].delete()  # by an update that was cut off
    assert checkpoint.is_there(state(4)) and not checkpoint.is_there(given)


def test_newest_every_and_best_are_kept(tmp_path):
    scores = {1: 0.9, 2: None, 3: 0.1, 4: None, 5: 0.5, 6: None, 7: 0.2, 8: None, 9: None}
    for last, kept in ((7, [7, 6, 4, 1]), (9, [9, 8, 4, 1])):  # the second after a restart
        with open_saver(tmp_path, [], keep=2, keep_every=4, keep_best=1) as s:
            for step in range(last - 1 if last == 9 else 1, last + 1):
                s.after_step(state(step), True, scores[step])
        assert steps(tmp_path) == kept


def test_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """The save is still being written when `after_step` has returned."""
    gate, real = threading.Event(), seal.write

    def write(step_dir):
        assert gate.wait(60)
        real(step_dir)

    monkeypatch.setattr(seal, "write", write)
    with open_saver(tmp_path, []) as s:
        s.after_step(state(1), due=True)
        assert steps(tmp_path) == []
        gate.set()
    assert steps(tmp_path) == [1]
