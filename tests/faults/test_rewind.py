"""A branch and a rewind come to the same bits as the run itself, where nothing is changed."""

import json
import shutil
import signal

import harness
import pytest

pytestmark = pytest.mark.slow

ALL = "--config.init_state=all"


def learned(workdir, step: int) -> tuple:
    """Arrays, carried groups and counters of a checkpoint, without its config."""
    saved = harness.saved(workdir, step)
    state = json.loads(saved["state"])
    return saved["arrays"], {k: v for k, v in state.items() if k != "config"}


def later(found: dict[str, bytes], step: int) -> dict[str, bytes]:
    return {k: v for k, v in found.items() if int(k.partition("step_")[2][:6]) > step}


def assert_same_from(a, b, step: int) -> None:
    assert harness.newest(a) == harness.newest(b) == 12
    assert learned(a, 12) == learned(b, 12)
    assert harness.records(a) == harness.records(b)
    of_a, of_b = (later(harness.files(w, "rollouts", "eval"), step) for w in (a, b))
    assert of_a == of_b and len(of_a) >= 12 - step


def test_a_branch_of_a_step(whole, server, tmp_path):
    for i, named in enumerate(("{}@8", "{}/checkpoints@8", "{}/checkpoints/8")):
        workdir = tmp_path / str(i)
        said = server.run(workdir, f"--config.init_from={named.format(whole)}", ALL)
        assert f"a branch of {whole}/checkpoints step 8" in said
        assert harness.step_resumed_from(said) == 8 and "has no record of" not in said
        assert_same_from(whole, workdir, 8)


def test_a_branch_is_safe_from_what_the_other_run_does(whole, server, tmp_path):
    """Killed before a checkpoint of its own is due, it goes on from its first step."""
    shutil.copytree(whole, tmp_path / "origin")
    command = (f"--config.init_from={tmp_path}/origin@10", ALL, "--config.checkpoint.every=0")
    # The save of the first step is awaited by then.
    server.run(tmp_path / "run", *command, faults=["killed=2"], code=-signal.SIGKILL)
    assert harness.newest(tmp_path / "run") == 10
    shutil.rmtree(tmp_path / "origin")
    assert "a branch" not in server.run(tmp_path / "run", *command)
    assert_same_from(whole, tmp_path / "run", 10)


def test_a_branch_with_a_change_goes_another_way(whole, server, tmp_path):
    init = f"--config.init_from={whole}@8"
    said = server.run(tmp_path / "run", init, ALL, "--config.optim.lr=0.01")
    assert "changed (allowed): config.optim.lr: " in said
    assert harness.records(tmp_path / "run")[:9] == harness.records(whole)[:9]
    assert learned(tmp_path / "run", 12)[0] != learned(whole, 12)[0]


def test_weights_alone_begin_a_new_run(whole, server, tmp_path):
    server.run(tmp_path, f"--config.init_from={whole}@8", "--config.steps=0")
    ((new, _), state), ((old, _), _) = learned(tmp_path, 0), learned(whole, 8)
    assert new["params"] == old["params"] and new["opt_state"] != old["opt_state"]
    assert state["updates"] == 0


def test_rewound_it_comes_to_the_same_bits(whole, server, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    said = server.run(workdir, "--rewind=7", code=1)
    assert said == f"error: {workdir}/checkpoints: no step 7; it has 8, 10, 12\n"
    assert not (workdir / "rewound").exists()
    before = harness.files(workdir, "rollouts", "eval")
    for aside in ("to_8", "to_8_2"):
        said = server.run(workdir, "--rewind=8")
        assert said.startswith("back at step 8; 2 later checkpoints are kept in ")
        assert harness.newest(workdir) == 8
        kept = workdir / "rewound" / aside
        assert harness.newest(kept) == 12 and harness.records(kept) == harness.records(whole)
        assert harness.files(kept, "rollouts", "eval") == later(before, 8)
        server.run(workdir)
        harness.assert_same_run(whole, workdir)
