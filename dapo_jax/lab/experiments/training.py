"""A training run as a task of the pool, and the flags of the commands that make many of them."""

import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from dapo_jax import train
from dapo_jax.config import schema
from dapo_jax.log import metrics

SEEDS = flags.DEFINE_integer(
    "seeds", 0, "Runs of each rung of the ladder (0 = 5), or of each setting of a sweep (0 = 1).", 0
)
JOBS = flags.DEFINE_integer(
    "jobs", 0, "Runs at a time, each on a core; 0 = one per core, 1 = in this process."
)


def run(
    workdir: pathlib.Path,
    fields: Mapping[str, Any],
    base: str = "",
    train: Callable[..., bool] = train.train,
) -> dict[str, float]:
    """Train by the config with these leaves, from the run `base` two folders up if there is one.
    train: (config, workdir) -> whether it went to its end."""
    started = time.process_time()
    config = schema.base()
    config.update_from_flattened_dict(fields)
    if base:
        config.init_from = str((workdir.parent.parent / base / "checkpoints").absolute())
    if not train(config, workdir):
        raise RuntimeError("cut off by SIGTERM; the same command goes on")
    last = metrics.read(workdir / "metrics.jsonl")[-1]
    return {"steps": last["step"], "cpu_s": round(time.process_time() - started, 1)}
