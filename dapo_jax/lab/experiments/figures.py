"""The paper's figures from the runs of a ladder: means over seeds, 95% intervals as bands."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dapo_jax.config import presets
from dapo_jax.lab.experiments import ink, stats

Runs = Mapping[str, Sequence[Sequence[dict]]]  # rung -> seed -> records of metrics.jsonl

# Dark to light along the ladder, the whole apart; the eye needs no legend to find the last rung.
COLORS = ("#2b2d42", "#5c6784", "#7b9acc", "#8cc5b5", "#e0a458")
RED, GRAY = "#c1121f", "#b8bcc6"
SIZE = (5.2, 3.9)  # inches per panel
X_LABELS = {"optim/updates": "gradient updates", "spent/tokens": "generated tokens"}
DYNAMICS = {
    "response/length_mean": "mean response length (tokens)",
    "reward/mean": "mean reward of drawn responses",
    "policy/mean_prob": "mean probability of sampled tokens",
    "sampling/accept_frac": "groups with right and wrong responses (share)",
}


def curve(records: Sequence[dict], tag: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """(x [n], values [n]) of the records with the number `tag`; x is 0 before the first step."""
    rows = [r for r in records if isinstance(r.get(tag), int | float)]
    return np.array([r.get(x, 0) for r in rows], float), np.array([r[tag] for r in rows], float)


def rung_colors(of: presets.Ladder) -> dict[str, str]:
    climbed = dict(zip(of.cumulative[:-1], COLORS * 2, strict=False))
    return dict.fromkeys(of.leave_one_out, GRAY) | climbed | {of.cumulative[-1]: RED}


def bars(places: Mapping[str, Mapping[str, Sequence[float]]], of: presets.Ladder) -> Figure:
    """Table 1 as bars: the paper's beside ours, and all of it with one technique left out. places:
    two, in words -> rung -> accuracy [seeds]."""
    names, colors = list(next(iter(places.values()))), rung_colors(of)
    figure, (left, right) = ink.panels(1, 2, 6.0, 1.2 + 0.42 * len(names), ratios=(1, 2))
    left.bar_label(left.barh(list(of.paper), list(of.paper.values()), color=GRAY))
    left.set(xlabel="AIME 2024, avg@32 (%)", title="The paper: Qwen2.5-32B")
    for (place, values), shift, alpha in zip(places.items(), (-0.2, 0.2), (1, 0.45), strict=True):
        means, halves = zip(*(stats.interval(values[n]) for n in names), strict=True)
        drawn = right.barh(
            np.arange(len(names)) + shift, means, 0.38, xerr=np.nan_to_num(halves),
            color=[colors[n] for n in names], alpha=alpha, capsize=2, label=place,
        )  # fmt: skip
        right.bar_label(drawn, fmt="%.3f", padding=3, fontsize=7)
    right.set_yticks(range(len(names)), names)
    right.set_xlabel("held-out accuracy, T=1 (share of responses)")
    right.set_title("Here: bars with 95% intervals over seeds")
    named = right.get_legend_handles_labels()
    figure.legend(*named, loc="outside lower right", ncols=2, fontsize=8)
    left.invert_yaxis()
    right.invert_yaxis()
    return figure


def curves(runs: Runs, tag: str, steps: int) -> dict[str, Figure]:
    """Name -> figure of DAPO's ladder: held-out accuracy over updates and over generated tokens;
    `DYNAMICS`; and entropy with and without Clip-Higher, early in the ladder and in full DAPO,
    where both are there. tag: held-out accuracy. steps: rollout steps shown over updates."""
    of = presets.LADDERS["dapo"]
    climbed = {name: color for name, color in rung_colors(of).items() if name in of.cumulative}
    updates, tokens = ("optim/updates", steps), ("spent/tokens", np.inf)
    accuracy, axes = ink.panels(1, 2, *SIZE)
    for ax, over in zip(axes, (updates, tokens), strict=True):
        panel(ax, runs, climbed, tag, "held-out accuracy, T=1 (share)", *over)
    dynamics, axes = ink.panels(2, 2, *SIZE)
    for ax, (shown, label) in zip(axes, DYNAMICS.items(), strict=True):
        panel(ax, runs, climbed, shown, label, *updates)
    out = {"accuracy": accuracy, "dynamics": dynamics}
    switches = [("+clip_higher", "+overlong_filtering"), (of.cumulative[-1], "-clip_higher")]
    if switches := [pair for pair in switches if runs.keys() >= set(pair)]:
        out["clip_higher"], axes = ink.panels(1, len(switches), *SIZE)
        for ax, (on, off) in zip(axes, switches, strict=True):
            label = "entropy of sampled tokens (nats)"
            panel(ax, runs, {on: RED, off: COLORS[0]}, "policy/entropy", label, *updates)
    return out


def panel(
    ax, runs: Runs, colors: Mapping[str, str], tag: str, label: str, x: str, steps: float
) -> None:
    """A number over `x`, up to a step, of the rungs that have colors."""
    for name in filter(runs.__contains__, colors):
        shown = ([r for r in records if r["step"] <= steps] for records in runs[name])
        each = [curve(records, tag, x) for records in shown]
        ink.over_seeds(ax, each, name, colors[name], even=x == "spent/tokens")
    ax.set(xlabel=X_LABELS[x], ylabel=label)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.legend(fontsize=8)
