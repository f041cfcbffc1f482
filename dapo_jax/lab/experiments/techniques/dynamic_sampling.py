"""Dynamic Sampling (Eq. 11): batches of mixed groups alone against batches as they are drawn.

Base `hasty`, problems of k = 5 to 8 (on the quickstart's levels both arms end near 1). What
decides, on minus off: a higher held-out accuracy, mean of the evaluations of steps 50 to 60; and a
higher signal-to-noise ratio of an update's gradient (snr.py), mean over the weights that the
off-arm has after steps 0, 20 and 60. Until the runs on seeds 100 and 101 the second was taken at
the last of these alone, from fewer batches; it is reported beside it.
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from dapo_jax.lab.experiments import arms, ink, snr, stats
from dapo_jax.lab.experiments.arms import Arm
from dapo_jax.lab.experiments.effects import Contrast, Runs, Technique, curve
from dapo_jax.lab.experiments.pool import Task

HARD = {"rollout.max_response_tokens": 40, "steps": 60, "loss.overlong_filter": "loss"}
ARMS = {
    "dynamic_off": Arm("off", "hasty", HARD | {"dynamic_sampling.enabled": False}),
    "dynamic_on": Arm("on", "hasty", HARD | {"dynamic_sampling.enabled": True}),
}
GRADIENT = {  # measures of snr.py -> their names in tables
    "snr": "signal-to-noise",
    "cosine": "cosine of two batches",
    "empty": "updates without gradient (share)",
}


def noise_folder(seed: int) -> str:
    return f"snr_{seed}"


def measure_noise(where: pathlib.Path, seed: int, base_seed: int) -> dict:
    """A task of the pool: `snr.measure` on the off-arm of this seed."""
    config = arms.settings(ARMS["dynamic_off"], seed, where.parent, base_seed)
    return snr.measure(config, where, where.parent / arms.folder("dynamic_off", seed))


def tasks(base_of: Mapping[int, int]) -> list[Task]:
    return [
        Task(noise_folder(s), measure_noise, (s, b), (arms.folder("dynamic_off", s),))
        for s, b in base_of.items()
    ]


def gradient(runs: Runs, way: str, measure: str, steps: Sequence[int]) -> list[float]:
    """Mean over the weights after `steps`, way 'on' or 'off' [seeds]."""
    found = [runs.results[noise_folder(s)]["steps"] for s in runs.base_of]
    return [float(np.mean([f[str(step)][way][measure] for step in steps])) for f in found]


def late_accuracy(run: Mapping, window: int = 10) -> float:
    """Mean of the held-out accuracies of the evaluations of the last `window` steps, both ends."""
    found = {int(step): e["heldout"]["accuracy"] for step, e in run["evaluations"].items()}
    return float(np.mean([a for step, a in found.items() if step >= max(found) - window]))


def contrasts(runs: Runs) -> list[Contrast]:
    pair = ("dynamic_on", "dynamic_off")

    def compare(measure: str, steps: Sequence[int], expected: int = 0) -> Contrast:
        name = f"{GRADIENT[measure]}, weights after step {', '.join(map(str, steps))}"
        on, off = (gradient(runs, way, measure, steps) for way in ("on", "off"))
        return Contrast(name, *pair, on, off, expected)

    tokens = curve("spent/tokens", lambda values: values[-1] / 1e6)
    return [
        runs.compare("held-out accuracy, mean of steps 50-60", *pair, late_accuracy, +1),
        compare("snr", snr.STEPS, +1),
        *(compare(measure, [step]) for measure in GRADIENT for step in snr.STEPS),
        runs.compare("tokens generated (M)", *pair, tokens),
    ]


def figure(runs: Runs):
    figure, axes = ink.panels(1, 2)
    for name, arm in ARMS.items():
        each = [
            {int(s): e["heldout"]["accuracy"] for s, e in evaluations.items()}
            for evaluations in runs.each(name, lambda run: run["evaluations"])
        ]
        steps = sorted(each[0])
        ink.band(axes[0], steps, [[e[s] for s in steps] for e in each], arm.label)
    axes[0].set(xlabel="rollout step (8 updates each)", ylabel="held-out accuracy (share, T=1)")
    for i, way in enumerate(("off", "on")):
        points = [stats.interval(gradient(runs, way, "snr", [step])) for step in snr.STEPS]
        means, halves = [p.mean for p in points], [p.half for p in points]
        x = np.arange(len(points)) + 0.35 * (i - 0.5)
        axes[1].bar(x, means, 0.35, yerr=halves, capsize=3, label=way)
    axes[1].set(
        xlabel="weights of the off-arm after rollout step",
        ylabel="gradient's |mean|² / variance",
    )
    axes[1].set_xticks(range(len(snr.STEPS)), [str(s) for s in snr.STEPS])
    for ax in axes:
        ax.legend(title="Dynamic Sampling")
    return figure


TECHNIQUE = Technique(
    "Dynamic Sampling",
    "At equal updates, batches of mixed groups alone give higher held-out accuracy and a"
    " gradient with relatively less noise; they cost more generated tokens.",
    ARMS,
    contrasts,
    figure,
    tasks,
)
