"""Many runs: each made once, in order, in processes of their own; failures name their log."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ports import wait_until
from test_alarm_command import running

from dapo_jax.lab.experiments import pool
from dapo_jax.lab.experiments.pool import Task

# Tasks stand at module level, as workers import them by name.


def record(folder, *arguments):
    """Counts its calls in its folder; the result says where it ran."""
    with (folder / "calls.txt").open("a") as file:
        file.write("x")
    print("printed by", folder.name)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    return {"arguments": list(arguments), "pid": os.getpid(), "cores": cores}


def read_other(folder, other):
    return json.loads((folder.parent / other / "result.json").read_text())["result"]["pid"]


def fail(folder):
    print("about to fail")
    raise OSError(28, "disk full")


def calls(out, name) -> int:
    file = out / name / "calls.txt"
    return len(file.read_text()) if file.exists() else 0


def test_processes_pinned_logged_in_order_and_made_once(tmp_path):
    before = dict(os.environ)
    tasks = [
        Task("last", read_other, ("first",), after=("first",)),
        Task("first", record, (1,)),
        Task("deep/one", record, (2, {"lr": 0.1})),
    ]
    got = pool.run_all(tasks, tmp_path, jobs=2)
    assert list(got) == ["last", "first", "deep/one"]  # as given, not as finished
    assert got["last"] == got["first"]["pid"] != os.getpid()
    assert len(got["first"]["cores"]) == 1
    assert (tmp_path / "first" / "log.txt").read_text() == "printed by first\n"
    assert dict(os.environ) == before
    # Again, with one task more: only that one runs, and what was there is read.
    more = [*tasks, Task("new", record)]
    again = pool.run_all(more, tmp_path, jobs=2)
    assert {k: again[k] for k in got} == got
    assert [calls(tmp_path, n) for n in ("first", "deep/one", "new")] == [1, 1, 1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_failure_is_named_and_the_rest_made_by_the_next_call(tmp_path, jobs):
    tasks = lambda bad: [
        Task("good", record), Task("bad", bad), Task("after", record, after=("bad",))
    ]  # fmt: skip
    with pytest.raises(OSError if jobs == 1 else RuntimeError, match="disk full") as error:
        pool.run_all(tasks(fail), tmp_path, jobs)
    if jobs == 2:
        log = tmp_path / "bad" / "log.txt"
        assert str(error.value) == f"bad: [Errno 28] disk full (see {log})"
        assert "about to fail" in log.read_text() and "Traceback" in log.read_text()
    assert calls(tmp_path, "good") == 1 and calls(tmp_path, "after") == 0
    assert set(pool.run_all(tasks(record), tmp_path, jobs=1)) == {"good", "bad", "after"}
    assert [calls(tmp_path, n) for n in ("good", "bad", "after")] == [1, 1, 1]


def test_other_arguments_are_refused_before_anything_runs(tmp_path):
    made = pool.run_all([Task("a", record, ({"lr": 0.1, "steps": 3}, 7))], tmp_path, jobs=1)
    assert made["a"]["arguments"][1] == 7 and made["a"]["pid"] == os.getpid()  # in this process
    changed = [Task("b", record), Task("a", record, ({"lr": 0.2, "steps": 3}, 7))]
    with pytest.raises(ValueError, match=r"a: was made with other settings \(lr 0.1, now 0.2\)"):
        pool.run_all(changed, tmp_path, jobs=1)
    assert calls(tmp_path, "b") == 0 and calls(tmp_path, "a") == 1


@pytest.mark.parametrize(
    "tasks, words",
    [
        ([Task("a", record), Task("a", record, (1,))], "several tasks want the folder a"),
        ([Task("a", record, after=("z",))], "tasks wait for z, which none makes"),
        ([Task("a", record, after=("b",)), Task("b", record, after=("a",))], "wait for each other"),
    ],
)
def test_mistakes_in_the_list_of_tasks(tmp_path, tasks, words):
    with pytest.raises(ValueError, match=words):
        pool.run_all(tasks, tmp_path, jobs=2)
    assert list(tmp_path.iterdir()) == []


def slow_run(folder):
    """A training run in miniature: at SIGTERM it saves, and leaves without having finished."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    (folder / "pid.txt").write_text(str(os.getpid()))
    while not stopped:
        time.sleep(0.05)
    (folder / "saved.txt").write_text("saved")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise RuntimeError("cut off")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc to look processes up in")
def test_processes_leave_when_their_parent_is_killed(tmp_path):
    code = (
        "from dapo_jax.lab.experiments import pool; import test_pool as t;"
        "pool.run_all([pool.Task(n, t.slow_run) for n in 'ab'], {!r}, jobs=2)"
    )
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here)])
    parent = subprocess.Popen(
        [sys.executable, "-c", "if __name__ == '__main__':\n " + code.format(str(tmp_path))],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / n / "pid.txt" for n in "ab"]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files))
    parent.kill()
    parent.wait()
    pids = [int(f.read_text()) for f in files]
    wait_until(lambda: not any(map(running, pids)))
    assert all((tmp_path / n / "saved.txt").exists() for n in "ab")
    assert not list(tmp_path.glob("*/result.json"))
