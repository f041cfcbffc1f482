"""Full disks, jumping clocks, other device counts, a second run: each with its message."""

import json
import shutil
import signal
import subprocess
import time

import harness
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path, request):
    """A small file system of its own; the test is skipped where none may be mounted."""
    (tmp_path / "disk").mkdir()
    options = getattr(request, "param", "size=8m")
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path / "disk")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield tmp_path / "disk"
    subprocess.run(["umount", "-l", tmp_path / "disk"], check=True)


def test_a_full_disk_costs_no_step_and_no_checkpoint(whole, server, disk):
    """Full from step 3 to 6: the save of step 4 and what was logged meanwhile come later."""
    said = server.run(disk / "run", faults=["full_disk"])
    assert "a checkpoint could not be saved (failure 1 in a row): " in said
    assert "No space left" in said or "RESOURCE_EXHAUSTED" in said
    assert "metrics.jsonl: No space left on device; records wait in memory" in said
    harness.assert_same_run(whole, disk / "run")


def test_a_disk_that_stays_full_is_told_in_lines(server, disk):
    """A warning a failed save at first, and no stack; on it, a start names what it cannot write.
    Training goes on to the end, then says so. With room the same command does."""
    flags = ("--config.checkpoint.every=1", "--config.steps=24")
    said = server.run(disk / "run", *flags, faults=["full_for_good", "impatient"], code=1)
    assert not any(word in said for word in ("Traceback", "Event loop", "never retrieved"))
    assert f"(failure 1 in a row): {disk}/run/checkpoints: " in said
    lines = said.splitlines()
    warnings = [line for line in lines if "a checkpoint could not be saved" in line]
    assert len(warnings) == 5 and len(lines) < 150  # of the failures 1, 2, 4, 8, 16
    (error,) = (line for line in lines if "error: " in line)
    assert "error: step 24 could not be saved in " in error
    assert "; the newest checkpoint is of step 2; make room and give the same comm" in error
    last = server.run(disk / "run", *flags, code=1).splitlines()[-1]
    assert last.startswith("error: ") and f"No space left on device: '{disk}/run/" in last
    (disk / "run" / "filler").unlink()
    said = server.run(disk / "run", *flags)
    assert harness.step_resumed_from(said) == 2 and "done: 24 steps" in said
    assert len(harness.records(disk / "run")) == 25


def test_killed_while_the_disk_is_full(whole, server, disk):
    """The last good checkpoint is still there."""
    killed = -signal.SIGKILL  # when it has been full for two steps
    server.run(disk / "run", faults=["full_for_good", "killed_in_6"], code=killed)
    assert harness.newest(disk / "run") == 2
    (disk / "run" / "filler").unlink()
    assert harness.step_resumed_from(server.run(disk / "run")) == 2
    harness.assert_same_run(whole, disk / "run")


@pytest.mark.parametrize("disk", ["size=1m,ro"], indirect=True)
def test_a_read_only_workdir(server, disk):
    said = server.run(disk / "run", code=1)
    assert said.strip() == f"error: --workdir={disk}/run: cannot be written (Read-only file system)"


def test_a_clock_that_jumps_changes_nothing(whole, server, tmp_path):
    faults = ["clock_jumps", "killed_in_8"]
    server.run(tmp_path / "run", faults=faults, code=-signal.SIGKILL)
    server.run(tmp_path / "run", faults=["clock_jumps"])
    harness.assert_same_run(whole, tmp_path / "run")


def test_eight_devices_to_one_two_four_and_back(server, tmp_path):
    """The checkpoint itself, and what an evaluation of it scores, do not know the devices."""
    start = tmp_path / "start"
    mesh = ("--config.mesh.fsdp=-1", "--config.steps=2")
    server.run(start, *mesh, devices=8)
    before = params(start, 2), evaluated(start, 2)
    for devices in (1, 2, 4):
        # A step on `devices`, then one on eight again, at lr 0: parameters must not move.
        workdir = tmp_path / f"on_{devices}"
        shutil.copytree(start, workdir)
        still = ("--allow_config_change", "--config.optim.lr=0.0", "--config.eval.every=1")
        for step, n in ((3, devices), (4, 8)):
            said = server.run(workdir, *still, f"--config.steps={step}", devices=n)
            assert harness.step_resumed_from(said) == step - 1
            assert (params(workdir, step), evaluated(workdir, step)) == before


def params(workdir, step) -> dict[str, int]:
    """The checksums in a checkpoint."""
    state = json.loads((workdir / "checkpoints" / str(step) / "state" / "metadata").read_text())
    return {k: n for k, n in state["content"]["arrays"].items() if k.startswith("params.")}


def evaluated(workdir, step) -> str:
    return (workdir / "eval" / f"step_{step:06d}.jsonl").read_text()


def test_ctrl_c_saves_and_a_second_one_ends_at_once(whole, server, tmp_path):
    endless = "--config.steps=1000000"
    run = server.start(tmp_path / "run", endless)
    assert run.wait_for("rollout", 5)
    run.send_signal(signal.SIGINT)
    assert run.wait() == 0
    step = harness.newest(tmp_path / "run")
    saved = f"terminated after step {step}, saved; the same"
    assert step >= 4 and (saved in run.said() or "terminated within a step; the" in run.said())
    run = server.start(tmp_path / "run", endless, "--config.checkpoint.every=0")
    assert run.wait_for("rollout", 2)
    run.send_signal(signal.SIGINT)
    while "interrupt: " not in run.said():  # two at once may count as one
        time.sleep(0.001)
    run.send_signal(signal.SIGINT)
    assert run.wait() in (0, 130)  # the step may have been over before
    assert "Traceback" not in run.said()
    shutil.rmtree(tmp_path / "run")
    run = server.start(tmp_path / "run")
    assert run.wait_for("start-up")
    run.send_signal(signal.SIGINT)
    assert run.wait() == 130 and run.said().splitlines()[-1] == "interrupted"
    assert "Traceback" not in run.said()
    server.run(tmp_path / "run")
    harness.assert_same_run(whole, tmp_path / "run")


def test_a_second_run_is_refused_until_the_first_is_dead(server, tmp_path):
    """In its workdir, and on its checkpoints; then it goes on from them, and says that it does."""
    elsewhere = f"--config.checkpoint.directory={tmp_path / 'elsewhere'}"
    first = server.start(tmp_path / "1", elsewhere, "--config.steps=1000000")
    assert first.wait_for("commit", 2)
    for workdir, what in (
        (tmp_path / "1", f"--workdir={tmp_path}/1"),
        (tmp_path / "2", elsewhere[2:]),
    ):
        said = server.run(workdir, elsewhere, code=1)
        assert said.startswith(f"error: {what}: another run is at work in it (process ")
        assert f"(process {first.pid} on " in said and said.count("\n") == 1
    first.kill()
    assert first.wait() == -signal.SIGKILL
    said = server.run(tmp_path / "2", elsewhere)  # the locks have died with it
    step = harness.step_resumed_from(said)
    assert f"warning: {tmp_path}/2/metrics.jsonl: has no record of step {step}, from whose" in said
