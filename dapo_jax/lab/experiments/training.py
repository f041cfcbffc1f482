"""A training run as a task of the pool, and what the commands that make many of them share."""

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dapo_jax import train
from dapo_jax.config import cli, schema
from dapo_jax.lab.experiments import pool
from dapo_jax.log import metrics

SEEDS = flags.DEFINE_integer(
    "seeds", 0, "Runs of each rung of the ladder (0 = 5), or of each setting of a sweep (0 = 1).", 0
)
JOBS = flags.DEFINE_integer(
    "jobs", 0, "Runs at a time, each on a core; 0 = one per core, 1 = in this process.", 0
)


def trained(config, workdir: pathlib.Path) -> tuple[list[dict], float]:
    """(records of its metrics.jsonl, CPU seconds) of a training run that went to its end.
    RuntimeError: it was cut off."""
    started = time.process_time()
    if not train.train(config, workdir):
        raise RuntimeError("cut off by SIGTERM; the same command goes on")
    return metrics.read(workdir / "metrics.jsonl"), time.process_time() - started


def run(workdir: pathlib.Path, fields: Mapping[str, Any], base: str = "") -> dict[str, float]:
    """Train by the config with these leaves, from the run `base` two folders up if there is one."""
    config = schema.base()
    config.update(fields)
    if base:
        config.init_from = str((workdir.parent.parent / base / "checkpoints").absolute())
    records, cpu_s = trained(config, workdir)
    return {"steps": records[-1]["step"], "cpu_s": round(cpu_s, 1)}


def run_all(tasks: Sequence[pool.Task], out: pathlib.Path, desc: str) -> None:
    """`pool.run_all` of `run` with --jobs; a failure ends the command with its words."""
    if any(task.arguments[0]["checkpoint.directory"] for task in tasks):
        cli.fail("config.checkpoint.directory: these runs would share it; leave it empty")
    out.mkdir(parents=True, exist_ok=True)
    try:
        pool.run_all(tasks, out, JOBS.value, desc)
    except RuntimeError as error:
        cli.fail(str(error))
