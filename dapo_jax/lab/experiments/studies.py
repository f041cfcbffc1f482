"""The experiments, one per technique: arms, contrasts, claim, figure. `ALL` has their names.

What decides was fixed before seeds 0 to 5 ran, but not before any run: docs/results/mechanisms.md
says what was changed after runs on other seeds. dynamic_sampling had been moved to longer problems
and from 80 to 60 steps before. The noise of its gradient, which decided too, is no longer measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.config import presets, schema
from dapo_jax.lab.experiments import bandit, bases, study
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.lab.experiments.study import Arm, Contrast, Panel, Runs, Study, level, peak, series

_BASE = schema.leaves(schema.base())


def _changed(config) -> dict[str, Any]:
    return {k: v for k, v in schema.leaves(config).items() if v != _BASE[k]}


NAIVE = _changed(presets.grpo())
VAPO = _changed(presets.vapo(schema.base()))
# Limit, steps and width of the ramp of the arms from base `rambling`, and from `careful`.
RAMBLING = {"rollout.max_response_tokens": 72, "steps": 30, "reward.overlong_buffer_tokens": 24}
CAREFUL = {"rollout.max_response_tokens": 24, "steps": 50, "reward.overlong_buffer_tokens": 6}
TOKEN_MEAN = {"loss.normalizer": "batch_tokens"}
OUT_OF_LOSS, OUT_OF_GROUP = ({"loss.overlong_filter": what} for what in ("loss", "group"))
SOFT = {"reward.overlong_penalty": 1.0}
HARD = {"rollout.max_response_tokens": 40, "steps": 60, **OUT_OF_LOSS}

LAST, END = slice(-study.WINDOW, None), "last 5 steps"
LENGTH, CUT, ACCURACY, ENTROPY, TOKENS, EXPLAINED = study.SERIES
TRAIN, ROOM = "train accuracy", "accuracy with room, k=4,5"


def over_steps(tag: str, unit: str) -> Panel:
    return Panel("rollout step", unit, lambda run: dict(enumerate(run["series"][tag], 1)))


LENGTHS = over_steps(LENGTH, "mean response length (tokens)")
TRUNCATED = over_steps(CUT, "truncated responses (share)")

# Eq. 8. The long style of base `rambling` repeats its steps and may not end.
SAMPLE, TOKEN = "mean_sample", "mean_token"
TOKEN_LEVEL = Study(
    "Token-level loss",
    "A mean over responses of token means lets the response length overshoot and truncation rise"
    " before they recover; a mean over tokens curbs the repeats from the start.",
    [
        Contrast("peak mean length (tokens)", SAMPLE, TOKEN, series(LENGTH, peak), +1),
        Contrast("truncated share, steps 6-10", SAMPLE, TOKEN, series(CUT, slice(5, 10)), +1),
        Contrast("peak truncated share", SAMPLE, TOKEN, series(CUT, peak)),
        Contrast(f"{TRAIN}, {END}", SAMPLE, TOKEN, series(ACCURACY, LAST)),
        Contrast(f"mean length, {END} (tokens)", SAMPLE, TOKEN, series(LENGTH, LAST)),
    ],
    [LENGTHS, TRUNCATED, over_steps(ENTROPY, "entropy (nats per token)")],
    {
        SAMPLE: Arm("sample mean", "rambling", NAIVE | RAMBLING),
        TOKEN: Arm("token mean", "rambling", NAIVE | RAMBLING | TOKEN_MEAN),
    },
)

# Section 3.4. The working of base `careful` fits 24 tokens at k = 2, 3 and not at k = 4, 5. What
# decides is accuracy on the latter with room to write.
BEFORE, OFF, LOSS, GROUP = "before training", "filter_off", "filter_loss", "filter_group"


def with_base(runs: Runs, arm: str) -> list[Mapping]:
    """`BEFORE` is no arm, but what the arms started from."""
    if arm != BEFORE:
        return runs.of(arm)
    return [runs.results[bases.folder("careful", b)] for b in runs.base_of.values()]


FILTER = Study(
    "Overlong filtering",
    "-1 for truncated responses unlearns sound long reasoning where it does not fit into the"
    " limit; leaving them out of the loss and of the group's statistics keeps it.",
    [
        Contrast(ROOM, OFF, BEFORE, level(4, 5), -1),
        Contrast(ROOM, GROUP, OFF, level(4, 5), +1),
        Contrast(ROOM, GROUP, BEFORE, level(4, 5)),
        Contrast(ROOM, LOSS, OFF, level(4, 5)),
        Contrast(f"{TRAIN}, {END}", GROUP, OFF, series(ACCURACY, LAST)),
        Contrast(f"truncated share, {END}", GROUP, OFF, series(CUT, LAST)),
    ],
    [
        Panel(
            "operations in the problem, k",
            f"held-out accuracy with {bases.ROOM} tokens (share)",
            lambda run: {k: level(k)(run) for k in bases.TEST_LEVELS},
        ),
        TRUNCATED._replace(arms=(OFF, LOSS, GROUP)),
    ],
    {
        OFF: Arm("-1 for truncation", "careful", NAIVE | CAREFUL),
        LOSS: Arm("out of the loss", "careful", NAIVE | CAREFUL | OUT_OF_LOSS),
        GROUP: Arm("out of loss and group", "careful", NAIVE | CAREFUL | OUT_OF_GROUP),
    },
    read=with_base,
)

# Eq. 13, on top of overlong filtering, which alone leaves length free.
FREE, RAMP, CAREFUL_RAMP = "ramble_group", "ramble_group_soft", "filter_group_soft"
_RAMBLE = NAIVE | RAMBLING | TOKEN_MEAN | OUT_OF_GROUP
_LABEL = "out of loss and group, soft ramp"
SOFT_PUNISHMENT = Study(
    "Soft Overlong Punishment",
    "With truncated responses filtered out nothing restrains length; the soft ramp on top of the"
    " filter restores control of length and truncation.",
    [
        Contrast(f"mean length, {END} (tokens)", RAMP, FREE, series(LENGTH, LAST), -1),
        Contrast(f"truncated share, {END}", RAMP, FREE, series(CUT, LAST), -1),
        Contrast(f"truncated share, {END}", CAREFUL_RAMP, GROUP, series(CUT, LAST)),
        Contrast(f"{TRAIN}, {END}", RAMP, FREE, series(ACCURACY, LAST)),
        Contrast("held-out accuracy, k=2,3,4", RAMP, FREE, level(2, 3, 4)),
        Contrast(ROOM, CAREFUL_RAMP, GROUP, level(4, 5)),
    ],
    [
        LENGTHS._replace(x="rollout step, base rambling", arms=(FREE, RAMP)),
        TRUNCATED._replace(x="rollout step, base rambling", arms=(FREE, RAMP)),
        TRUNCATED._replace(x="rollout step, base careful", arms=(GROUP, CAREFUL_RAMP)),
    ],
    {
        FREE: Arm("out of loss and group", "rambling", _RAMBLE),
        RAMP: Arm(_LABEL, "rambling", _RAMBLE | SOFT),
        GROUP: FILTER.arms[GROUP],
        CAREFUL_RAMP: Arm(_LABEL, "careful", NAIVE | CAREFUL | OUT_OF_GROUP | SOFT),
    },
)

# Eq. 11, on problems of k = 5 to 8: on the quickstart's levels both arms end near 1.
ON, WITHOUT = "dynamic_on", "dynamic_off"


def held_out(run: Mapping) -> dict[int, float]:
    """Evaluated step -> accuracy."""
    return {int(step): e["heldout"] for step, e in run["evaluations"].items()}


def late(run: Mapping) -> float:
    """Mean of the held-out accuracies of the last 10 steps, both ends."""
    found = held_out(run)
    return float(np.mean([a for step, a in found.items() if step >= max(found) - 10]))


DYNAMIC = Study(
    "Dynamic Sampling",
    "At equal updates, batches of mixed groups alone give higher held-out accuracy; they cost more"
    " generated tokens.",
    [
        Contrast("held-out accuracy, mean of steps 50-60", ON, WITHOUT, late, +1),
        Contrast(f"{TRAIN}, {END}", ON, WITHOUT, series(ACCURACY, LAST)),
        Contrast("tokens generated (M)", ON, WITHOUT, series(TOKENS, lambda t: t[-1] / 1e6)),
    ],
    [
        Panel("rollout step (8 updates each)", "held-out accuracy (share, T=1)", held_out),
        over_steps(TOKENS, "generated tokens"),
    ],
    {
        WITHOUT: Arm("off", "hasty", HARD | {"dynamic_sampling.enabled": False}),
        ON: Arm("on", "hasty", HARD | {"dynamic_sampling.enabled": True}),
    },
)

# arXiv 2504.05118, section 4.1. From base `careful`, whose first token decides: a working of 16 to
# 31 tokens that is mostly right, or three tokens that are mostly wrong. The rate is one at which
# the policy's 8 rollouts do not suffice.
AT_ONCE, PRETRAINED, POLICY_STEPS, VALUE_STEPS = "values_at_once", "values_pretrained", 8, 10
_VALUES = {"optim.lr": 1e-4, "critic.lr": 1e-3, "loss.positive_coef": 0.0}
_VALUES |= {"rollout.max_response_tokens": bases.ROOM, "critic.length_alpha": 0.0}
_COUNTS = {"critic.pretrain_steps": 0, "steps": POLICY_STEPS}
_MORE = {"critic.pretrain_steps": VALUE_STEPS, "steps": VALUE_STEPS + POLICY_STEPS}
_FIRST = series(EXPLAINED, lambda values: values[-POLICY_STEPS])
_TRAINING, _HELD_OUT = series(ACCURACY, slice(-POLICY_STEPS, None)), level(2, 3, 4, 5)


def of_policy(tag: str) -> Panel:
    """Over the rollouts in which the policy learns."""
    values = lambda run: dict(enumerate(run["series"][tag][-POLICY_STEPS:], 1))
    return Panel("rollout of the policy (8 updates each)", tag, values)


VALUE_PRETRAINING = Study(
    "Value pre-training",
    "A value model that starts from the policy explains nothing of the returns that the policy's"
    " first updates learn from; value pre-training makes it explain part of them.",
    [
        Contrast("explained variance, the policy's first rollout", PRETRAINED, AT_ONCE, _FIRST, +1),
        Contrast(f"{TRAIN}, the policy's rollouts", PRETRAINED, AT_ONCE, _TRAINING),
        Contrast("held-out accuracy, k=2,3,4,5", PRETRAINED, AT_ONCE, _HELD_OUT),
    ],
    [of_policy(EXPLAINED), of_policy(ACCURACY), of_policy(LENGTH)],
    {
        AT_ONCE: Arm("at once", "careful", VAPO | _VALUES | _COUNTS),
        PRETRAINED: Arm("pre-trained", "careful", VAPO | _VALUES | _MORE),
    },
)

ALL: dict[str, Study] = {
    "token_mean": TOKEN_LEVEL,
    "overlong_filter": FILTER,
    "soft_punishment": SOFT_PUNISHMENT,
    "dynamic_sampling": DYNAMIC,
    "clip_higher": bandit.CLIP_HIGHER,
    "positive_lm": bandit.POSITIVE_LM,
    "value_pretraining": VALUE_PRETRAINING,
}


def tasks(names: Sequence[str], base_of: Mapping[int, int]) -> list[Task]:
    """Everything that these studies need, bases first; what two of them share is made once."""
    arms = {arm: of for name in names for arm, of in ALL[name].arms.items()}
    out = study.tasks(arms, base_of)
    out += (task for name in names for task in ALL[name].tasks(base_of))
    return list({task.folder: task for task in out}.values())
