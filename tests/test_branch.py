"""What a branch takes along, and what is rewound; tests/faults/test_rewind.py has whole runs."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.checkpoint import branch, checkpoint, resume, workdir
from dapo_jax.dapo.state import State

COPIED = ["config.json", "metrics.jsonl"]


def files_of(*steps: int) -> list[str]:
    made = ("checkpoints/{0}/arrays", "export/step_{0}/weights", "rollouts/step_{0:06d}.jsonl")
    return [file.format(step) for step in steps for file in made]


def made(run: pathlib.Path, *steps: int) -> pathlib.Path:
    for file in [*COPIED, *files_of(*steps)]:
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("")
    (run / "config.json").write_text(json.dumps(config.leaves(config.base())))
    return run


def names(folder) -> list[str]:
    found = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return sorted(f for f in found if not f.endswith(".lock"))


@pytest.fixture
def begun(monkeypatch):
    """State of a run that begins from another one's step, whose problems are the same or not."""

    def begin(same: bool, steps="checkpoints", workdir=None) -> State:
        found = State({}, (), by_problem={"rate_P": np.ones(3)})
        stubs = dict(reader=contextlib.nullcontext, read_state=lambda *_: {})
        for name, stub in (stubs | dict(restore=lambda *_: found)).items():
            monkeypatch.setattr(checkpoint, name, stub)
        monkeypatch.setattr(resume, "inputs", lambda *_: {})
        monkeypatch.setattr(resume, "check", lambda *_: same)
        source = SimpleNamespace(steps=steps, step=3)
        return branch.state(config.base(), None, source, None, None, workdir, print)

    return begin


def test_what_is_known_of_problems_goes_on_with_the_same_problems(begun):
    assert begun(True).by_problem and not begun(False).by_problem


def test_a_record_that_was_cut_while_it_was_copied_is_copied_again(begun, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/metrics.jsonl").write_text("all of it")
    (tmp_path / "metrics.jsonl").write_text("all")
    begun(True, f"{tmp_path}/old/checkpoints", tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "all of it"


def test_what_is_rewound_in_a_bucket_is_not_fetched_again(bucket, monkeypatch, capsys):
    run = made(bucket / "run", 4, 8, 12, 16)
    monkeypatch.setattr(checkpoint, "find_step", lambda directory, step: step)
    before = names(run)
    for to, later in ((8, (12, 16)), (4, (8,))):
        branch.rewind(config.base(), "gs://b/run", to)
        assert f"back at step {to}; {len(later)} later checkpoints" in capsys.readouterr().out
        assert names(run / "rewound" / f"to_{to}") == sorted([*COPIED, *files_of(*later)])
        before = sorted(set(before) - set(files_of(*later)))
        assert [n for n in names(run) if not n.startswith("rewound")] == before
    home = workdir.open_workdir("gs://b/run")
    assert names(home.local) == [*COPIED, "rollouts/step_000004.jsonl"]
    workdir.send(home)
    assert (run / "rewound" / "to_8" / "checkpoints" / "12").is_dir()
    branch.rewind(config.base(), "gs://b/run", 4)  # once more: under another name
    assert names(run / "rewound" / "to_4_2") == COPIED


def test_what_is_linked_from_another_disk_is_rewound(tmp_path, monkeypatch):
    run, disk, rename = made(tmp_path / "run", 4, 8), tmp_path / "disk", os.rename
    disk.mkdir()
    for name in ("checkpoints", "export", "rollouts"):
        shutil.move(run / name, disk / name)
        (run / name).symlink_to(disk / name)

    def on_one_disk(*paths) -> None:
        if len({disk in pathlib.Path(path).resolve().parents for path in paths}) > 1:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(*paths)

    monkeypatch.setattr(os, "rename", on_one_disk)
    monkeypatch.setattr(checkpoint, "find_step", lambda directory, step: step)
    branch.rewind(config.base(), run, 4)
    large = [n for n in files_of(8) if not n.startswith("rollouts")]
    assert names(disk / "rewound" / "to_4") == sorted(large)
    assert names(run / "rewound") == sorted(f"to_4/{n}" for n in [*COPIED, files_of(8)[-1]])
