"""VAPO's language-model loss on right responses (arXiv 2504.05118, Eq. 9-10), in the rare success
of bandit.py: naive GRPO without a value model, with and without the term.

What decides, with two bandit seeds for each seed of the other experiments: fewer rollouts until the
rare right answer has probability .5 with the paper's mu of .1 than without. Fixed before any run.
"""

from collections.abc import Mapping

from dapo_jax.lab.experiments import bandit, ink
from dapo_jax.lab.experiments.effects import Contrast, Runs, Technique
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.lab.experiments.techniques import clip_higher

ARMS = {"without": (0.2,), "mu .1": (0.2, 0.1)}  # label -> upper bound, mu


def tasks(base_of: Mapping[int, int]) -> list[Task]:
    return clip_higher.play(base_of, list(ARMS.values()))


def contrasts(runs: Runs) -> list[Contrast]:
    found = {label: clip_higher.curves(runs, *arm) for label, arm in ARMS.items()}
    before, after = ([bandit.measures(c) for c in of] for of in found.values())

    def compare(measure: str, expected: int = 0) -> Contrast:
        values = ([m[measure] for m in of] for of in (after, before))
        return Contrast(measure, "mu .1", "without", *values, expected)

    return [
        compare(bandit.HALF, -1),
        *(compare(m) for m in (bandit.AT_10, bandit.GROWTH, bandit.ENTROPY_HALF)),
    ]


def figure(runs: Runs):
    figure, axes = ink.panels(1, 2)
    for label, arm in ARMS.items():
        found, rollouts = clip_higher.curves(runs, *arm), range(bandit.ROLLOUTS + 1)
        ink.band(axes[0], rollouts, [c["rare"] for c in found], label)
        ink.band(axes[1], rollouts, [c["entropy"] for c in found], label)
    axes[0].set(xlabel="rollout (16 updates each)", ylabel="probability of the rare right answer")
    axes[1].set(xlabel="rollout (16 updates each)", ylabel="entropy (nats)")
    axes[0].legend()
    return figure


TECHNIQUE = Technique(
    "Positive-example loss",
    "Where success is rare, the log-likelihood loss on right responses speeds up its growth.",
    {},
    contrasts,
    figure,
    tasks,
)
