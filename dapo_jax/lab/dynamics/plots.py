"""The paper's figures, and those one looks at when a run goes wrong. Each function takes runs
(`logs.Run`) and returns a matplotlib Figure; nothing here touches pyplot or any global state.

Thin lines are the numbers as logged, thick ones their running mean. Each thick line ends in the
marker of its kind, as dashes cannot be told apart on a line that is short beside a longer run's. A
panel leaves out runs that did not log its number, and says so where no run logged it.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dapo_jax.lab.dynamics import browse, scaling as curves
from dapo_jax.lab.dynamics.logs import Run
from dapo_jax.lab.experiments import ink
from dapo_jax.log import tags

# What a figure may be drawn over: name -> (the tag that counts it, axis label).
X_AXES = {
    "step": ("", "rollout step"),
    "updates": ("optim/updates", "gradient updates"),
    "tokens": ("spent/tokens", "response tokens drawn"),
    "samples": ("spent/samples", "responses drawn"),
    "seconds": ("time/step_s", "sampling and updates [s]"),  # times its chips: chip-seconds
}


class Panel(NamedTuple):
    """tags: the first that all runs have is drawn or, without such a tag, each run's first."""

    title: str
    tags: tuple[str, ...]
    label: str  # of the y axis, with its unit


# Figure 7 of the paper (length, reward, entropy, mean probability), and its training accuracy.
DYNAMICS = (
    Panel("Response length", ("response/length_mean",), "mean length [tokens]"),
    Panel("Reward", ("reward/mean",), "mean reward [+1 right, -1 wrong]"),
    Panel("Entropy", ("policy/entropy", "policy/batch_entropy"), "mean entropy [nats per token]"),
    Panel(
        "Probability", ("policy/mean_prob", "policy/batch_mean_prob"), "mean probability of a token"
    ),
    Panel(
        "Training accuracy", ("reward/accuracy", "reward/batch_accuracy"), "right [share of all]"
    ),
)
# What a tag describes, for the legend where runs had to be drawn by different tags.
_OF = {
    "policy/batch_entropy": "trained tokens",
    "policy/batch_mean_prob": "trained tokens",
    "reward/batch_accuracy": "after filter",
}


# ------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------

# (tag, what the legend calls it, dashes): one line for each run that has the tag.
Styles = Sequence[tuple[str, str, object]]


def dynamics(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """The paper's panels: length, reward, entropy, mean probability, accuracy in training and on
    the evaluation sets. x: one of `X_AXES`. window: steps of the running mean."""
    figure, axes = ink.panels(2, 3)
    for ax, panel in zip(axes, DYNAMICS, strict=False):
        for run, tag, label in chosen(runs, panel.tags):
            _line(ax, run, tag, label, _color(runs, run), "-", x, window)
        finish(ax, panel.title, panel.label, x)
    lengths = [r.series["response/length_mean"][1] for r in runs if DYNAMICS[0].tags[0] in r.series]
    longest = [np.nanmax(v, initial=1.0) for v in lengths]
    if longest and max(longest) > 20 * min(longest):  # a small model beside a large one
        axes[0].set_yscale("log")
    _evaluations(axes[-1], runs, x)
    return figure


def lines(
    runs: Sequence[Run],
    panels: Sequence[tuple[str, str, Styles]],
    x: str = "step",
    window: int = 5,
) -> Figure:
    """A row of panels (title, label of the y axis with its unit, styles)."""
    figure, axes = ink.panels(1, len(panels))
    for ax, (title, label, styles) in zip(axes, panels, strict=True):
        for run in runs:
            for tag, what, dash in styles:
                if tag in run.series:
                    name = ", ".join(filter(None, (run.name, what)))
                    name += f" ({run.of[tag]})" if tag in run.of else ""
                    _line(ax, run, tag, name, _color(runs, run), dash, x, window)
        finish(ax, title, label, x)
    return figure


# Figure 1 of the paper and the rung it starts from: AIME 2024, avg@32, 32B.
PAPER = {0.30: "naive GRPO", 0.47: "R1-Zero-Qwen-32B", 0.50: "DAPO"}
_AIME24 = re.compile(r"aime[-_ ]?(20)?24", re.IGNORECASE)
_SET = re.compile(r"eval/(.+?)(?:_top_p([\d.]+))?/avg@k")


def headline(runs: Sequence[Run], x: str = "updates") -> Figure:
    """Figure 1 of the paper: avg@k, pass@k and maj@k of each evaluation set, with the second
    setting (`eval.top_p`, the paper's .7) where there is one. The paper's scores are lines where
    the set is AIME 2024 by its name."""
    found = dict.fromkeys(filter(None, (_SET.fullmatch(t) for r in runs for t in r.series)))
    sets = {(m[1], m[2]): m[0].removesuffix("avg@k") for m in found}
    shown = {s: tag for s, tag in sets.items() if s[1]} or sets or {("evaluation", None): ""}
    styles = (("avg@k", "-"), ("pass@k", "--"), ("maj@k", ":"))
    share = "right [share of samples, of problems]"
    panels = [
        (f"{name}, top-p {top_p or 1}", share, [(tag + score, score, d) for score, d in styles])
        for (name, top_p), tag in shown.items()
    ]
    figure = lines(runs, panels, x, window=1)
    for ax, (name, _) in zip(figure.axes, shown, strict=True):
        for score, who in PAPER.items() if _AIME24.search(name) else ():
            ax.axhline(score, color="gray", lw=1, ls=(0, (1, 3)))
            side = "top" if score == 0.47 else "bottom"  # clear of the line above it
            at = ax.get_yaxis_transform()
            ax.text(1.01, score, f"{who}: {score:.0%}", fontsize=7, va=side, transform=at)
    return figure


def generalization(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Accuracy on the problems that are trained on beside that of each evaluation set, both at
    top-p 1: where the two part, problems are learned by heart (guard.eval_fall is the alarm)."""
    found = dict.fromkeys(t for r in runs for t in r.series if _SET.fullmatch(t))
    sets = {_SET.fullmatch(tag)[1]: tag for tag in found if not _SET.fullmatch(tag)[2]}
    figure, axes = ink.panels(1, max(len(sets), 1))
    for ax, (name, tag) in zip(axes, sets.items(), strict=False):
        for run in runs:
            for of, what, dash, width in (
                ("reward/accuracy", "training", "-", window),
                (tag, name, "--", 1),
            ):
                if of in run.series:
                    _line(ax, run, of, f"{run.name}, {what}", _color(runs, run), dash, x, width)
    for ax, name in itertools.zip_longest(axes, sets, fillvalue="evaluation"):
        finish(ax, f"Training and {name}", "right [share of responses]", x)
    return figure


def scaling(
    runs: Sequence[Run], x: str = "tokens", share: float = 1 / 3, skip: float = 0.0
) -> Figure:
    """ScaleRL's sigmoid through the scores of each evaluation set at top-p 1, with its interval
    (scaling.py), and dashed the one through the first `share` of the run's compute, drawn to the
    end: what one would have foretold. Points of compute below `skip` are left out of both."""
    sets = {m[1]: m[0] for r in runs for t in r.series if (m := _SET.fullmatch(t)) and not m[2]}
    figure, axes = ink.panels(1, max(len(sets), 1), width=5.4)
    for ax, (name, tag) in itertools.zip_longest(axes, sets.items(), fillvalue=("evaluation", "")):
        for run in (r for r in runs if tag in r.series):
            at = x_of(run, run.series[tag][0], x)
            if at is not None:
                _foretold(ax, run.name, at, run.series[tag][1], _color(runs, run), share, skip)
        finish(ax, f"Score over compute: {name}", "avg@k at T = 1 [share right]", x)
    return figure


def _foretold(ax: Axes, name: str, at, score, color: str, share: float, skip: float) -> None:
    """Points, curve and band of all of them and of the first; where there is none, the reason."""
    ax.plot(at, score, "o", ms=3, color=color)
    grid, end = np.linspace(0, np.nanmax(at), 200), np.nanmax(at)
    for used, style, what in (
        (np.isfinite(at), "-", "all"),
        (at <= share * end * (1 + 1e-9), "--", f"first {share:.0%}"),
    ):
        try:
            fit = curves.fit(at[used], score[used], skip=skip)
        except ValueError as error:
            ax.plot([], [], color=color, ls=style, label=f"{name}, {what}: {error}")
            continue
        drawn, last = fit.curve(grid), fit.curve(end)
        label = f"{name}, {what}: ceiling {fit.ceiling}, at the end {last}"
        ax.plot(grid, drawn.value, color=color, ls=style, lw=1.6, label=label)
        ax.fill_between(grid, drawn.low, drawn.high, color=color, alpha=0.12, linewidth=0)


def filter_accuracy(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Accuracy of all that was drawn beside that of the groups which passed the filter, and by
    source of the problems."""
    share = "right answers [share of responses]"
    both = (("reward/accuracy", "drawn", "-"), ("reward/batch_accuracy", "after filter", "--"))
    found = sorted({t for r in runs for t in r.series if t.startswith("source/")})
    sources = [
        (t, t.removeprefix("source/").removesuffix("/accuracy"), ink.DASHES[i % len(ink.DASHES)])
        for i, t in enumerate(found)
    ]
    panels = [("Before and after the filter", share, both)]
    panels += [("By source of the problem, drawn", share, sources)] if sources else []
    return lines(runs, panels, x, window)


def sampling(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """What Dynamic Sampling finds: the share of mixed groups, of those all right and all wrong, and
    the rounds of generation that a batch took."""
    share = "share of drawn groups"
    useless = (
        ("sampling/all_correct_frac", "all right", "-"),
        ("sampling/all_wrong_frac", "all wrong", "--"),
    )
    panels = (
        ("Groups of right and wrong responses", share, (("sampling/accept_frac", "", "-"),)),
        ("Groups without gradient", share, useless),
        ("Rounds", "generation rounds [per step]", (("sampling/rounds", "", "-"),)),
    )
    return lines(runs, panels, x, window)


def curriculum(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Difficulty over time, of runs with `config.curriculum`: recorded pass rates, of all problems
    that were drawn and of those drawn again, and how many problems are left out."""
    rates = (("curriculum/pass_rate", "all", "-"), ("curriculum/known_rate", "drawn again", "--"))
    panels = (
        ("Pass rate when last drawn", "mean [share of responses]", rates),
        ("Left out", "problems of the training set", (("curriculum/left_out", "", "-"),)),
        ("Temperature", "of sampling [no unit]", (("curriculum/temperature", "", "-"),)),
    )
    return lines(runs, panels, x, window)


def values(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """The value model of runs with `config.critic`: how much of the returns it explains, of all
    responses and of the shortest and the longest third, its loss, the spread of what it says."""
    explained = (
        ("critic/explained_variance", "all", "-"),
        ("critic/short/explained_variance", "shortest third", ":"),
        ("critic/long/explained_variance", "longest third", "--"),
    )
    spread = (("critic/return_std", "returns", "--"), ("critic/advantage_std", "advantages", "-"))
    panels = (
        ("Explained variance", "share of the returns' variance", explained),
        ("Value loss", "mean [reward^2]", (("critic/value_loss", "", "-"),)),
        ("Spread", "standard deviation [reward]", spread),
    )
    return lines(runs, panels, x, window)


def clipping(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Tokens whose gradient the lower or the upper bound cut, the largest ratio, the gradient's
    norm and, where a run has them, importance weights."""
    bounds = (
        ("policy/clip_low_frac", "low", "--"),
        ("policy/clip_high_frac", "high", "-"),
        ("policy/clip_frac", "low + high", "-."),  # where a log does not tell them apart
    )
    ratio, norm = (("policy/ratio_max", "", "-"),), (("optim/grad_norm", "", "-"),)
    panels = (
        ("Clipped tokens", "share of trained tokens", bounds),
        ("Largest ratio", "new / old probability [no unit]", ratio),
        ("Gradient norm", "L2 norm before clipping [no unit]", norm),
    )
    if any("policy/importance_mean" in run.series for run in runs):
        weight = (("policy/importance_mean", "", "-"),)
        bound = (("policy/importance_capped_frac", "at the bound", "-"),)
        bound += (("policy/importance_zeroed_frac", "zeroed", "--"),)
        panels += (
            ("Importance weight", "mean trainer / sampler probability [no unit]", weight),
            ("Weights at their bounds", "share of trained tokens", bound),
        )
    return lines(runs, panels, x, window)


def truncation(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Responses that ran into the length limit, their punishment, lengths by outcome, and
    percentiles of length."""
    outcome = (("response/length_correct", "right", "-"), ("response/length_wrong", "wrong", "--"))
    cut, penalty = "response/truncated_frac", "reward/overlong_penalty"
    dashes = zip((99, 90, 50), (":", "--", "-"), strict=True)
    percentiles = [(f"response/length_p{p}", f"{p}%", dash) for p, dash in dashes]
    panels = (
        ("Truncated responses", "share of responses", ((cut, "", "-"),)),
        ("Overlong punishment", "mean of a response [reward]", ((penalty, "", "-"),)),
        ("Length by outcome, drawn", "mean length [tokens]", outcome),
        ("Percentiles of length, drawn", "length [tokens]", percentiles),
    )
    return lines(runs, panels, x, window)


def time_split(runs: Sequence[Run]) -> Figure:
    """Wall time of each rollout step, stacked by what it went into; one panel per run."""
    parts = (
        ("time/rollout_s", "sampling, verifying"),
        ("time/update_s", "updates"),
        ("time/eval_s", "evaluation"),
    )
    figure, axes = ink.panels(1, max(len(runs), 1))
    if not runs:
        axes[0].set_axis_off()
    for ax, run in zip(axes, runs, strict=False):
        there = [(tag, name) for tag, name in parts if tag in run.series]
        steps = np.unique(np.concatenate([np.zeros(0), *(run.series[t][0] for t, _ in there)]))
        steps = steps[steps > 0]  # before the first there is an evaluation only
        heights = [np.nan_to_num(_at(run, tag, steps)) for tag, _ in there]
        total, bottom = sum(h.sum() for h in heights), np.zeros(len(steps))
        for (_, name), height, color in zip(there, heights, ink.COLORS, strict=False):
            if total:
                label = f"{name} ({height.sum() / total:.0%})"
                top = bottom + height
                ax.stairs(top, edges(steps), baseline=bottom, fill=True, color=color, label=label)
                bottom = top
        ax.set_ylim(0, 1.3 * bottom.max() if total else 1)  # room for the legend
        finish(ax, f"Time: {run.name}", "wall time [seconds per step]", "step")
    return figure


def group_heatmap(counts: tuple[np.ndarray, np.ndarray], name: str = "") -> Figure:
    """Drawn groups by their number of right responses over the steps. counts: steps [n] and counts
    [n, G + 1], `logs.histograms(path)["sampling/groups_by_correct"]`. The filter drops the outer
    rows, beyond the dashed lines."""
    steps, table = counts
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    G = table.shape[1] - 1
    figure, ax = _map(steps, np.arange(G + 2) - 0.5, share, "share of the drawn groups")
    for border in (0.5, G - 0.5):
        ax.axhline(border, color="white", lw=1.2, ls="--")
    ax.set_title("Groups by right responses" + (f": {name}" if name else ""))
    ax.set_ylabel(f"right responses of a group [of {G}]")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def difficulty(counts: tuple[np.ndarray, np.ndarray], name: str = "") -> Figure:
    """Problems by their recorded pass rate over the steps. counts: steps [n] and counts [n, 11],
    `logs.histograms(path)["curriculum/by_pass_rate"]`; the lowest row are those at 0."""
    steps, table = counts
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    figure, ax = _map(steps, np.array(tags.RATE_EDGES), share, "share of the problems drawn so far")
    ax.set_title("Problems by pass rate when last drawn" + (f": {name}" if name else ""))
    ax.set_ylabel("pass rate [share of responses]")
    ax.set_yticks([-0.05, *tags.RATE_EDGES[3::2]], ["0", *map(str, tags.RATE_EDGES[3::2])])
    return figure


def _map(steps, rows, share, label: str) -> tuple[Figure, Axes]:
    """Shares [n, m] over the steps. rows: the m + 1 borders of their rows."""
    figure, (ax,) = ink.panels(1, 1, width=8)
    mesh = ax.pcolormesh(edges(steps), rows, share.T, cmap="magma", vmin=0)
    figure.colorbar(mesh, ax=ax, label=label)
    ax.set_xlabel(X_AXES["step"][1])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, ax


def phrases(
    counts: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]], name: str = "", window: int = 5
) -> Figure:
    """Reflective phrases over the steps; counts: `browse.reflection(...)`."""
    figure, axes = ink.panels(1, 2)
    columns = (
        (1, "Samples that reflect", "share of logged samples"),
        (2, "Reflective phrases", "times per 1,000 response tokens"),
    )
    for ax, (column, title, label) in zip(axes, columns, strict=True):
        for i, (phrase, series) in enumerate(counts.items()):
            run = Run(name, {phrase: (series[0], series[column])})
            dash = ink.DASHES[i // len(ink.COLORS) % len(ink.DASHES)]
            _line(ax, run, phrase, phrase, ink.COLORS[i % len(ink.COLORS)], dash, "step", window)
        finish(ax, title + (f": {name}" if name else ""), label, "step", "no such phrase")
    return figure


def token_profile(answers: Sequence) -> Figure:
    """Probability of each drawn token, and entropy where it was drawn, along several answers
    (`tokens.Answer`) to one prompt. Equal answers are one line. The dotted line stands where the
    answers first differ; the tokens are named up to 40 of them."""
    found = browse.distinct(answers)
    pieces = [[t.piece for t in a.tokens] for a, _ in found]
    places = list(itertools.zip_longest(*pieces))
    names = [
        " | ".join(dict.fromkeys(browse.visible(repr(p)[1:-1]) for p in place if p is not None))
        for place in places
    ]
    parting = next((i for i, place in enumerate(places, 1) if len(set(place)) > 1), None)
    figure, axes = ink.panels(1, 2, width=6, height=4)
    columns = (
        ("Probability of the drawn token", "probability", lambda t: math.exp(t.logp)),
        ("Entropy where it was drawn", "entropy [nats]", lambda t: t.entropy),
    )
    for ax, (title, label, value) in zip(axes, columns, strict=True):
        for i, (answer, times) in enumerate(found):
            name = f"answer {i + 1}" + (f", {times} times" if times > 1 else "")
            row, color = [value(t) for t in answer.tokens], ink.COLORS[i % len(ink.COLORS)]
            ax.plot(range(1, len(row) + 1), row, ".-", ms=4, lw=1, color=color, label=name)
        if parting:
            ax.axvline(parting, color="gray", lw=1, ls=":", label="first difference")
        finish(ax, title, label, "step")
        ax.set_xlabel("token of the response")
        if len(names) <= 40:
            ax.set_xticks(
                range(1, len(names) + 1), names, rotation=90, fontsize=7, parse_math=False
            )
    return figure


# ------------------------------------------------------------------------------------------------
# Numbers
# ------------------------------------------------------------------------------------------------


def x_of(run: Run, steps: np.ndarray, x: str) -> np.ndarray | None:
    """Where `steps` [n] of a run lie on an axis of `X_AXES`; 0 at step 0. None: the run has not
    logged what the axis counts. Raises ValueError for an unknown axis."""
    if x not in X_AXES:
        raise ValueError(f"x = {x!r}: must be one of {', '.join(X_AXES)}")
    tag = X_AXES[x][0]
    if not tag:
        return np.asarray(steps, float)
    known, values = run.series.get(tag, (np.zeros(0), np.zeros(0)))
    known, values = known[np.isfinite(values)], values[np.isfinite(values)]
    if not len(known):
        return None
    if x == "seconds":  # logged step by step
        values = np.cumsum(values)
    if known[0] > 0:
        known, values = np.append(0, known), np.append(0.0, values)
    return np.interp(steps, known, values, left=np.nan, right=np.nan)


def chosen(runs: Sequence[Run], tags: Sequence[str]) -> list[tuple[Run, str, str]]:
    """(run, tag, label) of each run that has one of `tags`: the same tag for all where possible."""
    shared = [t for t in tags if all(t in r.series for r in runs)]
    out = []
    for run in runs:
        tag = next((t for t in (*shared, *tags) if t in run.series), None)
        if tag is not None:
            of = run.of.get(tag) or _OF.get(tag)
            out.append((run, tag, run.name + (f" ({of})" if of else "")))
    return out


def edges(steps: np.ndarray) -> np.ndarray:
    """Borders of cells around ascending `steps` [n]: [n + 1]."""
    steps = np.asarray(steps, float)
    middle = (steps[1:] + steps[:-1]) / 2
    if not len(middle):
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    return np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])


def _at(run: Run, tag: str, steps: np.ndarray) -> np.ndarray:
    known = dict(zip(*(a.tolist() for a in run.series[tag]), strict=True))
    return np.array([known.get(int(s), np.nan) for s in steps])


# ------------------------------------------------------------------------------------------------
# Ink
# ------------------------------------------------------------------------------------------------

_MARKERS = dict(zip(ink.DASHES, "os^Dv", strict=True))


def _color(runs: Sequence[Run], run: Run) -> str:
    return ink.COLORS[next(i for i, r in enumerate(runs) if r is run) % len(ink.COLORS)]


def _line(ax: Axes, run: Run, tag: str, label: str, color, dash, x: str, window: int) -> None:
    steps, values = run.series[tag]
    at = x_of(run, steps, x)
    if at is None or not np.isfinite(values).any():
        return
    if window > 1 and len(steps) > 2:
        ax.plot(at, values, color=color, lw=0.8, alpha=0.35)
        values = ink.smooth(values, window)
    every = 1 if len(steps) <= 12 else [len(steps) - 1]
    style = {"ls": dash, "marker": _MARKERS[dash], "markevery": every, "ms": 4}
    ax.plot(at, values, color=color, lw=1.8, label=label, **style)


def _evaluations(ax: Axes, runs: Sequence[Run], x: str) -> None:
    """avg@k of every set at top-p 1: color = run, dashes = set."""
    tags = dict.fromkeys(
        t for r in runs for t in r.series if t.endswith("/avg@k") and "_top_p" not in t
    )
    names = [t.removeprefix("eval/").removesuffix("/avg@k") for t in tags]
    for run in runs:
        for i, (tag, name) in enumerate(zip(tags, names, strict=True)):
            if tag in run.series:
                dash = ink.DASHES[i % len(ink.DASHES)]
                _line(ax, run, tag, f"{run.name}, {name}", _color(runs, run), dash, x, 1)
    finish(ax, "Evaluation", "avg@k at T = 1 [share right]", x)


def finish(
    ax: Axes, title: str, label: str, x: str, nothing: str = "not logged", legend: bool = True
) -> None:
    """Title, labels, ticks and legend of a panel; where it is empty, the word for that."""
    ax.set_title(title, fontsize=11)
    ax.set_xlabel(X_AXES[x][1])
    ax.set_ylabel(label)
    if x == "step":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if "rounds" in label:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles, labels = ax.get_legend_handles_labels()
    if handles and legend:
        ax.legend(handles, labels, fontsize=7.5, framealpha=0.7)
    elif not handles:
        ax.text(0.5, 0.5, nothing, ha="center", va="center", transform=ax.transAxes, color="gray")
