"""What is rewound in a bucket stays there; tests/faults/test_rewind.py has whole runs."""

import json

import pytest

from dapo_jax import config
from dapo_jax.checkpoint import branch, checkpoint, workdir


@pytest.fixture
def run(bucket, monkeypatch):
    """A run in a bucket with checkpoints of steps 4, 8 and 12."""
    home = bucket / "run"
    for step in (4, 8, 12):
        (home / "checkpoints" / str(step)).mkdir(parents=True)
        (home / "checkpoints" / str(step) / "arrays").write_text(f"{step}")
        (home / "export" / f"step_{step}").mkdir(parents=True)
        (home / "export" / f"step_{step}" / "weights").write_text(f"{step}")
        (home / "rollouts").mkdir(exist_ok=True)
        (home / "rollouts" / f"step_{step:06d}.jsonl").write_text(f"{step}")
    (home / "config.json").write_text(json.dumps(config.leaves(config.base())))
    (home / "metrics.jsonl").write_text("record")
    whole = lambda directory, step: step if step in (4, 8, 12) else pytest.fail("another step")
    monkeypatch.setattr(checkpoint, "find_step", whole)
    return home


def names(folder) -> list[str]:
    found = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return sorted(f for f in found if not f.endswith(".lock"))


def test_what_is_rewound_in_a_bucket_is_not_fetched_again(run, capsys):
    branch.rewind(config.base(), "gs://b/run", 8)
    branch.rewind(config.base(), "gs://b/run", 4)
    assert "back at step 4; 1 later checkpoints" in capsys.readouterr().out
    kept = ["config.json", "metrics.jsonl"]
    assert names(run) == [
        "checkpoints/4/arrays",
        *kept[:1],
        "export/step_4/weights",
        *kept[1:],
        *[
            f"rewound/to_{to}/{n}"
            for to, later in ((4, 8), (8, 12))
            for n in (
                f"checkpoints/{later}/arrays",
                *kept[:1],
                f"export/step_{later}/weights",
                *kept[1:],
                f"rollouts/step_{later:06d}.jsonl",
            )
        ],
        "rollouts/step_000004.jsonl",
    ]
    home = workdir.open_workdir("gs://b/run")
    assert names(home.local) == [*kept, "rollouts/step_000004.jsonl"]
    workdir.send(home)
    assert (run / "rewound" / "to_8" / "checkpoints" / "12").is_dir()


def test_back_to_the_same_step_twice(run):
    for name in ("to_8", "to_8_2", "to_8_3"):
        branch.rewind(config.base(), "gs://b/run", 8)
        assert (run / "rewound" / name / "metrics.jsonl").exists()
