"""A damaged checkpoint is never restored: the run says so and goes on from the one before."""

import pathlib
import random
import shutil

import harness
import jax
import numpy as np
import pytest
from levels import nightly

from dapo_jax import build
from dapo_jax.checkpoint import checkpoint, groups, seal
from dapo_jax.run import begin

pytestmark = pytest.mark.slow

# What changed bytes in these two can do is nothing, or be noticed.
UNREAD = (seal._COMMITTED, seal._METADATA)


@pytest.fixture(scope="module")
def run(whole, tmp_path_factory):
    """(checkpoints of steps 8, 10, 12; what restores the newest whole one; what is in them)."""
    c = harness.get_config()
    c.mesh.data, c.mesh.fsdp = 4, 2
    text = build.load_text(c, tmp_path_factory.mktemp("data"), None)
    machine = build.build_machine(c, text.tokenizer.vocab_size, text.tokenizer.stop_ids, None)

    def restore(directory):
        """(the state, everything that was said)"""
        said = []
        accept = lambda saved: None
        state, resumed = begin.start_state(c, text, machine, directory, accept, said.append)
        assert resumed
        return state, "\n".join(said)

    copy, states = tmp_path_factory.mktemp("states") / "checkpoints", {}
    shutil.copytree(whole / "checkpoints", copy)
    for step in (12, 10):
        states[step], said = restore(copy)
        assert states[step].counters.step == step and not said
        shutil.rmtree(copy / str(step))
    return whole / "checkpoints", restore, states


def same(a, b) -> bool:
    numbers = lambda s: jax.device_get((s[:3], groups.flatten(s.carried), s[4:]))
    pairs = zip(*(jax.tree.leaves(numbers(s)) for s in (a, b)), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def harm(file: pathlib.Path, damage, rng: random.Random) -> bool:
    """Whether the file is another now."""
    before = file.read_bytes()
    after = damage(before, rng)
    file.write_bytes(after)
    return after != before


def damaged_copies(directory, tmp_path, damage):
    """(name, a copy in which that file of step 12 is damaged) for each file; those that no run
    reads are damaged in four ways."""
    files = sorted(p for p in (directory / "12").rglob("*") if p.is_file())
    assert len(files) > 20
    for file in files:
        for seed in range(4 if file.name in UNREAD else 1):
            copy = tmp_path / f"{file.name}_{seed}" / "checkpoints"
            shutil.copytree(directory, copy)
            name = file.relative_to(directory / "12").as_posix()
            if harm(copy / "12" / name, damage, random.Random(f"{name}{seed}")):
                yield name, copy
            shutil.rmtree(copy.parent)


@pytest.mark.parametrize("damage", [nightly(truncate), flip])  # its size tells of a truncated one
def test_any_damaged_file_sends_the_run_to_the_checkpoint_before(run, tmp_path, damage):
    directory, restore, states = run
    for name, copy in damaged_copies(directory, tmp_path, damage):
        state, said = restore(copy)
        with checkpoint.manager(copy, keep=2) as m:  # as the run goes on to do
            assert m.latest_step() == state.counters.step
        if damage is flip and name in UNREAD and state.counters.step == 12:
            assert same(state, states[12]) and not said
            continue
        assert state.counters.step == 10 and same(state, states[10]), name
        assert "checkpoint of step 12 is damaged: " in said and "going on from step 10" in said
        assert name in said or name == seal.SEAL  # it may now accuse another file
        assert not (copy / "12").exists()
        assert (copy.parent / "checkpoints.damaged" / "12").is_dir()


@pytest.mark.parametrize("damage", [truncate, nightly(flip)])
def test_the_content_alone_catches_what_would_restore_wrongly(run, tmp_path, monkeypatch, damage):
    """As if each file were too large to be hashed, and without sizes."""
    directory, restore, states = run
    monkeypatch.setattr(seal, "check", lambda step_dir: None)
    caught = 0
    for name, copy in damaged_copies(directory, tmp_path, damage):
        state, said = restore(copy)
        assert same(state, states[state.counters.step]), name
        assert (state.counters.step == 12) == (not said)
        caught += state.counters.step == 10
    assert caught > 5


def test_two_damaged_ones_and_no_whole_one(run, tmp_path):
    """A run of weeks must not begin again because its checkpoints cannot be read: it stops and
    changes nothing."""
    directory, restore, _ = run
    copy = tmp_path / "checkpoints"
    shutil.copytree(directory, copy)
    for step in ("10", "12"):
        harm(copy / step / "state" / "metadata", flip, random.Random(0))
    state, said = restore(copy)
    assert state.counters.step == 8 and said.count("is damaged: ") == 2
    (copy / "8" / "arrays" / "manifest.ocdbt").unlink()
    before = sorted(copy.rglob("*"))
    with pytest.raises(checkpoint.Damaged, match="no checkpoint is whole.*begin again") as error:
        restore(copy)
    assert "\n" not in str(error.value)
    assert sorted(copy.rglob("*")) == before


def test_a_run_over_a_damaged_checkpoint_ends_with_the_same_bits(whole, server, tmp_path):
    """And an evaluation of it, which writes to its workdir, takes the newest whole one."""
    workdir, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(whole, workdir)
    harm(workdir / "checkpoints" / "12" / "arrays" / "manifest.ocdbt", flip, random.Random(1))
    shutil.copytree(workdir, other)
    assert "step 10" in server.run(other, "--k=2", module="evaluate")
    named = f"--checkpoint={other}/checkpoints/12"
    said = server.run(other, "--k=2", named, module="evaluate", code=1)
    assert "error: " in said and "step 12: damaged: arrays/manifest.ocdbt" in said
    assert "Traceback" not in said
    said = server.run(workdir)
    assert "warning: checkpoint of step 12 is damaged: arrays/manifest.ocdbt" in said
    assert harness.step_resumed_from(said) == 10
    harness.assert_same_run(whole, workdir)
