"""The paper's figures from the runs of a ladder: means over seeds, 95% intervals as bands."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dapo_jax.config import presets
from dapo_jax.lab.experiments import ink, stats

Runs = Mapping[str, Sequence[Sequence[dict]]]  # rung -> seed -> records of metrics.jsonl

# Dark to light along the ladder, full DAPO apart; the eye needs no legend to find the last rung.
RUNG_COLORS = dict(
    zip(
        presets.CUMULATIVE,
        ("#2b2d42", "#5c6784", "#7b9acc", "#8cc5b5", "#e0a458", "#c1121f"),
        strict=True,
    )
)
PAPER_COLOR = "#b8bcc6"
SIZE = (5.2, 3.9)  # inches per panel


def curve(records: Sequence[dict], tag: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """(x [n], values [n]) of the records with the number `tag`; x is 0 before the first step."""
    rows = [r for r in records if isinstance(r.get(tag), int | float)]
    return np.array([r.get(x, 0) for r in rows], float), np.array([r[tag] for r in rows], float)


def draw(
    runs: Runs,
    updates: Mapping[str, np.ndarray],
    tokens: Mapping[str, np.ndarray],
    paper: Mapping[str, float],
    tag: str,
    steps: int,
    out: pathlib.Path,
) -> list[pathlib.Path]:
    """ladder.png, accuracy.png, clip_higher.png and dynamics.png in `out`.

    runs: rung -> seed -> records. updates, tokens: rung -> accuracy [seeds] at equal updates and at
    equal tokens. tag: held-out accuracy. steps: rollout steps shown over updates.
    """
    drawn = {
        "ladder": ladder(updates, tokens, paper),
        "accuracy": accuracy(runs, tag, steps),
        "clip_higher": clip_higher(runs, steps),
        "dynamics": dynamics(runs, steps),
    }
    paths = []
    for name, figure in drawn.items():
        if figure is not None:
            paths.append(out / f"{name}.png")
            figure.savefig(paths[-1], dpi=130)
    return paths


def ladder(updates, tokens, paper, colors=RUNG_COLORS) -> Figure:
    """Table 1 as bars: the paper's beside ours, and all of it with one technique left out."""
    names = list(updates)
    figure, (left, right) = ink.panels(1, 2, 6.0, 1.2 + 0.42 * len(names), ratios=(1, 2))
    left.barh(range(len(paper)), list(paper.values()), color=PAPER_COLOR)
    for i, value in enumerate(paper.values()):
        left.text(value - 1, i, f"{value:g}", va="center", ha="right")
    left.set_yticks(range(len(paper)), list(paper))
    left.set_xlabel("AIME 2024, avg@32 (%)")
    left.set_title("The paper: Qwen2.5-32B")
    for shift, alpha, values, label in (
        (-0.2, 1.0, updates, "at equal updates"),
        (0.2, 0.45, tokens, "at equal generated tokens"),
    ):
        of = [stats.interval(values[n]) for n in names]
        right.barh(
            np.arange(len(names)) + shift,
            [x.mean for x in of],
            0.38,
            xerr=np.nan_to_num([x.half for x in of]),
            color=[colors.get(n, PAPER_COLOR) for n in names],
            alpha=alpha,
            capsize=2,
            error_kw={"linewidth": 1},
            label=label,
        )
        for i, x in enumerate(of):
            end = x.mean + np.nan_to_num(x.half)
            right.text(end + 0.01, i + shift, f"{x.mean:.3f}", va="center", fontsize=7)
    right.set_yticks(range(len(names)), names)
    right.set_xlabel("held-out accuracy, T=1 (share of responses)")
    right.set_title("Here: bars with 95% intervals over seeds")
    right.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8, frameon=False
    )
    for axes in (left, right):
        axes.invert_yaxis()
    return figure


def accuracy(runs: Runs, tag: str, steps: int) -> Figure:
    """Held-out accuracy of the ladder over updates and over generated tokens."""
    figure, (left, right) = ink.panels(1, 2, *SIZE)
    for name in _ladder(runs):
        band(left, runs[name], tag, "optim/updates", name, RUNG_COLORS[name], last_step=steps)
        band(right, runs[name], tag, "spent/tokens", name, RUNG_COLORS[name], scale=1e-6)
    left.set_xlabel("gradient updates")
    right.set_xlabel("generated tokens (millions)")
    left.set_ylabel("held-out accuracy, T=1 (share)")
    left.legend(fontsize=8)
    return figure


def clip_higher(runs: Runs, steps: int) -> Figure | None:
    """Entropy with and without Clip-Higher, where both are there: early in the ladder, and in full
    DAPO."""
    full = presets.CUMULATIVE[-1]
    switches = [
        ("+clip_higher", "+overlong_filtering", "added to GRPO with overlong filtering"),
        (full, "-clip_higher", "left out of full DAPO"),
    ]
    switches = [s for s in switches if s[0] in runs and s[1] in runs]
    if not switches:
        return None
    figure, panels = ink.panels(1, len(switches), *SIZE)
    for axes, (on, off, title) in zip(panels, switches, strict=True):
        for name, label, color in (
            (on, "with Clip-Higher", "#c1121f"),
            (off, "without", "#2b2d42"),
        ):
            band(axes, runs[name], "policy/entropy", "optim/updates", label, color, steps)
        axes.set_title(f"Clip-Higher {title}")
        axes.set_xlabel("gradient updates")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("entropy of sampled tokens (nats)")
    return figure


def dynamics(runs: Runs, steps: int) -> Figure:
    """Length, reward, mean probability and the share of groups with a signal, over updates."""
    figure, panels = ink.panels(2, 2, *SIZE)
    for axes, (tag, label) in zip(
        panels,
        (
            ("response/length_mean", "mean response length (tokens)"),
            ("reward/mean", "mean reward of drawn responses"),
            ("policy/mean_prob", "mean probability of sampled tokens"),
            ("sampling/accept_frac", "groups with right and wrong responses (share)"),
        ),
        strict=True,
    ):
        for name in _ladder(runs):
            band(axes, runs[name], tag, "optim/updates", name, RUNG_COLORS[name], steps)
        axes.set_ylabel(label)
        axes.set_xlabel("gradient updates")
    panels[0].legend(fontsize=8)
    return figure


def band(
    axes,
    runs: Sequence[Sequence[dict]],
    tag: str,
    x: str,
    label: str,
    color: str,
    last_step: int = 0,
    scale: float = 1.0,
) -> None:
    """`ink.over_seeds` of a number in each seed's records. last_step: of those shown; 0 = all."""
    curves = [
        curve([r for r in records if not last_step or r["step"] <= last_step], tag, x)
        for records in runs
    ]
    ink.over_seeds(axes, curves, label, color, even=x == "spent/tokens", scale=scale)


def _ladder(runs: Runs) -> list[str]:
    return [name for name in presets.CUMULATIVE if name in runs]
