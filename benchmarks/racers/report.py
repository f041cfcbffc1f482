"""What the race found: statistics of a run's readings, and the rows of the table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.lab.experiments import stats

MEAN = 3  # readings of the running mean


class Reached(NamedTuple):
    """When a run first read the goal; where it never did (not `held`), a lower bound."""

    held: bool
    cpu_s: float
    step: int


def reached(readings: Sequence[dict[str, Any]], goal: float, mean: int = 1) -> Reached:
    """The first reading at which the mean of the last `mean` readings is `goal` or more. Step 0,
    the base, counts like any other. ValueError: no readings."""
    if not readings:
        raise ValueError("reached: no readings")
    values = [r["accuracy"] for r in readings]
    for i in range(mean - 1, len(values)):
        if np.mean(values[i + 1 - mean : i + 1]) >= goal - 1e-9:  # a mean of fractions
            return Reached(True, readings[i]["cpu_s"], readings[i]["step"])
    return Reached(False, readings[-1]["cpu_s"], readings[-1]["step"])


def summary(readings: Sequence[dict[str, Any]], goal: float) -> dict[str, Any]:
    """Judges one run: the goal by both rules, and costs inside the loop, which are counted from the
    second reading on (before it everything compiles)."""
    first, last = readings[1 if len(readings) > 2 else 0], readings[-1]
    more = {key: last[key] - first[key] for key in ("cpu_s", "wall_s", "step", "tokens")}
    return {
        "once": reached(readings, goal),
        "thrice": reached(readings, goal, MEAN),
        "startup_cpu_s": readings[0]["cpu_s"],
        "cpu_s_per_step": more["cpu_s"] / more["step"],
        "tokens_per_step": more["tokens"] / more["step"],
        "tokens_per_cpu_s": more["tokens"] / more["cpu_s"],
        "wall_over_cpu": more["wall_s"] / more["cpu_s"],
        "peak_mb": last["peak_mb"],
    }


def times(peer: Sequence[Reached], ours: Sequence[Reached]) -> str:
    """'3.1x (3.0 / 3.2)': mean CPU-seconds of the peer over ours, and seed by seed. '> ' where a
    peer did not reach the goal: what it spent is then a lower bound. '-' where ours did not."""
    if not all(r.held for r in ours):
        return "-"
    of_means = np.mean([r.cpu_s for r in peer]) / np.mean([r.cpu_s for r in ours])
    each = " / ".join(f"{p.cpu_s / o.cpu_s:.2f}" for p, o in zip(peer, ours, strict=True))
    return f"{'' if all(r.held for r in peer) else '> '}**{of_means:.2f}x** ({each})"


def spread(values: Sequence[float], digits: int) -> str:
    """'mean (a / b / c)'."""
    each = " / ".join(f"{v:.{digits}f}" for v in values)
    return f"{np.mean(values):.{digits}f} ({each})"


def goal_cell(runs: Sequence[Reached]) -> str:
    """CPU-seconds and steps of every seed; '> 120' where the goal was not reached in 120."""
    each = " / ".join(f"{'' if r.held else '> '}{r.cpu_s:.1f} (step {r.step})" for r in runs)
    exact = all(r.held for r in runs)
    mean = stats.interval([r.cpu_s for r in runs])
    half = f" +- {mean.half:.1f}" if exact and len(runs) > 1 else ""
    return f"{'' if exact else '> '}**{mean.mean:.1f}**{half}: {each}"


LINES = (
    ("start-up CPU-s, before step 0", "startup_cpu_s", 1),
    ("CPU-s a rollout step", "cpu_s_per_step", 3),
    ("tokens generated a rollout step", "tokens_per_step", 0),
    ("tokens generated a CPU-s, inside the loop", "tokens_per_cpu_s", 0),
    ("peak memory, MB", "peak_mb", 0),
    ("wall / CPU, inside the loop", "wall_over_cpu", 2),
)


def rows(runs: dict[str, list[dict]], ours: str, our_title: str, goal: float) -> list[list[str]]:
    """A label and a cell per racer. runs: racer -> a `summary` a seed, same seeds for all; `ours`:
    what the others are compared with, where it is among them."""
    out = []
    for rule, head in (
        ("once", f"CPU-s to held-out {goal}, first reading"),
        ("thrice", f"CPU-s to a mean of {MEAN} readings of {goal}"),
    ):
        found = {name: [r[rule] for r in of] for name, of in runs.items()}
        out.append([head, *map(goal_cell, found.values())])
        if ours in runs:
            out.append(
                [f"... over {our_title}", *(times(of, found[ours]) for of in found.values())]
            )
    for head, key, digits in LINES:
        out.append([head, *(spread([r[key] for r in of], digits) for of in runs.values())])
    return out
