"""VAPO's length-adaptive GAE (arXiv 2504.05118, Eq. 4-5): lambda 1 - 1 / (1.5 l) against .95 for
short and long responses to the same problems, in the runs of credit.py.

Of a response's reward the share lambda^(l - 1) reaches its first token, beside what the values say:
with .95 most of it in three tokens and a fifth in 31, with the adaptive lambda about half in both.

What decides, with the adaptive lambda minus .95 and value pre-training in both: held-out accuracy
of the long working (k = 4, 5) after 8 rollouts of the policy. Fixed after runs on seed 101 at the
policy's usual rate (3e-4), in which both were above .9 in the third rollout; at the rate that was
chosen for that, 1e-4, nothing was run before seeds 0 to 5.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np

from dapo_jax.lab.experiments import credit, effects, ink, stats
from dapo_jax.lab.experiments.credit import ADAPTIVE, FIXED, PRETRAINED
from dapo_jax.lab.experiments.effects import ACCURACY, Contrast, Runs
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.variants.vapo import gae

ARMS = {
    "fixed": FIXED,
    "adaptive": FIXED | ADAPTIVE,
    "fixed_pretrained": FIXED | PRETRAINED,
    "adaptive_pretrained": FIXED | PRETRAINED | ADAPTIVE,
}
PAIRS = {"": ("adaptive_pretrained", "fixed_pretrained"), "no pre-training": ("adaptive", "fixed")}
LONG, SHORT = (4, 5), (2, 3)  # operations: the working takes 26 and 31 tokens, 16 and 21
SPREAD = "critic/{}/advantage_std"  # of the shortest and the longest third of the responses


def reward_share(length, alpha: float):
    """Of the reward of a response of `length` TOKENS what GAE gives its first token where values
    are 0; alpha 0: lambda .95."""
    lam = gae.length_adaptive_lambda(length, alpha) if alpha else 0.95
    return lam ** (np.asarray(length) - 1)


def spread(run: Mapping, third: str) -> float:
    """Of the advantages of the policy's first rollout; NaN where this third has no responses."""
    first = run["series"][SPREAD.format(third)][0]
    return np.nan if first is None else first


def tasks(base_of: Mapping[int, int]) -> list[Task]:
    return credit.tasks(base_of, ARMS)


def contrasts(runs: Runs) -> list[Contrast]:
    def compare(measure: str, number: Callable, pair: str = "", expected: int = 0) -> Contrast:
        values = ([number(run) for run in credit.found(runs, arm)] for arm in PAIRS[pair])
        name = ", ".join(filter(None, (measure, pair)))
        return Contrast(name, "adaptive", "lambda .95", *values, expected)

    held_out = lambda levels: lambda run: credit.held_out(run, levels)
    curve = lambda run: effects.steps_mean(run["series"][ACCURACY])
    out = []
    for pair in PAIRS:
        out += [
            compare("held-out accuracy, k=4,5", held_out(LONG), pair, 0 if pair else +1),
            compare("held-out accuracy, k=2,3", held_out(SHORT), pair),
            compare("train accuracy, all rollouts", curve, pair),
            *(
                compare(
                    f"std of advantages, {third} third, rollout 1",
                    functools.partial(spread, third=third),
                    pair,
                )
                for third in ("short", "long")
            ),
        ]
    return out


def figure(runs: Runs):
    figure, axes = ink.panels(1, 3)
    lengths = np.arange(1, 47)
    for i, (name, alpha) in enumerate((("lambda .95", 0.0), ("adaptive", 1.5))):
        axes[0].plot(lengths, reward_share(lengths, alpha), label=name)
        arm = f"{'adaptive' if alpha else 'fixed'}_pretrained"
        each = credit.found(runs, arm)
        curves = [run["series"][ACCURACY] for run in each]
        ink.band(axes[1], range(1, credit.STEPS + 1), curves, name)
        points = [
            stats.interval([spread(run, third) for run in each]) for third in ("short", "long")
        ]
        x = np.arange(2) + 0.35 * (i - 0.5)
        halves = [p.half for p in points]
        axes[2].bar(x, [p.mean for p in points], 0.35, yerr=halves, capsize=3, label=name)
    axes[0].set(xlabel="response (tokens)", ylabel="share of the reward at the first token")
    axes[1].set(xlabel="rollout of the policy (8 updates each)", ylabel="training accuracy (share)")
    axes[2].set(xlabel="third of the responses, by length", ylabel="std of advantages, rollout 1")
    axes[2].set_xticks(range(2), ["short", "long"])
    axes[0].legend()
    return figure


TECHNIQUE = effects.Technique(
    "Length-adaptive GAE",
    "Where short and long responses mix, a lambda that grows with length teaches the long ones"
    " better than one lambda for all.",
    {},
    contrasts,
    figure,
    tasks,
)
