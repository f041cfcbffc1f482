"""Weights & Biases and MLflow: called as their clients want, by stand-ins that note calls."""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from dapo_jax import config
from dapo_jax.log import metrics, trackers


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", client := mock.Mock())
    client.init.side_effect = lambda id, **_: SimpleNamespace(
        id=id or "w1", log=client.log, alert=client.alert, finish=client.finish,
        define_metric=mock.Mock(),
    )  # fmt: skip
    client.Table = lambda columns, data: ("table", columns, data)
    return client


@pytest.fixture
def mlflow(monkeypatch):
    run = lambda run_id, run_name: SimpleNamespace(info=SimpleNamespace(run_id=run_id or "m1"))
    monkeypatch.setitem(sys.modules, "mlflow", client := mock.Mock())
    client.start_run.side_effect = run
    return client


def settings(**fields):
    c = config.base()
    c.log.update(fields)
    return c


ROW = dict(problem="p", prompt="q", response="r", answer="1", extracted=None, reward=-1.0, tokens=2)
ROW |= dict(truncated=False, pieces=["r", ""], entropies=[0.5, float("nan")])


def run(c, workdir, step):
    """One step of a run in a bucket, whose copy is `workdir`."""
    writer = metrics.Writer(workdir, step - 1, c, print, "gs://bucket/some run")
    values = {"eval/x/avg@k": 0.5, "optim/updates": 3, "policy/loss": float("nan")}
    writer.record(step, values | {"alarms": ["a"], "sampling/groups_by_correct": [1, 2]})
    writer.lines("rollouts", step, iter([ROW, ROW | {"reward": 1.0}]))
    writer.lines("eval", step, iter([{"problem": "p"}]))
    writer.alarm(step, 1, ["low", "long"])
    writer.close()


def test_what_goes_to_the_run_of_the_workdir(tmp_path, wandb, mlflow):
    """Numbers and alarms, and samples as often as TensorBoard's, without their numbers a token. A
    resumed run keeps its id, another project has its own."""
    c = settings(wandb="mine", mlflow="mine", text_every=2)
    yours = settings(wandb="yours", text_every=2)
    for step, which in enumerate((c, c, yours)):
        run(which, tmp_path, step)
    columns = [x for x in ROW if x not in ("pieces", "entropies")]
    cells = [["p", "q", "r", "1", None, reward, 2, False] for reward in (-1.0, 1.0)]
    named, fields = dict(name="some run", resume="allow", dir=tmp_path), config.leaves(c)
    values = {"eval/x/avg@k": 0.5, "optim/updates": 3}
    numbers = lambda n: ("log", ({"step": n} | values,), {"step": n})
    samples = lambda step: ("log", ({"samples": ("table", columns, cells)},), {"step": step})
    alert = lambda n: ("alert", (), dict(title=f"some run: alarm in step {n}", text="low\n\nlong"))
    assert wandb.mock_calls == [
        ("init", (), named | dict(project="mine", id=None, config=fields)),
        numbers(0), samples(0), alert(0), ("finish", (), {}),
        ("init", (), named | dict(project="mine", id="w1", config=fields)),
        numbers(1), alert(1), ("finish", (), {}),
        ("init", (), named | dict(project="yours", id=None, config=config.leaves(yours))),
        numbers(2), samples(2), alert(2), ("finish", (), {}),
    ]  # fmt: skip
    table = dict(zip(columns, map(list, zip(*cells, strict=True)), strict=True))
    numbers = {"eval/x/avg_k": 0.5, "optim/updates": 3}  # names that it takes
    assert mlflow.mock_calls == [
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": None, "run_name": "some run"}),
        ("log_params", (fields,), {}),  # once
        ("log_metrics", (numbers,), {"step": 0}),
        ("log_table", (table, "samples/step_000000.json"), {}),
        ("log_text", ("low\n\nlong", "alarms/step_000000.txt"), {}),
        ("end_run", (), {}),
        ("set_experiment", ("mine",), {}),
        ("start_run", (), {"run_id": "m1", "run_name": "some run"}),
        ("log_metrics", (numbers,), {"step": 1}),
        ("log_text", ("low\n\nlong", "alarms/step_000001.txt"), {}),
        ("end_run", (), {}),
    ]
    ids = {"wandb:mine": "w1", "mlflow:mine": "m1", "wandb:yours": "w1"}
    assert json.loads((tmp_path / "trackers.json").read_text()) == ids


def test_a_service_that_fails_is_named_once_and_ends_nothing(tmp_path, wandb, mlflow):
    broken = mock.Mock(side_effect=ConnectionError("no route\nto host"))
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
    assert [call.kwargs for call in wandb.log.mock_calls] == [{"step": 0}, {"step": 3}]


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
        run(settings(wandb="mine"), tmp_path, 0)
        assert wandb.init.call_args.kwargs["id"] is None
