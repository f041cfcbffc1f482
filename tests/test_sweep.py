"""A sweep: its runs and their bases, what it refuses before anything starts, and one from end to
end."""

import json
import re
import shutil

import pytest
from absl import flags

from dapo_jax.config import schema
from dapo_jax.lab import sweep
from dapo_jax.lab.experiments import training
from dapo_jax.log import metrics


def test_every_combination_in_order():
    found = sweep.settings(["optim.lr=1", "steps=2,3"])
    assert found == [{"optim.lr": 1.0, "steps": 2}, {"optim.lr": 1.0, "steps": 3}]
    (a, b) = sweep.settings(['eval.files="x=a.jsonl,y=b.jsonl", z=c.jsonl'])
    assert (a, b) == ({"eval.files": "x=a.jsonl,y=b.jsonl"}, {"eval.files": "z=c.jsonl"})
    assert sweep.settings(["optim.offload=true,false"])[1] == {"optim.offload": False}
    assert [sweep.folder(s) for s in found] == ["optim.lr=1.0_steps=2", "optim.lr=1.0_steps=3"]


def test_different_settings_have_different_names_that_are_short_and_plain():
    files = ["a/b", "a-b", "a b", "~/a b,c/*.jsonl", "a@b", "", "x" * 300, "x" * 301, "\u597d" * 99]
    wanted = [{"data.train": file} for file in files]
    wanted += [{"data.train": a, "eval.files": b} for a, b in (("1", "2_eval.files=3"),)]
    wanted += [{"data.train": a, "eval.files": b} for a, b in (("1_eval.files=2", "3"),)]
    names = [sweep.folder(setting) for setting in wanted]
    assert names[1] == "data.train=a-b" and names[3].startswith("data.train=-a-b-c-.jsonl@")
    assert len(set(names)) == len(names) and max(len(n.encode()) for n in names) <= 255
    assert all(re.fullmatch(r"[\w.=+@-]+", name) for name in names)


@pytest.mark.parametrize(
    ("over", "wrong"),
    [
        ([], ["--over: name a field, as --over=optim.lr=1e-6,3e-6"]),
        (["optim.learning_rate=1"], ["config.optim.learning_rate: no such field; did you mean op"]),
        (["optim.lr"], ["--over=optim.lr: write --over=FIELD=VALUE,VALUE,..."]),
        (["a\n\nb"], ["--over=a b: write --over=FIELD=VALUE,VALUE,..."]),
        (["optim.lr=1,fast", "stps=2"], ["config.optim.lr: wants float, got 'f", "config.stps"]),
        (["seed=1,2"], ["--over=seed=1,2: --seeds=N runs each combination with N seeds"]),
        (["optim.lr=1e-3,2,0.001"], ["--over=optim.lr=1e-3,2,0.001: optim.lr is 0.001 twice"]),
        (["steps=1", "steps=2"], ["--over=steps=2: steps is swept already"]),
    ],
)
def test_what_is_no_field_or_value_is_a_line_each(over, wrong):
    with pytest.raises(ValueError) as error:
        sweep.settings(over)
    lines = str(error.value).splitlines()
    assert [line.startswith(w) for line, w in zip(lines, wrong, strict=True)] == [True] * len(wrong)


def warm():
    c = schema.base()
    c.seed, c.supervised_warmup.skill_steps = 5, 2
    c.mesh.data = 8  # simulated devices of the tests
    return c


def test_runs_share_the_bases_that_their_fields_do_not_change(tmp_path):
    wanted = sweep.settings(["optim.lr=1e-4,1e-3", "rollout.max_response_tokens=24,32"])
    todo = sweep.tasks(warm(), wanted, seeds=2)
    bases = [t for t in todo if t.folder.startswith("base/")]
    longest = "rollout.max_response_tokens"
    said = [[t.folder, *(t.arguments[0][f] for f in ("steps", "seed", longest))] for t in bases]
    assert said == [["base/0", 0, 5, 24], ["base/1", 0, 5, 32]]
    runs = [t for t in todo if t not in bases]
    assert len(runs) == 8 and runs[0].folder == f"optim.lr=0.0001_{longest}=24/seed_5"
    for task in runs:
        fields, base = task.arguments
        assert fields[longest] == (24, 32)[int(base[-1])]
        assert f"optim.lr={fields['optim.lr']}" in task.folder and task.after == (base,)
        assert task.folder.endswith(f"seed_{fields['seed']}") and fields["seed"] in (5, 6)
    for task in bases[1:]:  # earlier commands have made it; the first was cut off
        (tmp_path / task.folder).mkdir(parents=True)
        (tmp_path / task.folder / "result.json").write_text(json.dumps({"arguments": task[2]}))
    more = sweep.settings(["rollout.max_response_tokens=32,24,16", "optim.lr=1e-5,1e-4"])
    again = [t for t in sweep.tasks(warm(), more, 1, sweep.bases_of(tmp_path)) if not t.after]
    assert again[0] == bases[1] and [t.folder for t in again] == ["base/1", "base/0", "base/2"]
    (tmp_path / "worked.jsonl").touch()  # rows of one's own make a base too
    mine = warm()
    mine.supervised_warmup.update({"skill_steps": 0, "files": str(tmp_path / "worked.jsonl")})
    todo = sweep.tasks(mine, sweep.settings(["data.template=,boxed"]), seeds=1)
    assert [t.after for t in todo] == [(), (), ("base/0",), ("base/1",)]
    given = warm()
    given.init_from = "runs/a"
    alone = sweep.tasks(given, sweep.settings(["optim.lr=1e-4"]), 1)
    assert [(t.folder, t.after) for t in alone] == [("optim.lr=0.0001/seed_5", ())]


def test_configs_that_cannot_work_are_refused_before_anything_starts():
    wanted = sweep.settings(["rollout.group_size=1,8", "optim.lr=1e-4,-1"])
    with pytest.raises(ValueError) as error:
        sweep.tasks(warm(), wanted, 1)
    named = [line.split(":")[0] for line in str(error.value).splitlines()]
    assert named == ["config.rollout.group_size", "config.optim.lr"]


def test_runs_share_no_directory_of_checkpoints(tmp_path, capsys):
    c = warm()
    c.checkpoint.directory = str(tmp_path / "all")
    with pytest.raises(SystemExit):
        training.run_all(sweep.tasks(c, [{"optim.lr": 1e-4}], 2), tmp_path / "s", "sweep")
    assert capsys.readouterr().err.startswith("error: config.checkpoint.directory: these runs")
    assert not (tmp_path / "s").exists()


def test_no_number_of_jobs_is_negative():
    with pytest.raises(flags.IllegalFlagValueError, match="flag --jobs=-1"):
        flags.FLAGS["jobs"].parse("-1")


CONFIG = """from dapo_jax import config
def get_config():
    c = config.base()
    c.steps, c.supervised_warmup.skill_steps, c.eval.max_problems = 2, 3, 4
    c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 4, 4, 2
    c.dynamic_sampling.max_rounds, c.log.tensorboard = 1, False
    return c
"""


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped_and_ends_with_the_comparison(shell, tmp_path):
    (tmp_path / "tiny.py").write_text(CONFIG)
    sweep = ("-m", "dapo_jax.lab", "sweep", "--config=tiny.py")
    command = lambda *flags: shell.python(*sweep, *flags, cwd=tmp_path)
    done = command("--workdir=s", "--over=optim.learing_rate=1e-6")
    assert done.stderr.startswith("error: config.optim.learing_rate: no such field; did you mean")
    assert not (tmp_path / "s").exists()
    sweeping = ("--workdir=s", "--over=optim.lr=1e-3,1e-2", "--seeds=2", "--jobs=2")
    done = command(*sweeping)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "s"
    runs = [home / f"optim.lr={lr}" / f"seed_{s}" for lr in (0.001, 0.01) for s in (0, 1)]
    for run in runs:  # ordinary workdirs
        assert [r["step"] for r in metrics.read(run / "metrics.jsonl")] == [0, 1, 2]
        fields = json.loads((run / "config.json").read_text())
        assert fields["init_from"] == str(home / "base" / "0" / "checkpoints")
    kept = json.loads((home / "compare.json").read_text())
    names = [(row["name"], len(row["paths"])) for row in kept["runs"]]
    assert names == [("optim.lr=0.001", 2), ("optim.lr=0.01", 2)]
    table = (home / "compare.txt").read_text()
    assert done.stdout.startswith(table) and "over the runs of a column" in table
    assert (home / "compare.png").read_bytes()[:4] == b"\x89PNG"
    # As if it had been stopped before the last run: that one alone is made again, to the same bits.
    entropy = metrics.read(runs[3] / "metrics.jsonl")[-1]["policy/entropy"]
    for file in ("result.json", "metrics.jsonl"):
        (runs[3] / file).unlink()
    shutil.rmtree(runs[3] / "checkpoints")
    changed = [(r / "result.json").stat().st_mtime_ns for r in runs[:3]]
    again = command(*sweeping)
    assert again.returncode == 0 and again.stdout.splitlines()[0] == done.stdout.splitlines()[0]
    assert changed == [(r / "result.json").stat().st_mtime_ns for r in runs[:3]]
    assert metrics.read(runs[3] / "metrics.jsonl")[-1]["policy/entropy"] == entropy
