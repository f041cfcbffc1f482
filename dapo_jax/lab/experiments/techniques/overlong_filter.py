"""Overlong filtering (section 3.4): what becomes of a skill whose working does not fit the limit.

Base `careful`: its working fits 24 tokens at k = 2, 3 operations and not at k = 4, 5. What decides
is accuracy on the latter with room to write: lower after training with -1 for truncated responses
than before training; higher with them out of loss and group statistics than with -1.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax.lab.experiments import bases, effects, ink, stats
from dapo_jax.lab.experiments.arms import CAREFUL, NAIVE, OUT_OF_GROUP, Arm
from dapo_jax.lab.experiments.effects import ACCURACY, CUT, Contrast, curve, last, level

OUT_OF_LOSS = {"loss.overlong_filter": "loss"}
ARMS = {
    "filter_off": Arm("-1 for truncation", "careful", NAIVE | CAREFUL),
    "filter_loss": Arm("out of the loss", "careful", NAIVE | CAREFUL | OUT_OF_LOSS),
    "filter_group": Arm("out of loss and group", "careful", NAIVE | CAREFUL | OUT_OF_GROUP),
}
BASE = "base"  # in contrasts: no arm, but what the arms started from


def base_accuracy(runs: effects.Runs, levels: Sequence[int]) -> list[float]:
    """Of the base that each seed started from [seeds]: the mean over held-out levels."""
    tested = [runs.results[bases.folder("careful", b)]["levels"] for b in runs.base_of.values()]
    return [float(np.mean([t[f"k{k}"]["accuracy"] for k in levels])) for t in tested]


def contrasts(runs: effects.Runs) -> list[Contrast]:
    room, fit = "accuracy with room, k=4,5", "right within the limit, k=2,3"
    before = base_accuracy(runs, (4, 5))
    off, group = (runs.each(arm, level("accuracy", 4, 5)) for arm in ("filter_off", "filter_group"))
    in_group, in_loss = ("filter_group", "filter_off"), ("filter_loss", "filter_off")
    train = "train accuracy, last 5 steps"
    return [
        Contrast(room, "filter_off", BASE, off, before, -1),
        Contrast(room, *in_group, group, off, +1),
        Contrast(room, "filter_group", BASE, group, before, 0),
        runs.compare(room, *in_loss, level("accuracy", 4, 5)),
        runs.compare("worked out, k=4,5 (share)", *in_group, level("worked_share", 4, 5)),
        runs.compare(fit, *in_group, level("fit", 2, 3)),
        runs.compare(fit, *in_loss, level("fit", 2, 3)),
        runs.compare(train, *in_group, curve(ACCURACY, last)),
        runs.compare(train, *in_loss, curve(ACCURACY, last)),
        runs.compare("truncated share, last 5 steps", *in_group, curve(CUT, last)),
    ]


def figure(runs: effects.Runs):
    figure, (left, right) = ink.panels(1, 2)
    levels = bases.TEST_LEVELS
    measured = {"before training": [base_accuracy(runs, [k]) for k in levels]}
    for name, arm in ARMS.items():
        measured[arm.label] = [runs.each(name, level("accuracy", k)) for k in levels]
    for i, (label, values) in enumerate(measured.items()):
        points = [stats.interval(v) for v in values]
        x = np.arange(len(levels)) + 0.12 * (i - len(ARMS) / 2)
        means, halves = [p.mean for p in points], [p.half for p in points]
        left.errorbar(x, means, halves, fmt="o", capsize=3, label=label)
    unit = f"held-out accuracy with {bases.ROOM} tokens (share)"
    left.set(xlabel="operations in the problem, k", ylabel=unit, ylim=(0, 1))
    left.set_xticks(range(len(levels)), [str(k) for k in levels])
    left.legend(fontsize=8)
    effects.over_steps(right, runs, ARMS, CUT, "truncated at 24 tokens (share)")
    return figure


TECHNIQUE = effects.Technique(
    "Overlong filtering",
    "-1 for truncated responses unlearns sound long reasoning where it does not fit into the"
    " limit; leaving them out of the loss and of the group's statistics keeps it.",
    ARMS,
    contrasts,
    figure,
)
