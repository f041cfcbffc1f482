"""The training runs of the mechanism experiments. Each arm (techniques/) is naive GRPO or DAPO with
one switch turned, is run by `train.train` itself, and is read back from the files it leaves."""

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from dapo_jax import train
from dapo_jax.config import presets, schema
from dapo_jax.lab.experiments import bases
from dapo_jax.log import metrics

SERIES = (  # one number per rollout step
    "reward/accuracy",
    "response/length_mean",
    "response/truncated_frac",
    "policy/entropy",
    "policy/clip_high_frac",
    "sampling/all_correct_frac",
    "sampling/all_wrong_frac",
    "spent/tokens",
)


class Arm(NamedTuple):
    label: str  # in tables and figures
    base: str  # of bases.HABITS
    changes: Mapping[str, Any]  # config fields that differ from `schema.base()`


_FULL = schema.leaves(schema.base())
NAIVE = {k: v for k, v in schema.leaves(presets.grpo()).items() if v != _FULL[k]}
# Limit, steps and width of the ramp of the arms from base `rambling`, and from `careful`.
RAMBLING = {"rollout.max_response_tokens": 72, "steps": 30, "reward.overlong_buffer_tokens": 24}
CAREFUL = {"rollout.max_response_tokens": 24, "steps": 50, "reward.overlong_buffer_tokens": 6}
# What more than one technique's arms turn on.
TOKEN_MEAN = {"loss.normalizer": "batch_tokens"}
OUT_OF_GROUP = {"loss.overlong_filter": "group"}
LEVELS = {"careful": (2, 3, 4, 5), "rambling": (2, 3, 4)}
CHECKPOINT_EVERY = 20  # of the arms that snr.py looks at


def folder(arm: str, seed: int) -> str:
    return f"{arm}_{seed}"


def settings(arm: Arm, seed: int, home: pathlib.Path, base_seed: int):
    """The config of a run; `home` holds the bases and the problems."""
    base = arm.base
    config = schema.base()
    config.update_from_flattened_dict(arm.changes)
    config.seed = seed
    config.init_from = str((home / bases.folder(base, base_seed) / "checkpoints").absolute())
    config.log.tensorboard, config.log.samples = False, 0
    config.checkpoint.every, config.checkpoint.keep = 0, 1
    if base == "hasty":
        bases.on_files(config, home / "data", bases.HARD_LEVELS, ())
        config.eval.files = f"heldout={home.absolute()}/data/heldout_hard.jsonl"
        config.eval.every, config.eval.k, config.eval.max_response_tokens = 5, 4, 0
        config.checkpoint.every = config.checkpoint.keep_every = CHECKPOINT_EVERY
    else:
        bases.on_files(config, home / "data", LEVELS[base], LEVELS[base])
    return config


def run(where: pathlib.Path, arm: Arm, seed: int, base_seed: int) -> dict:
    """{series: tag -> one value per step (None where a step has none), evaluations: step -> set ->
    measures, cpu_s}. Raises RuntimeError where the run was cut off."""
    logging.set_verbosity(logging.WARNING)
    started = time.process_time()
    config = settings(arm, seed, where.parent, base_seed)
    train.train(config, where)
    records = metrics.read(where / "metrics.jsonl")
    if records[-1]["step"] < config.steps:
        raise RuntimeError(f"cut off after step {records[-1]['step']}; the same command goes on")
    trained = [r for r in records if r["step"]]
    return {
        "series": {tag: [r.get(tag) for r in trained] for tag in SERIES},
        "evaluations": {
            str(r["step"]): read_evaluation(
                where / f"eval/step_{r['step']:06d}.jsonl", config.rollout.max_response_tokens
            )
            for r in records
            if "time/eval_s" in r
        },
        "cpu_s": time.process_time() - started,
    }


def read_evaluation(path: pathlib.Path, cap: int) -> dict[str, dict[str, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = dict.fromkeys(r["set"] for r in rows)
    return {name: level_measures([r for r in rows if r["set"] == name], cap) for name in names}


def level_measures(rows: Sequence[dict], cap: int) -> dict[str, float]:
    """Of all samples of a set: accuracy with all the room there was, `fit` = right within the
    training run's `cap` of tokens, mean length, and the share that was worked out and not answered
    at once."""
    correct = np.array([x for r in rows for x in r["correct"]], bool)
    tokens = np.array([x for r in rows for x in r["tokens"]])
    return {
        "accuracy": float(correct.mean()),
        "fit": float((correct & (tokens <= cap)).mean()),
        "length": float(tokens.mean()),
        "worked_share": float((tokens > bases.ANSWERED_AT_ONCE).mean()),
    }
