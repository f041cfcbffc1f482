"""verl's metric names in ours, so that a run of verl can be laid over one of this project.

verl.toml says which of verl's numbers make one of ours."""

import pathlib
import re
import tomllib
from collections.abc import Mapping

import numpy as np

Series = tuple[np.ndarray, np.ndarray]  # rollout steps int [n], values float [n]

TABLE = pathlib.Path(__file__).with_name("verl.toml").read_text()
_found = tomllib.loads(TABLE)
NAMES: dict[str, list[str]] = _found["names"]
OLDER: dict[str, str] = _found["older"]
SCORES: dict[str, str] = _found["scores"]
TRAINED = dict.fromkeys(_found["trained"], "trained batch")
EVALUATION = re.compile(r"val-core/(.+)/acc/(mean|best|maj)@\d+(?:/mean)?")
SCORE = "critic/score/"  # mean, min, max of the reward with the length penalty, before any KL term


def is_verl(names) -> bool:
    known = {name for of in NAMES.values() for name in of} | OLDER.keys()
    return any(n in known or n.startswith(SCORE) or EVALUATION.fullmatch(n) for n in names)


def translate(series: Mapping[str, Series]) -> tuple[dict[str, Series], dict[str, str]]:
    """(series under our tags, tag -> what it describes where ours describes all that was drawn).
    Names without a counterpart here stay as they are."""
    left = {OLDER.get(name, name): points for name, points in series.items()}
    out = _rewards(left)
    for tag, (first, *others) in NAMES.items():
        if first in left:
            steps, values = left[first]
            for name in others:
                sign = -1.0 if name.startswith("-") else 1.0
                values = values + sign * _at(steps, left.get(name.removeprefix("-")))
            out[tag] = steps, values
    for name, points in left.items():
        if match := EVALUATION.fullmatch(name):
            out[f"eval/{match[1]}/{SCORES[match[2]]}"] = points
    used = {name.removeprefix("-") for tag in out for name in NAMES.get(tag, ())}
    used |= {f"{SCORE}mean"} if "reward/mean" in out else set()
    kept = {n: s for n, s in left.items() if n not in used and not EVALUATION.fullmatch(n)}
    return kept | out, {tag: of for tag, of in TRAINED.items() if tag in out}


def _rewards(series: Mapping[str, Series]) -> dict[str, Series]:
    """The mean score in our unit (+1 right, -1 wrong). verl's verifiers give {0, 1} or {-1, 1}; the
    extremes of the steps tell which. Scores that are neither have a length penalty in them, so that
    no accuracy follows; the DAPO recipe's are in our unit then."""
    if f"{SCORE}mean" not in series:
        return {}
    steps, mean = series[f"{SCORE}mean"]
    ends = [series[SCORE + end][1] for end in ("min", "max") if SCORE + end in series]
    seen = {float(x) for values in ends for x in values if np.isfinite(x)}
    if seen and seen <= {0.0, 1.0}:
        return {"reward/mean": (steps, 2 * mean - 1), "reward/batch_accuracy": (steps, mean)}
    if seen and seen <= {-1.0, 1.0}:
        return {"reward/mean": (steps, mean), "reward/batch_accuracy": (steps, (mean + 1) / 2)}
    return {"reward/mean": (steps, mean)} if seen and min(seen) < 0 else {}


def _at(steps: np.ndarray, other: Series | None) -> np.ndarray:
    """The other series at these steps, 0 where it has none."""
    there = dict(zip(*(x.tolist() for x in other), strict=True)) if other else {}
    return np.array([there.get(s, 0.0) for s in steps.tolist()])
