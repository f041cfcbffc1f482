"""Token-level loss (Eq. 8): a mean over all tokens of a batch against GRPO's mean over responses of
token means.

Base `rambling`, whose long style repeats its steps and may not end. What decides, sample mean minus
token mean: a higher peak of the mean response length (largest mean of 5 consecutive steps), and a
higher truncated share in steps 6 to 10. Until the runs on seeds 100 and 101 the second was the peak
of the truncated share, which is reported beside it.
"""

from dapo_jax.lab.experiments import effects, ink
from dapo_jax.lab.experiments.arms import NAIVE, RAMBLING, TOKEN_MEAN, Arm
from dapo_jax.lab.experiments.effects import ACCURACY, CUT, ENTROPY, LENGTH, curve, last, peak

ARMS = {
    "mean_sample": Arm("sample mean", "rambling", NAIVE | RAMBLING),
    "mean_token": Arm("token mean", "rambling", NAIVE | RAMBLING | TOKEN_MEAN),
}


def contrasts(runs: effects.Runs) -> list[effects.Contrast]:
    compare = lambda what, number, expected=0: runs.compare(what, *ARMS, number, expected)
    steps_6_to_10 = lambda values: effects.steps_mean(values[5:10])
    steps_8_to_12 = lambda values: effects.steps_mean(values[7:12])
    return [
        compare("peak mean length (tokens)", curve(LENGTH, peak), +1),
        compare("truncated share, steps 6-10", curve(CUT, steps_6_to_10), +1),
        compare("peak truncated share", curve(CUT, peak)),
        compare("train accuracy, steps 8-12", curve(ACCURACY, steps_8_to_12)),
        compare("train accuracy, last 5 steps", curve(ACCURACY, last)),
        compare("mean length, last 5 steps (tokens)", curve(LENGTH, last)),
        compare("entropy, steps 8-12 (nats)", curve(ENTROPY, steps_8_to_12)),
        compare("entropy, last 5 steps (nats)", curve(ENTROPY, last)),
    ]


def figure(runs: effects.Runs):
    figure, axes = ink.panels(1, 3)
    effects.over_steps(axes[0], runs, ARMS, LENGTH, "mean response length (tokens)")
    effects.over_steps(axes[1], runs, ARMS, CUT, "truncated responses (share)")
    effects.over_steps(axes[2], runs, ARMS, ENTROPY, "entropy (nats per token)")
    return figure


TECHNIQUE = effects.Technique(
    "Token-level loss",
    "A mean over responses of token means lets the response length overshoot and truncation"
    " rise before they recover; a mean over tokens curbs the repeats from the start.",
    ARMS,
    contrasts,
    figure,
)
