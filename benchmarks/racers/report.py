"""What the race found: statistics of a run's readings, and the table."""

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
    """Of one run: CPU-seconds to the goal by both rules, and costs inside the loop, which are
    counted from the second reading on (before it everything compiles)."""
    first, last = readings[1 if len(readings) > 2 else 0], readings[-1]
    cpu = last["cpu_s"] - first["cpu_s"]
    once, thrice = reached(readings, goal), reached(readings, goal, MEAN)
    return {
        "reached": once.held,
        "cpu_s": once.cpu_s,
        "step": once.step,
        "mean_reached": thrice.held,
        "mean_cpu_s": thrice.cpu_s,
        "mean_step": thrice.step,
        "startup_cpu_s": readings[0]["cpu_s"],
        "cpu_s_per_step": cpu / (last["step"] - first["step"]),
        "tokens_per_step": (last["tokens"] - first["tokens"]) / (last["step"] - first["step"]),
        "tokens_per_cpu_s": (last["tokens"] - first["tokens"]) / cpu,
        "wall_over_cpu": (last["wall_s"] - first["wall_s"]) / cpu,
        "peak_mb": last["peak_mb"],
        "last_accuracy": float(np.mean([r["accuracy"] for r in readings[-MEAN:]])),
    }


def times(peer: Sequence[dict], ours: Sequence[dict], cpu: str, flag: str) -> str:
    """'3.1x (3.0 / 3.2)': mean CPU-seconds of the peer over ours, and seed by seed. '> ' where a
    peer did not reach the goal: what it spent is then a lower bound. '-' where ours did not."""
    if not all(r[flag] for r in ours):
        return "-"
    of_means = np.mean([r[cpu] for r in peer]) / np.mean([r[cpu] for r in ours])
    each = " / ".join(f"{p[cpu] / o[cpu]:.2f}" for p, o in zip(peer, ours, strict=True))
    return f"{'' if all(r[flag] for r in peer) else '> '}**{of_means:.2f}x** ({each})"


def spread(values: Sequence[float], digits: int) -> str:
    """'mean (a / b / c)'."""
    each = " / ".join(f"{v:.{digits}f}" for v in values)
    return f"{np.mean(values):.{digits}f} ({each})"


def goal_cell(runs: Sequence[dict], flag: str, cpu: str, step: str) -> str:
    """CPU-seconds and steps of every seed; '> 120' where the goal was not reached in 120."""
    each = " / ".join(f"{'' if r[flag] else '> '}{r[cpu]:.1f} (step {r[step]})" for r in runs)
    exact = all(r[flag] for r in runs)
    mean = stats.interval([r[cpu] for r in runs])
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


# What could not be made equal, in the versions of requirements-peers.txt, read from their sources.
NOTES = {
    "ours": (
        "full DAPO as in configs/quickstart.py: Dynamic Sampling draws until 32 groups have right"
        " and wrong responses.",
        "the sampler's log-probs are the old ones (loss.old_logprobs='reuse'; sampler and trainer"
        " agree to 1e-5 in float32).",
        "truncated responses are trained on, as in the authors' best run.",
        "in an update the responses to one prompt share its tokens (optim.share_prompts), which the"
        " others compute once a response: the same loss; rows of 64 tokens, 4 a pass.",
    ),
    "fixed": (
        "as above with dynamic_sampling.enabled=False: the techniques that the others have.",
    ),
    "tunix": (
        "no Dynamic Sampling: `dynamic_sampling=True` is a field that nothing reads.",
        "no filter of truncated responses. The soft overlong ramp counts characters and goes beyond"
        " -1; a tokenizer of one character a token makes them tokens.",
        "each mini-batch is sampled anew from the current weights (8 rollouts of 4 prompts a step):"
        " one rollout of 32 prompts with 8 updates is not to be had, and the clip never binds.",
        "the end-of-text token is cut off and never trained.",
        "two favours: the seed is changed between rollouts, which would repeat their noise, and"
        " `beta` is set to 0 after construction, or a reference model would run for nothing.",
        "lr 5e-4 and the constant seed, tried on another base of this task, were no better.",
    ),
    "trl": (
        "no Dynamic Sampling: groups without a signal stay in the batch and in its token count.",
        "old log-probs are recomputed; the token mean is over the rollout batch, not a mini-batch.",
        "mask_truncated_completions, the soft overlong reward and epsilon_high are on, as its"
        " documentation advises.",
        "eager attention, other micro-batches, continuous batching and lr 5e-4, tried on another"
        " base of this task, were no better. No vLLM: it wants a GPU.",
    ),
}


def notes(racers: Sequence[str]) -> str:
    """Markdown list of the settings that differ, for `racers`."""
    return "".join(f"- {name}: {note}\n" for name in racers for note in NOTES[name])


def table(runs: dict[str, list[dict]], ours: str, titles: dict[str, str], goal: float) -> str:
    """Markdown. `runs`: racer -> a `summary` a seed, same seeds for all; `ours`: what the others
    are compared with, where it is among them."""
    names = list(runs)
    out = ["| | " + " | ".join(titles[n] for n in names) + " |", "|---" * (len(names) + 1) + "|"]

    def line(head, cell):
        out.append(f"| {head} | " + " | ".join(cell(n) for n in names) + " |")

    for cpu, flag, step, head in (
        ("cpu_s", "reached", "step", f"CPU-s to held-out {goal}, first reading"),
        (
            "mean_cpu_s",
            "mean_reached",
            "mean_step",
            f"CPU-s to a mean of {MEAN} readings of {goal}",
        ),
    ):
        line(head, lambda n, a=(flag, cpu, step): goal_cell(runs[n], *a))
        if ours in runs:
            line(
                f"... over {titles[ours]}", lambda n, a=(cpu, flag): times(runs[n], runs[ours], *a)
            )
    for head, key, digits in LINES:
        line(head, lambda n, k=key, d=digits: spread([r[k] for r in runs[n]], d))
    return "\n".join(out) + "\n"
