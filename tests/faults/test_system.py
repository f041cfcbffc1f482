"""Full disks, jumping clocks, a second run: each with its message."""

import signal
import subprocess

import harness
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own; the test is skipped where none may be mounted."""
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path / "disk")]
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


def test_a_clock_that_jumps_changes_nothing(whole, server, tmp_path):
    faults = ["clock_jumps", "killed=8"]
    server.run(tmp_path / "run", faults=faults, code=-signal.SIGKILL)
    server.run(tmp_path / "run", faults=["clock_jumps"])
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
