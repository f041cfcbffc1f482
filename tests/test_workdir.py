"""A workdir is the run's own, can be written, and has one run at a time."""

import json
import os
import subprocess
import sys

import pytest

from dapo_jax import config
from dapo_jax.run import checkpoint, workdir


def refused(path) -> str:
    with pytest.raises(ValueError) as error, workdir.hold(path):
        pass
    assert str(error.value).startswith(f"--workdir={path}: ") and "\n" not in str(error.value)
    return str(error.value)


def test_a_new_one_is_made_and_an_old_one_is_taken(tmp_path):
    path = tmp_path / "a" / "b"
    with workdir.hold(path):
        assert [p.name for p in path.iterdir()] == [".lock"]
        checkpoint.dump_json(path / "config.json", config.leaves(config.base()))
        (path / "tensorboard").mkdir()
    with workdir.hold(path):
        pass


def test_files_of_others_beside_ours_are_no_matter(tmp_path):
    (tmp_path / "log.txt").write_text("mine")
    with workdir.hold(tmp_path):
        pass


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "rollouts", "checkpoints"])
def test_what_a_run_would_remove_is_not_touched_in_a_foreign_directory(tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"holds {name} but no config.json of a run" in refused(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_model_directory_keeps_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    assert "its config.json is not a run's" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[[", "\xff", "3", "null"])
def test_a_config_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(tmp_path)


def test_a_file_and_a_bucket(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(tmp_path / "file")
    assert "checkpoint.directory=gs://" in refused("gs://bucket/run")


def test_a_second_holder_is_refused_and_the_lock_dies_with_its_process(tmp_path):
    code = "import sys, pathlib, time; from dapo_jax.run import workdir\n"
    code += (
        "with workdir.hold(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with workdir.hold(tmp_path):
        error = refused(tmp_path)  # by this process, through another descriptor
        assert f"another run is at work in it (process {os.getpid()} on " in error
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    assert f"process {other.pid} on " in refused(tmp_path)
    other.kill()
    other.wait()
    other.stdout.close()
    assert (tmp_path / ".lock").exists()
    with workdir.hold(tmp_path):
        pass
