"""Alarms as configured, and stacks from a step that hangs."""

import threading
import time

import pytest

from dapo_jax import config
from dapo_jax.run import guards
from dapo_jax.run.checkpoint import State


def settings(**bounds):
    c = config.base()
    c.guard.accept_min = 0.0
    for name, value in bounds.items():
        c.guard[name] = value
    return c


LOG = {"policy/entropy": 0.5, "response/length_mean": 100.0, "sampling/accept_frac": 0.2}


@pytest.mark.parametrize(
    ("bounds", "alarm"),
    [
        ({}, None),
        ({"entropy_min": 0.4, "entropy_max": 0.6, "length_min": 99.0, "accept_min": 0.2}, None),
        ({"entropy_min": 0.6}, "entropy 0.5 is below 0.6"),
        ({"entropy_max": 0.4}, "entropy 0.5 is above 0.4"),
        ({"length_min": 101.0}, "mean response length 100 is below 101"),
        ({"length_max": 50.0}, "mean response length 100 is above 50"),
        ({"accept_min": 0.25}, "share of problems with mixed groups 0.2 is below 0.25"),
    ],
)
def test_alarms(bounds, alarm):
    assert guards.alarms(settings(**bounds).guard, LOG) == ([alarm] if alarm else [])


def test_a_number_that_is_none_breaks_every_bound():
    log = {"policy/entropy": float("nan")}
    assert len(guards.alarms(settings(entropy_min=0.1).guard, log)) == 1
    assert len(guards.alarms(settings(entropy_max=9.0).guard, log)) == 1


def test_a_collapse_of_acceptance_is_an_alarm_by_default():
    assert guards.alarms(config.base().guard, {"sampling/accept_frac": 0.0})
    assert not guards.alarms(config.base().guard, {})  # nothing was drawn: a warning of its own


def test_alarms_in_a_row_stop_the_run_where_configured():
    c, said = settings(entropy_min=0.6, stop_after=3), []
    state = State({}, None, None, [])
    for step in (1, 2, 3, 4):
        state, _ = guards.count_alarms(c, state._replace(step=step), LOG, said.append)
        assert bool(guards.why_stop(c, state, {})) == (step >= 3)
    assert "4 steps in a row out of the bounds" in guards.why_stop(c, state, {})
    assert [line.split(":")[1] for line in said] == [" step 1", " step 2", " step 4"]
    state, _ = guards.count_alarms(c, state, {"policy/entropy": 0.7}, said.append)
    assert state.alarms_in_row == 0 and not guards.why_stop(c, state, {})
    c.guard.stop_after = 0
    assert not guards.why_stop(c, state._replace(alarms_in_row=99), {})


def hang_for(seconds):
    time.sleep(seconds)


def test_the_watchdog_prints_all_stacks_of_a_step_that_hangs(tmp_path):
    release = threading.Event()
    other = threading.Thread(target=release.wait, name="other")
    other.start()
    with (tmp_path / "stacks").open("w") as file:
        dog = guards.Watchdog(3.0, 0.05, file)
        for _ in range(2):
            with dog.watch("step"):
                hang_for(0.01)
        with dog.watch("evaluation"):  # its first time: no usual time is known
            hang_for(0.2)
        assert (tmp_path / "stacks").read_text() == ""
        with dog.watch("step"):
            hang_for(0.2)
        release.set()
        other.join()
        written = (tmp_path / "stacks").read_text()
        assert "Timeout" in written and "in hang_for" in written
        assert written.count("Thread 0x") >= 2 and "in wait" in written
        with guards.Watchdog(0.0, 0.0, file).watch("step"):  # off
            hang_for(0.01)
        hang_for(0.1)  # nothing is left armed
        assert (tmp_path / "stacks").read_text() == written
