"""What the mechanism runs say: one number a seed and arm, and contrasts of arms, seed by seed.

`mechanisms.py` states which contrasts decide; here they are computed. Everything takes the results
of the tasks (plain JSON) and returns plain data.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.experiments import arms, bandit, bases, snr, stats
from dapo_jax.experiments.stats import Interval

WINDOW = 5  # rollout steps that a curve is averaged over


class Contrast(NamedTuple):
    """`after` minus `before`, seed by seed."""

    measure: str
    after_name: str
    before_name: str
    after: list[float]
    before: list[float]
    expected: int  # +1 or -1: the sign that the claim needs; 0: reported as found

    @property
    def difference(self) -> Interval:
        return stats.paired(self.after, self.before)

    @property
    def disjoint(self) -> bool:
        return stats.apart(stats.interval(self.after), stats.interval(self.before))

    @property
    def shown(self) -> bool:
        """The paired 95% interval excludes zero, on the expected side."""
        d = self.difference
        return stats.excludes_zero(d) and d.mean * self.expected > 0


class Effect(NamedTuple):
    name: str
    claim: str
    contrasts: list[Contrast]

    @property
    def shown(self) -> bool:
        """Every contrast that decides is."""
        return all(x.shown for x in self.contrasts if x.expected)


# ------------------------------------------------------------------------------------------------
# One number a run
# ------------------------------------------------------------------------------------------------


def steps_mean(values: Sequence[float | None]) -> float:
    """Of the steps that have a value."""
    return float(np.mean([v for v in values if v is not None]))


def peak(values: Sequence[float], window: int = WINDOW) -> float:
    """The largest mean of `window` consecutive steps."""
    return float(np.convolve(values, np.full(window, 1 / window), "valid").max())


def last(values: Sequence[float], window: int = WINDOW) -> float:
    return steps_mean(values[-window:])


def at_end(run: Mapping, measure: str, levels: Sequence[int]) -> float:
    """Mean over held-out levels of the last evaluation."""
    final = run["evaluations"][max(run["evaluations"], key=int)]
    return float(np.mean([final[f"k{k}"][measure] for k in levels]))


def late_accuracy(run: Mapping, window: int = 10) -> float:
    """Mean of the held-out accuracies of the evaluations of the last `window` steps, both ends."""
    found = {int(step): e["heldout"]["accuracy"] for step, e in run["evaluations"].items()}
    late = [accuracy for step, accuracy in found.items() if step >= max(found) - window]
    return float(np.mean(late))


# ------------------------------------------------------------------------------------------------
# The five effects
# ------------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """Results by folder, and which seeds and bases they are of."""

    results: Mapping[str, Mapping]
    base_of: Mapping[int, int]  # seed -> seed of its base

    def each(self, arm: str, number: Callable[[Mapping], float]) -> list[float]:
        return [number(self.results[arms.folder(arm, s)]) for s in self.base_of]

    def compare(
        self,
        measure: str,
        after: str,
        before: str,
        number: Callable[[Mapping], float],
        expected: int = 0,
    ) -> Contrast:
        return Contrast(
            measure, after, before, self.each(after, number), self.each(before, number), expected
        )


def curve(tag: str, reduce: Callable) -> Callable[[Mapping], float]:
    return lambda run: reduce(run["series"][tag])


def level(measure: str, *levels: int) -> Callable[[Mapping], float]:
    return lambda run: at_end(run, measure, levels)


LENGTH, CUT = "response/length_mean", "response/truncated_frac"
ACCURACY, ENTROPY = "reward/accuracy", "policy/entropy"


def token_mean(runs: Runs) -> Effect:
    early = lambda values: steps_mean(values[7:12])
    pair = ("mean_sample", "mean_token")
    return Effect(
        "Token-level loss",
        "A mean over responses of token means lets the response length overshoot and truncation"
        " rise before they recover; a mean over tokens curbs the repeats from the start.",
        [
            runs.compare("peak mean length (tokens)", *pair, curve(LENGTH, peak), +1),
            runs.compare(
                "truncated share, steps 6-10", *pair, curve(CUT, lambda v: steps_mean(v[5:10])), +1
            ),
            runs.compare("peak truncated share", *pair, curve(CUT, peak)),
            runs.compare("train accuracy, steps 8-12", *pair, curve(ACCURACY, early)),
            runs.compare("train accuracy, last 5 steps", *pair, curve(ACCURACY, last)),
            runs.compare("mean length, last 5 steps (tokens)", *pair, curve(LENGTH, last)),
            runs.compare("entropy, steps 8-12 (nats)", *pair, curve(ENTROPY, early)),
            runs.compare("entropy, last 5 steps (nats)", *pair, curve(ENTROPY, last)),
        ],
    )


def base_accuracy(runs: Runs, levels: Sequence[int]) -> list[float]:
    """Of the base that each seed started from."""
    return [
        float(
            np.mean(
                [
                    runs.results[bases.folder("careful", b)]["levels"][f"k{k}"]["accuracy"]
                    for k in levels
                ]
            )
        )
        for b in runs.base_of.values()
    ]


def overlong_filter(runs: Runs) -> Effect:
    room = "accuracy with room, k=4,5"
    before = base_accuracy(runs, (4, 5))
    off = runs.each("filter_off", level("accuracy", 4, 5))
    group = runs.each("filter_group", level("accuracy", 4, 5))
    compare = runs.compare
    return Effect(
        "Overlong filtering",
        "-1 for truncated responses unlearns sound long reasoning where it does not fit into the"
        " limit; leaving them out of the loss and of the group's statistics keeps it.",
        [
            Contrast(room, "filter_off", "base", off, before, -1),
            Contrast(room, "filter_group", "filter_off", group, off, +1),
            Contrast(room, "filter_group", "base", group, before, 0),
            compare(room, "filter_loss", "filter_off", level("accuracy", 4, 5)),
            compare(
                "worked out, k=4,5 (share)",
                "filter_group",
                "filter_off",
                level("worked_share", 4, 5),
            ),
            compare(
                "right within the limit, k=2,3", "filter_group", "filter_off", level("fit", 2, 3)
            ),
            compare(
                "right within the limit, k=2,3", "filter_loss", "filter_off", level("fit", 2, 3)
            ),
            compare(
                "train accuracy, last 5 steps", "filter_group", "filter_off", curve(ACCURACY, last)
            ),
            compare(
                "train accuracy, last 5 steps", "filter_loss", "filter_off", curve(ACCURACY, last)
            ),
            compare(
                "truncated share, last 5 steps", "filter_group", "filter_off", curve(CUT, last)
            ),
        ],
    )


def soft_punishment(runs: Runs) -> Effect:
    ramble, careful = (("ramble_group_soft", "ramble_group"), ("filter_group_soft", "filter_group"))
    compare = runs.compare
    return Effect(
        "Soft Overlong Punishment",
        "With truncated responses filtered out nothing restrains length; the soft ramp on top of"
        " the filter restores control of length and truncation.",
        [
            compare("mean length, last 5 steps (tokens)", *ramble, curve(LENGTH, last), -1),
            compare("truncated share, last 5 steps", *ramble, curve(CUT, last), -1),
            compare("truncated share, last 5 steps", *careful, curve(CUT, last)),
            compare("length, k=2 (tokens)", *careful, level("length", 2)),
            compare("train accuracy, last 5 steps", *ramble, curve(ACCURACY, last)),
            compare("held-out accuracy, k=2,3,4", *ramble, level("accuracy", 2, 3, 4)),
            compare("train accuracy, last 5 steps", *careful, curve(ACCURACY, last)),
            compare("right within the limit, k=2,3", *careful, level("fit", 2, 3)),
            compare("accuracy with room, k=4,5", *careful, level("accuracy", 4, 5)),
        ],
    )


GRADIENT = {  # of snr.py, for people
    "snr": "signal-to-noise",
    "cosine": "cosine of two batches",
    "empty": "updates without gradient (share)",
}


def dynamic_sampling(runs: Runs) -> Effect:
    def gradient(measure: str, steps: Sequence[int], expected: int = 0) -> Contrast:
        def each(way):
            found = [runs.results[snr.folder(s)]["steps"] for s in runs.base_of]
            return [float(np.mean([f[str(step)][way][measure] for step in steps])) for f in found]

        where = ", ".join(map(str, steps))
        name = f"{GRADIENT[measure]}, weights after step {where}"
        return Contrast(name, "dynamic_on", "dynamic_off", each("on"), each("off"), expected)

    pair = ("dynamic_on", "dynamic_off")
    tokens = curve("spent/tokens", lambda values: values[-1] / 1e6)
    return Effect(
        "Dynamic Sampling",
        "At equal updates, batches of mixed groups alone give higher held-out accuracy and a"
        " gradient with relatively less noise; they cost more generated tokens.",
        [
            runs.compare("held-out accuracy, mean of steps 50-60", *pair, late_accuracy, +1),
            gradient("snr", snr.STEPS, +1),
            *(gradient(measure, [step]) for measure in GRADIENT for step in snr.STEPS),
            runs.compare("tokens generated (M)", *pair, tokens),
        ],
    )


def clip_higher(runs: Runs) -> Effect:
    by_bound = {}
    for bound in bandit.CLIP_HIGH:
        curves = {}
        for base in sorted(set(runs.base_of.values())):
            curves |= runs.results[bandit.folder(bound, base)]["curves"]
        by_bound[bound] = [bandit.measures(curves[s]) for s in sorted(curves, key=int)]

    def compare(measure, after, before, expected=0):
        values = [[m[measure] for m in by_bound[bound]] for bound in (after, before)]
        return Contrast(measure, bandit.label(after), bandit.label(before), *values, expected)

    first, *others = bandit.CLIP_HIGH
    neighbours = list(zip(others, bandit.CLIP_HIGH, strict=False))
    return Effect(
        "Clip-Higher",
        "Where the clip binds, a higher upper bound alone speeds up a rare right move that prompts"
        " share, and more so the higher it is.",
        [
            *(compare(bandit.HALF, a, b, -1) for a, b in neighbours),
            *(compare(bandit.HALF, a, first) for a in others[1:]),
            *(compare(m, a, first) for m in bandit.MEASURES[1:] for a in others),
        ],
    )


EFFECTS: dict[str, Callable[[Runs], Effect]] = {
    "token_mean": token_mean,
    "overlong_filter": overlong_filter,
    "soft_punishment": soft_punishment,
    "dynamic_sampling": dynamic_sampling,
    "clip_higher": clip_higher,
}
