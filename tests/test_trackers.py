"""Weights & Biases and MLflow: called as their clients want, by stand-ins that note calls."""

import json
import sys
import types

import pytest

from dapo_jax import config
from dapo_jax.log import metrics, trackers


class Calls(list):
    def taking(self, name, result=lambda *_, **__: None):
        return lambda *a, **k: (self.append((name, a, k)), result(*a, **k))[1]


@pytest.fixture
def wandb(monkeypatch):
    calls = Calls()

    def init(id=None, **_):
        own = {name: calls.taking(name) for name in ("log", "alert", "finish")}
        return types.SimpleNamespace(id=id or "w1", **own)

    module = types.SimpleNamespace(init=calls.taking("init", init), calls=calls)
    module.Table = lambda columns, data: ("table", columns, data)
    module.__spec__ = types.SimpleNamespace(origin="wandb.py")
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    calls = Calls()

    def start_run(run_id=None, run_name=None):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "m1"))

    module = types.SimpleNamespace(start_run=calls.taking("start_run", start_run), calls=calls)
    for name in ["set_experiment", "log_params", "log_metrics", "log_text", "log_table", "end_run"]:
        setattr(module, name, calls.taking(name))
    module.__spec__ = types.SimpleNamespace(origin="mlflow.py")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def settings(**fields):
    c = config.base()
    c.log.update(fields)
    return c


def run(c, workdir, resume_step, step, said=None):
    writer = metrics.Writer(workdir, resume_step, c, (said if said is not None else []).append)
    values = {"eval/x/avg@k": 0.5, "optim/updates": 3, "policy/loss": float("nan")}
    writer.record(step, values | {"alarms": ["a"], "sampling/groups_by_correct": [1, 2]})
    writer.close()


def test_wandb(tmp_path, wandb):
    """Numbers only, under the step; a resumed run keeps its id, another project has its own."""
    c = settings(wandb="mine")
    run(c, tmp_path, -1, 0)
    run(c, tmp_path, 0, 1)
    run(settings(wandb="yours"), tmp_path, 1, 2)
    init = dict(project="mine", id=None, resume="allow", config=config.leaves(c), dir=tmp_path)
    init["name"] = tmp_path.name
    assert wandb.calls[:3] == [
        ("init", (), init),
        ("log", ({"eval/x/avg@k": 0.5, "optim/updates": 3},), {"step": 0}),
        ("finish", (), {}),
    ]
    (_, _, again), (_, args, step) = wandb.calls[3:5]
    assert (again["id"], step) == ("w1", {"step": 1}) and "policy/loss" not in args[0]
    assert wandb.calls[6][2]["project"] == "yours" and wandb.calls[6][2]["id"] is None
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb:mine"] == "w1"


def test_mlflow(tmp_path, mlflow):
    """Names that it takes; parameters once."""
    c = settings(mlflow="mine")
    run(c, tmp_path, -1, 0)
    run(c, tmp_path, 0, 1)
    named = {"eval/x/avg_k": 0.5, "optim/updates": 3}
    assert mlflow.calls == [
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": None, "run_name": tmp_path.name}),
        ("log_params", (config.leaves(c),), {}),
        ("log_metrics", (named,), {"step": 0}),
        ("end_run", (), {}),
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": "m1", "run_name": tmp_path.name}),
        ("log_metrics", (named,), {"step": 1}),
        ("end_run", (), {}),
    ]


ROW = dict(problem="p", prompt="q", response="r", answer="1", extracted=None, reward=-1.0, tokens=2)
ROW |= dict(truncated=False, pieces=["r", ""], entropies=[0.5, float("nan")])


def test_alarms_and_samples_go_there_too(tmp_path, wandb, mlflow):
    """Under the workdir's own name, also where it is a bucket; samples as often as TensorBoard's,
    without their numbers a token."""
    c = settings(wandb="a", mlflow="b", text_every=2)
    writer = metrics.Writer(tmp_path, -1, c, print, "gs://bucket/some run")
    for step in (1, 2):
        writer.lines("rollouts", step, iter([ROW, ROW | {"reward": 1.0}]))
        writer.lines("eval", step, iter([{"problem": "p"}]))
    writer.alarm(2, 1, ["low", "long"])
    writer.close()
    assert wandb.calls[0][2]["name"] == "some run"
    columns = [x for x in ROW if x not in ("pieces", "entropies")]
    cells = [["p", "q", "r", "1", None, reward, 2, False] for reward in (-1.0, 1.0)]
    assert wandb.calls[1:3] == [
        ("log", ({"samples": ("table", columns, cells)},), {"step": 2}),
        ("alert", (), {"title": "some run: alarm in step 2", "text": "low\n\nlong"}),
    ]
    table = dict(zip(columns, map(list, zip(*cells, strict=True)), strict=True))
    assert mlflow.calls[1] == ("start_run", (), {"run_id": None, "run_name": "some run"})
    assert mlflow.calls[3:5] == [
        ("log_table", (table, "samples/step_000002.json"), {}),
        ("log_text", ("low\n\nlong", "alarms/step_000002.txt"), {}),
    ]


def test_a_service_that_fails_is_named_once_and_ends_nothing(tmp_path, wandb, mlflow):
    def broken(*_, **__):
        raise ConnectionError("no route\nto host")

    mlflow.set_experiment = broken  # never starts
    said = []
    writer = metrics.Writer(tmp_path, -1, settings(wandb="a", mlflow="b"), said.append)
    writer.record(0, {"policy/loss": 1.0})
    real, wandb_run = wandb.calls[:], writer._trackers._open["wandb"]
    writer._trackers._open["wandb"] = wandb_run._replace(log=broken)
    for step in (1, 2):
        writer.record(step, {"policy/loss": 1.0})
    writer._trackers._open["wandb"] = wandb_run
    writer.record(3, {"policy/loss": 1.0})
    writer.close()
    shown = "ConnectionError: no route to host; metrics.jsonl has the numbers"
    assert said == [f"warning: config.log.{name}: {shown}" for name in ("mlflow", "wandb")]
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert wandb.calls[: len(real)] == real
    assert [a[2] for a in wandb.calls if a[0] == "log"] == [{"step": 0}, {"step": 3}]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_client_that_is_missing_is_one_line_with_the_command(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # wandb's own files look like a package of that name
    with pytest.raises(config.ConfigError) as error:
        trackers.require(settings(**{name: "x"}))
    assert str(error.value) == f"config.log.{name}: its client is not installed: pip install {name}"
    trackers.require(settings())


def test_without_the_fields_nothing_is_imported(tmp_path, wandb, mlflow):
    trackers.require(settings())
    run(settings(), tmp_path, -1, 0)
    assert wandb.calls == mlflow.calls == []
    assert not (tmp_path / "trackers.json").exists()


def test_a_damaged_list_of_ids_is_a_run_of_its_own(tmp_path, wandb):
    for text in ("{", "[]", '{"wandb:mine": 3}', "\xff"):
        (tmp_path / "trackers.json").write_text(text)
        run(settings(wandb="mine"), tmp_path, -1, 0)
        assert [c for c in wandb.calls if c[0] == "init"][-1][2]["id"] is None
