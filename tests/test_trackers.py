"""Weights & Biases and MLflow: called as their clients want, by stand-ins that note calls."""

import json
import sys
from types import SimpleNamespace

import pytest

from dapo_jax import config
from dapo_jax.log import metrics, trackers


class Client:
    """A module that notes its calls. made: what some of them return, by name."""

    def __init__(self, **made):
        self.calls, self._made = [], made
        self.__spec__ = SimpleNamespace(origin="client.py")

    def __getattr__(self, name):
        def call(*args, **named):
            self.calls.append((name, args, named))
            return self._made[name](**named) if name in self._made else None

        return call


@pytest.fixture
def wandb(monkeypatch):
    run = lambda id, **_: SimpleNamespace(
        id=id or "w1", log=client.log, alert=client.alert, finish=client.finish
    )
    client = Client(init=run)
    client.Table = lambda columns, data: ("table", columns, data)
    monkeypatch.setitem(sys.modules, "wandb", client)
    return client


@pytest.fixture
def mlflow(monkeypatch):
    run = lambda run_id, run_name: SimpleNamespace(info=SimpleNamespace(run_id=run_id or "m1"))
    monkeypatch.setitem(sys.modules, "mlflow", client := Client(start_run=run))
    return client


def settings(**fields):
    c = config.base()
    c.log.update(fields)
    return c


def run(c, workdir, resume_step, step):
    writer = metrics.Writer(workdir, resume_step, c)
    values = {"eval/x/avg@k": 0.5, "optim/updates": 3, "policy/loss": float("nan")}
    writer.record(step, values | {"alarms": ["a"], "sampling/groups_by_correct": [1, 2]})
    writer.close()


def test_numbers_go_to_the_run_of_the_workdir(tmp_path, wandb, mlflow):
    """Numbers only, under the step; a resumed run keeps its id, another project has its own."""
    c = settings(wandb="mine", mlflow="mine")
    run(c, tmp_path, -1, 0)
    run(c, tmp_path, 0, 1)
    run(settings(wandb="yours"), tmp_path, 1, 2)
    fields, name = config.leaves(c), tmp_path.name
    init = dict(project="mine", id=None, resume="allow", config=fields, dir=tmp_path, name=name)
    logged = lambda step: ("log", ({"eval/x/avg@k": 0.5, "optim/updates": 3},), {"step": step})
    yours = init | {"project": "yours", "config": config.leaves(settings(wandb="yours"))}
    assert wandb.calls == [
        ("init", (), init), logged(0), ("finish", (), {}),
        ("init", (), init | {"id": "w1"}), logged(1), ("finish", (), {}),
        ("init", (), yours), logged(2), ("finish", (), {}),
    ]  # fmt: skip
    numbers = {"eval/x/avg_k": 0.5, "optim/updates": 3}  # names that it takes
    assert mlflow.calls == [
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": None, "run_name": name}),
        ("log_params", (fields,), {}),  # once
        ("log_metrics", (numbers,), {"step": 0}),
        ("end_run", (), {}),
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": "m1", "run_name": name}),
        ("log_metrics", (numbers,), {"step": 1}),
        ("end_run", (), {}),
    ]
    ids = {"wandb:mine": "w1", "mlflow:mine": "m1", "wandb:yours": "w1"}
    assert json.loads((tmp_path / "trackers.json").read_text()) == ids


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
    works = writer._trackers._open["wandb"]
    fails = works._replace(log=broken)
    for step, tracker in enumerate((works, fails, fails, works)):
        writer._trackers._open["wandb"] = tracker
        writer.record(step, {"policy/loss": 1.0})
    writer.close()
    shown = "ConnectionError: no route to host; metrics.jsonl has the numbers"
    assert said == [f"warning: config.log.{name}: {shown}" for name in ("mlflow", "wandb")]
    assert [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
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


def test_a_damaged_list_of_ids_is_a_run_of_its_own(tmp_path, wandb):
    for text in ("{", "[]", '{"wandb:mine": 3}', "\xff"):
        (tmp_path / "trackers.json").write_text(text)
        run(settings(wandb="mine"), tmp_path, -1, 0)
        assert [c for c in wandb.calls if c[0] == "init"][-1][2]["id"] is None
