"""Weights & Biases and MLflow: called as their clients want, by stand-ins that note calls."""

import json
import sys
import types

import pytest

from dapo_jax import config
from dapo_jax.log import metrics, trackers


class Calls(list):
    def taking(self, name, result=None):
        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            return result(*args, **kwargs) if callable(result) else result

        return call


@pytest.fixture
def wandb(monkeypatch):
    calls = Calls()

    def init(id=None, **_):
        return types.SimpleNamespace(
            id=id or "w1", log=calls.taking("log"), finish=calls.taking("finish")
        )

    module = types.SimpleNamespace(init=calls.taking("init", init), calls=calls)
    module.__spec__ = types.SimpleNamespace(origin="wandb.py")
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    calls = Calls()

    def start_run(run_id=None):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "m1"))

    module = types.SimpleNamespace(start_run=calls.taking("start_run", start_run), calls=calls)
    for name in ("set_experiment", "log_params", "log_metrics", "end_run"):
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
        ("start_run", (), {"run_id": None}),
        ("log_params", (config.leaves(c),), {}),
        ("log_metrics", (named,), {"step": 0}),
        ("end_run", (), {}),
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": "m1"}),
        ("log_metrics", (named,), {"step": 1}),
        ("end_run", (), {}),
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
