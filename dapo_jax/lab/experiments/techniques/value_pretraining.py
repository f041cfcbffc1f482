"""VAPO's value pre-training (arXiv 2504.05118, section 4.1; its reason: VC-PPO, arXiv 2503.01491):
what a value model that starts from a reward model says before the end of a response.

Runs of credit.py with lambda .95. A base's reward model is its body with a scalar head, trained to
tell right from wrong at the last token alone, and `critic.init_from` reads it. Values that are what
the policy will earn make advantages of mean 0 at every position; others prefer or avoid positions,
whatever is written there.

What decides, with pre-training minus without, before the policy's first update: a smaller error of
the mean value in the first third of the tokens by position, more explained variance there, and a
smaller slope of advantages over position; slope and error without their signs. Fixed after runs on
seed 100 at the policy's usual rate (3e-4), and at 1e-4 nothing was run before seeds 0 to 5.
Accuracy does not decide: there both arms were above .9 in the third rollout.
"""

from collections.abc import Callable, Mapping

from dapo_jax.lab.experiments import credit, effects, ink
from dapo_jax.lab.experiments.credit import FIXED, PRETRAINED, REWARD_MODEL
from dapo_jax.lab.experiments.effects import ACCURACY, LENGTH, Contrast, Runs
from dapo_jax.lab.experiments.pool import Task

FROM_REWARD_MODEL = FIXED | {"critic.init_from": REWARD_MODEL}
ARMS = {
    "reward_model": FROM_REWARD_MODEL,
    "reward_model_pretrained": FROM_REWARD_MODEL | PRETRAINED,
    "fixed": FIXED,
}
NAMES = dict(zip(ARMS, ("reward model", "pre-trained", "policy, head of 0"), strict=True))


def tasks(base_of: Mapping[int, int]) -> list[Task]:
    return credit.tasks(base_of, ARMS)


def contrasts(runs: Runs) -> list[Contrast]:
    each = {arm: credit.found(runs, arm) for arm in ARMS}

    def compare(
        measure: str, number: Callable, expected: int = 0, after: str = "reward_model_pretrained"
    ) -> Contrast:
        values = ([number(run) for run in each[arm]] for arm in (after, "reward_model"))
        return Contrast(measure, NAMES[after], NAMES["reward_model"], *values, expected)

    error = lambda third: lambda run: abs(run["before"][third]["error"])
    explained, advantage = (
        lambda run, name=name: run["before"]["first"][name] for name in ("explained", "advantage")
    )
    slope = lambda run: abs(run["before"]["slope"])
    early = lambda tag: lambda run: effects.steps_mean(run["series"][tag][1:4])
    at_end = [
        runs.results[credit.reward_model_folder(b)]["explained"] for b in runs.base_of.values()
    ]
    wrong = "error of values, {} third"
    steep, train = "slope of advantages per 10 tokens", "train accuracy, rollouts 2-4"
    return [
        compare(wrong.format("first"), error("first"), -1),
        compare("explained variance, first third", explained, +1),
        compare(steep, slope, -1),
        *(compare(wrong.format(third), error(third)) for third in credit.THIRDS[1:]),
        compare("mean advantage, first third", advantage),
        compare(train, early(ACCURACY)),
        compare("mean length, rollouts 2-4 (tokens)", early(LENGTH)),
        compare("held-out accuracy, k=2,3,4,5", lambda run: credit.held_out(run, credit.LEVELS)),
        Contrast(
            "explained variance, reward model",
            "at the last token",
            "first third",
            at_end,
            [explained(run) for run in each["reward_model"]],
            0,
        ),
        compare(wrong.format("first"), error("first"), after="fixed"),
        compare(steep, slope, after="fixed"),
        compare(train, early(ACCURACY), after="fixed"),
    ]


def figure(runs: Runs):
    figure, axes = ink.panels(1, 3)
    for arm, name in NAMES.items():
        each = credit.found(runs, arm)
        for ax, measure in zip(axes, ("error", "advantage"), strict=False):
            by_third = [[run["before"][third][measure] for third in credit.THIRDS] for run in each]
            ink.band(ax, range(len(credit.THIRDS)), by_third, name)
        accuracies = [run["series"][ACCURACY] for run in each]
        ink.band(axes[2], range(1, credit.STEPS + 1), accuracies, name)
    for ax, unit in zip(axes, ("mean of value - return", "mean advantage"), strict=False):
        ax.set_xticks(range(len(credit.THIRDS)), credit.THIRDS)
        ax.set(xlabel="third of the tokens, by position", ylabel=f"{unit} (rewards are +-1)")
    axes[2].set(xlabel="rollout of the policy (8 updates each)", ylabel="training accuracy (share)")
    axes[0].legend()
    return figure


TECHNIQUE = effects.Technique(
    "Value pre-training",
    "A value model that starts from a reward model errs before the last token, and so advantages"
    " depend on position; value pre-training takes both away.",
    {},
    contrasts,
    figure,
    tasks,
)
