"""Training runs of several arms, once per seed each, from one base model."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.lab.experiments import pool, training
from dapo_jax.log import metrics


def train(
    fields: Callable[..., dict[str, Any]],
    arms: Sequence[str],
    plain: str,
    seeds: int,
    out: pathlib.Path,
    jobs: int,
) -> dict[str, list[list[dict]]]:
    """Records of the runs, arm -> seed -> records; the same call resumes what is in `out`.

    fields: (arm, **changes) -> leaves of its config; plain: the arm whose warm-up, with seed 0,
    makes the base; jobs: runs at a time, 0 = one per core.
    """
    base = pool.Task("base", training.run, (fields(plain, steps=0),))
    return branches(fields, arms, range(seeds), [base], out, jobs)


def branches(
    fields: Callable[..., dict[str, Any]],
    arms: Sequence[str],
    seeds: Sequence[int],
    bases: Sequence[pool.Task],
    out: pathlib.Path,
    jobs: int,
) -> dict[str, list[list[dict]]]:
    """As `train`, from the last of `bases`, which may be made from those before it."""
    folder, base = (lambda arm, seed: f"{arm}/seed_{seed}"), bases[-1].folder
    runs = [
        pool.Task(folder(arm, s), training.run, (fields(arm, seed=s), base), (base,))
        for s in seeds
        for arm in arms
    ]
    pool.run_all([*bases, *runs], out, jobs)
    return {
        arm: [metrics.read(out / folder(arm, s) / "metrics.jsonl") for s in seeds] for arm in arms
    }
