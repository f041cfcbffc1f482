"""Weights & Biases and MLflow: numbers, samples and alarms, sent through their own clients.

A client is imported only if its config field is set. A service that fails is reported once and does
not end the run. A resumed run keeps its id, stored in WORKDIR/trackers.json. Only process 0 sends.
"""

import contextlib
import importlib
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dapo_jax import parallel
from dapo_jax.config import schema
from dapo_jax.log import alarm_command

# The fields of a sample that a person reads; the others have a number or more per token.
COLUMNS = ("problem", "prompt", "response", "answer", "extracted", "reward", "tokens", "truncated")


class Tracker(NamedTuple):
    log: Callable[[int, dict[str, float]], Any]
    alarm: Callable[[int, str], Any]
    samples: Callable[[int, dict[str, list]], Any]  # a column's name -> its cells
    close: Callable[[], Any]


def require(config) -> None:
    """ConfigError: a client that is named is not installed, or the alarm command is not usable."""
    for name, project in (("wandb", config.log.wandb), ("mlflow", config.log.mlflow)):
        # A folder of that name has no origin.
        if project and getattr(importlib.util.find_spec(name), "origin", None) is None:
            missing = f"its client is not installed: pip install {name}"
            raise schema.ConfigError(f"config.log.{name}: {missing}")
    alarm_command.words(config.log.alarm_command)


class Trackers:
    """The services that the config names. name: of the workdir, which a new run is called by."""

    def __init__(self, config, workdir: pathlib.Path, say: Callable[[str], None], name: str):
        self._say, self._failing = say, set()
        self._open: dict[str, Tracker] = {}
        if not parallel.is_main_process():
            return
        path, run_name = workdir / "trackers.json", pathlib.PurePath(name).name
        ids, fields = {}, schema.leaves(config)
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            ids = {k: v for k, v in json.loads(path.read_text()).items() if isinstance(v, str)}
        clients = (("wandb", config.log.wandb, _wandb), ("mlflow", config.log.mlflow, _mlflow))
        for service, project, connect in clients:
            if project:
                key = f"{service}:{project}"  # another project is another run
                with self._guarded(service):
                    run = connect(project, ids.get(key), run_name, fields, workdir)
                    ids[key], self._open[service] = run
        if ids:
            with contextlib.suppress(OSError):  # a full disk: the next start is a run of its own
                path.write_text(json.dumps(ids))

    def record(self, step: int, values: dict) -> None:
        own = ("step", "time/wall")  # services have both, with clocks of their own
        numbers = {t: v for t, v in values.items() if isinstance(v, int | float) and t not in own}
        self._each(lambda tracker: tracker.log(step, numbers))

    def alarm(self, step: int, alarms: list[str]) -> None:
        self._each(lambda tracker: tracker.alarm(step, "\n\n".join(alarms)))

    def samples(self, step: int, rows: list[dict]) -> None:
        """Send rows of `report.samples`."""
        table = {c: [r.get(c) for r in rows] for c in COLUMNS}
        if rows:
            self._each(lambda tracker: tracker.samples(step, table))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], Any]) -> None:
        for name, tracker in self._open.items():
            with self._guarded(name):
                call(tracker)

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
            self._failing.discard(name)
        except Exception as error:  # any error of a client: a network must not end a run
            if name not in self._failing:
                said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._say(f"warning: config.log.{name}: {said}; metrics.jsonl has the numbers")
            self._failing.add(name)


# Of both: (project, id of the run that goes on or None, name, config, workdir) -> (id, Tracker).


def _wandb(project: str, run_id: str | None, name: str, config: dict, workdir):
    wandb = importlib.import_module("wandb")
    kept = dict(project=project, id=run_id, name=name, config=config, dir=workdir)
    run = wandb.init(resume="allow", **kept)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")  # panels are drawn over rollout steps

    def samples(step: int, table: dict[str, list]) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        run.log({"samples": wandb.Table(columns=list(table), data=rows)}, step=step)

    # wandb drops what is older than its newest step: steps made again after a resume.
    return run.id, Tracker(
        lambda step, numbers: run.log({"step": step} | numbers, step=step),
        lambda step, text: run.alert(title=f"{name}: alarm in step {step}", text=text),
        samples,
        run.finish,
    )


def _mlflow(experiment: str, run_id: str | None, name: str, config: dict, workdir):
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(experiment)
    run = mlflow.start_run(run_id=run_id, run_name=name)
    if run_id is None:  # parameters of a run cannot change
        mlflow.log_params(config)

    def log(step: int, numbers: dict[str, float]) -> None:
        named = {re.sub(r"[^\w\-./ ]", "_", t): v for t, v in numbers.items()}  # what it allows
        mlflow.log_metrics(named, step=step)

    return run.info.run_id, Tracker(
        log,
        lambda step, text: mlflow.log_text(text, f"alarms/step_{step:06d}.txt"),
        lambda step, table: mlflow.log_table(table, f"samples/step_{step:06d}.json"),
        mlflow.end_run,
    )
