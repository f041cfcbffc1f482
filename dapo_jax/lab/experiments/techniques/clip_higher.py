"""Clip-Higher (Eq. 8): the upper bound of the ratio, in the bandit of bandit.py.

What decides, with two bandit seeds for each seed of the other experiments: fewer rollouts until the
rare right answer has probability .5 with eps_high .28 than .20, with .40 than .28, and without a
bound than with .40.
"""

from collections.abc import Mapping, Sequence

from dapo_jax.lab.experiments import bandit, ink, stats
from dapo_jax.lab.experiments.effects import Contrast, Runs, Technique
from dapo_jax.lab.experiments.pool import Task


def tasks(base_of: Mapping[int, int]) -> list[Task]:
    return play(base_of, [(bound,) for bound in bandit.CLIP_HIGH])


def play(base_of: Mapping[int, int], arms: Sequence[tuple[float, ...]]) -> list[Task]:
    """The bases, and from each the bandit with each of `arms`: (upper bound, positive_coef)."""
    bases = sorted(set(base_of.values()))
    out = [Task(bandit.base_folder(b), bandit.make, (b,)) for b in bases]
    for b in bases:
        mine = [s for s in base_of if base_of[s] == b]
        seeds = [*mine, *(s + len(base_of) for s in mine)]
        out += [
            Task(
                bandit.folder(bound, b, *positive), bandit.play, (b, bound, seeds, *positive),
                (bandit.base_folder(b),),
            )
            for bound, *positive in arms
        ]  # fmt: skip
    return out


def curves(runs: Runs, bound: float, *positive: float) -> list[dict]:
    """The curves of bandit.py at one upper bound, by seed."""
    found: dict[str, dict] = {}
    for base in sorted(set(runs.base_of.values())):
        found |= runs.results[bandit.folder(bound, base, *positive)]["curves"]
    return [found[seed] for seed in sorted(found, key=int)]


def contrasts(runs: Runs) -> list[Contrast]:
    measured = {b: [bandit.measures(c) for c in curves(runs, b)] for b in bandit.CLIP_HIGH}

    def compare(measure: str, after: float, before: float, expected: int = 0) -> Contrast:
        values = ([m[measure] for m in measured[bound]] for bound in (after, before))
        return Contrast(measure, bandit.label(after), bandit.label(before), *values, expected)

    first, *others = bandit.CLIP_HIGH
    neighbors = zip(others, bandit.CLIP_HIGH, strict=False)
    return [
        *(compare(bandit.HALF, a, b, -1) for a, b in neighbors),
        *(compare(bandit.HALF, a, first) for a in others[1:]),
        *(compare(measure, a, first) for measure in bandit.MEASURES[1:] for a in others),
    ]


def figure(runs: Runs):
    figure, axes = ink.panels(1, 3)
    for i, bound in enumerate(bandit.CLIP_HIGH):
        found, label, rollouts = curves(runs, bound), bandit.label(bound), bandit.ROLLOUTS + 1
        ink.band(axes[0], range(rollouts), [c["rare"] for c in found], label)
        half = stats.interval([bandit.measures(c)[bandit.HALF] for c in found])
        axes[1].errorbar([i], [half.mean], [half.half], fmt="o", capsize=4)
        ink.band(axes[2], range(rollouts), [c["entropy"] for c in found], label)
    axes[0].set(xlabel="rollout (16 updates each)", ylabel="probability of the rare right answer")
    axes[1].set(xlabel="eps_high", ylabel="rollouts to probability .5")
    ticks = [f"{b:g}" if b < 10 else "none" for b in bandit.CLIP_HIGH]
    axes[1].set_xticks(range(len(ticks)), ticks)
    axes[2].set(xlabel="rollout (16 updates each)", ylabel="entropy (nats)")
    axes[0].legend()
    return figure


TECHNIQUE = Technique(
    "Clip-Higher",
    "Where the clip binds, a higher upper bound alone speeds up a rare right move that prompts"
    " share, and more so the higher it is.",
    {},
    contrasts,
    figure,
    tasks,
)
