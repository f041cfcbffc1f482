"""What is rewound in a bucket stays there; tests/faults/test_rewind.py has whole runs."""

import json

import pytest

from dapo_jax import config
from dapo_jax.checkpoint import branch, checkpoint, workdir

COPIED = ["config.json", "metrics.jsonl"]


@pytest.fixture
def run(bucket, monkeypatch):
    """A run in a bucket with checkpoints of steps 4, 8 and 12."""
    home = bucket / "run"
    for step in (4, 8, 12):
        made = (f"checkpoints/{step}/arrays", f"export/step_{step}/weights")
        for file in (*made, f"rollouts/step_{step:06d}.jsonl"):
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(f"{step}")
    (home / "config.json").write_text(json.dumps(config.leaves(config.base())))
    (home / "metrics.jsonl").write_text("record")
    whole = lambda directory, step: step if step in (4, 8, 12) else pytest.fail("another step")
    monkeypatch.setattr(checkpoint, "find_step", whole)
    return home


def names(folder) -> list[str]:
    found = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return sorted(f for f in found if not f.endswith(".lock"))


def test_what_is_rewound_in_a_bucket_is_not_fetched_again(run, capsys):
    before = names(run)
    for to, later in ((8, 12), (4, 8)):
        branch.rewind(config.base(), "gs://b/run", to)
        assert f"back at step {to}; 1 later checkpoints" in capsys.readouterr().out
        gone = [f"checkpoints/{later}/arrays", f"export/step_{later}/weights"]
        gone.append(f"rollouts/step_{later:06d}.jsonl")
        assert names(run / "rewound" / f"to_{to}") == sorted([*COPIED, *gone])
        before = sorted(set(before) - set(gone))
        assert [n for n in names(run) if not n.startswith("rewound")] == before
    home = workdir.open_workdir("gs://b/run")
    assert names(home.local) == [*COPIED, "rollouts/step_000004.jsonl"]
    workdir.send(home)
    assert (run / "rewound" / "to_8" / "checkpoints" / "12").is_dir()
    branch.rewind(config.base(), "gs://b/run", 4)  # once more: under another name
    assert names(run / "rewound" / "to_4_2") == COPIED
