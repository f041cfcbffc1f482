"""A workdir is the run's own, can be written, and has one run at a time; on a disk or in a bucket,
which is a folder behind a stand-in for gcsfs."""

import os
import re
from unittest.mock import Mock

import pytest

from dapo_jax import config
from dapo_jax.checkpoint import workdir
from dapo_jax.data import files


def refused(path) -> str:
    with pytest.raises(ValueError) as error, workdir.hold(path):
        pass
    assert str(error.value).startswith(f"--workdir={path}: ") and "\n" not in str(error.value)
    return str(error.value)


def test_a_new_one_is_made_and_an_old_one_is_taken(tmp_path):
    path = tmp_path / "a" / "b"
    with workdir.hold(path):
        assert sorted(p.name for p in path.iterdir()) == [".lock", "checkpoints"]
    with workdir.hold(path):  # as after a kill before anything was written
        files.write_json(path / "config.json", config.leaves(config.base()))
        (path / "tensorboard").mkdir()
    with workdir.hold(path):
        pass
    (tmp_path / "log.txt").write_text("of another program")
    with workdir.hold(tmp_path):
        pass


def test_what_a_run_would_remove_is_not_touched_in_a_foreign_directory(tmp_path):
    for name in ("metrics.jsonl", "tensorboard", "rollouts", "checkpoints"):
        (tmp_path / name / name).mkdir(parents=True)
        assert f"holds {name} but no config.json of a run" in refused(tmp_path / name)
        assert [p.name for p in (tmp_path / name).iterdir()] == [name]


def test_a_config_that_is_no_run_s(tmp_path):
    for text in ("{", "", "[[", "\xff", "3", "null", '{"hidden_size": 64}'):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        assert "config.json" in refused(tmp_path)
    assert "its config.json is not a run's" in refused(tmp_path)  # the last is a model's


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "rollouts", "checkpoints"])
def test_what_a_run_writes_is_of_its_kind(name, tmp_path):
    files.write_json(tmp_path / "config.json", config.leaves(config.base()))
    for make in (os.mkfifo, lambda path: path.symlink_to(name)):
        make(tmp_path / name)
        assert f"its {name} is no f" in refused(tmp_path)
        (tmp_path / name).unlink()


def test_checkpoints_elsewhere_have_a_lock_of_their_own(tmp_path):
    """Whoever comes by another workdir, or by the workdir whose checkpoints they are. That a lock
    ends with its process: tests/faults/test_system.py."""
    one, two, away = tmp_path / "1", tmp_path / "2", tmp_path / "far" / "away"
    owner = f"another run is at work in it (process {os.getpid()} on "
    refuse = lambda: pytest.raises(ValueError, match=re.escape(owner))
    with workdir.hold(one, str(away)):
        assert owner in refused(one)
        with refuse() as error, workdir.hold(two, str(away)):
            pass
        assert str(error.value).startswith(f"config.checkpoint.directory={away}: another")
        with workdir.hold(two):
            pass
    with workdir.hold(two, str(away)):  # and no longer than that
        pass
    for mine, theirs in ((one / "checkpoints", ""), (one, str(one))):  # one lock for both
        with workdir.hold(one, theirs), refuse(), workdir.hold(two, str(mine)):
            pass
    (tmp_path / "file").write_text("")
    wanted = f"{tmp_path}/file/c"
    wrong = f"^config.checkpoint.directory={wanted}: cannot be written .Not a directory.$"
    with pytest.raises(ValueError, match=wrong), workdir.hold(tmp_path / "run", wanted):
        pass


def test_a_directory_is_used_as_it_is_if_all_hosts_share_it(tmp_path, monkeypatch):
    home = workdir.open_workdir(tmp_path / "a" / "b")
    assert home.local == tmp_path / "a" / "b" and home.local.is_dir()
    assert home.checkpoints == str(tmp_path / "a" / "b" / "checkpoints")
    assert list(home.local.iterdir()) == []  # the probes are gone
    workdir.send(home)
    (tmp_path / "f").write_text("")
    (tmp_path / "l").symlink_to("not_mounted")
    cases = {"f": "is a file", "f/run": "cannot be written .Not a directory."}
    cases |= dict.fromkeys(("l", "l/run"), f"{tmp_path}/l is a link to nothing")
    for name, wrong in cases.items():
        with pytest.raises(ValueError, match=f"--workdir={tmp_path}/{name}: {wrong}"):
            workdir.open_workdir(tmp_path / name)
    # As if process 1 saw another disk.
    gather = lambda value: [value, False if isinstance(value, bool) else value]
    monkeypatch.setattr(workdir.parallel, "meet", gather)
    with pytest.raises(ValueError, match="process 1 does not see what process 0 wrote"):
        workdir.open_workdir(tmp_path / "run")


def test_what_changes_is_sent_and_what_goes_is_deleted(bucket):
    there = bucket / "runs/x"
    sent = lambda: {str(p.relative_to(there)): p.read_text() for p in there.rglob("*.txt")}
    home = workdir.open_workdir("gs://b/runs/x/")
    assert home.checkpoints == "gs://b/runs/x/checkpoints"
    (home.local / "eval/a").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "eval/a/c.txt"):
        (home.local / name).write_text("é")
    workdir.send(home)
    assert sent() == {"a.txt": "é", "b.txt": "é", "eval/a/c.txt": "é"}
    (there / "a.txt").write_text("untouched")
    (home.local / "b.txt").write_text("changed")
    workdir.send(home)
    large = ["checkpoints.damaged/1/large.txt", "checkpoints/1/large.txt", "profile/large.txt"]
    for name in large:
        (there / name).parent.mkdir(parents=True)
        (there / name).write_text("large")

    again = workdir.open_workdir("gs://b/runs/x")
    assert again.local != home.local
    fetched = {str(p.relative_to(again.local)) for p in again.local.rglob("*") if p.is_file()}
    assert fetched == {"a.txt", "b.txt", "eval/a/c.txt"}  # no probe and no checkpoint
    assert (again.local / "a.txt").read_text() == "untouched"
    (again.local / "eval/a/c.txt").unlink()
    workdir.send(again)
    left = {"a.txt": "untouched", "b.txt": "changed"} | dict.fromkeys(large, "large")
    assert sent() == left


def test_a_bucket_without_its_package_says_what_to_install(monkeypatch):
    missing = ImportError("Please install gcsfs to access Google Storage")
    monkeypatch.setattr(type(workdir.place("gs://b", "")), "mkdir", Mock(side_effect=missing))
    with pytest.raises(ValueError, match=r"install gcsfs .*\(pip install 'dapo_jax\[gcs\]'\)"):
        workdir.open_workdir("gs://b/z")
