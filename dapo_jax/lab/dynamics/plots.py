"""The paper's figures, and those one looks at when a run goes wrong. Each function takes runs
(`logs.Run`) and returns a matplotlib Figure; nothing here touches pyplot or any global state.

Thin lines are the numbers as logged, thick ones their running mean. Each thick line ends in the
marker of its kind, as dashes cannot be told apart on a line that is short beside a longer run's. A
panel leaves out runs that did not log its number, and says so where no run logged it.
"""

import itertools
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dapo_jax.lab.dynamics import scaling as curves
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
    title: str
    label: str  # of the y axis, with its unit
    lines: Mapping[str, str]  # tag -> what the legend calls it beside the run


# What is drawn for all runs where one of them has logged it of the trained batch alone.
INSTEAD = {
    "policy/entropy": ("policy/batch_entropy", "trained tokens"),
    "policy/mean_prob": ("policy/batch_mean_prob", "trained tokens"),
    "reward/accuracy": ("reward/batch_accuracy", "after filter"),
}
RIGHT = "right [share of responses]"
# Tables of panels by name.
_TEXT = pathlib.Path(__file__).with_name("panels.toml").read_text()
PANELS = {name: [Panel(**p) for p in panels] for name, panels in tomllib.loads(_TEXT).items()}
DYNAMICS, SAMPLING, TIME = (PANELS[name] for name in ("DYNAMICS", "SAMPLING", "TIME"))
CURRICULUM, VALUES = PANELS["CURRICULUM"], PANELS["VALUES"]
CLIPPING, TRUNCATION = PANELS["CLIPPING"], PANELS["TRUNCATION"]


def lines(
    runs: Sequence[Run], panels: Sequence[Panel], x: str = "step", window: int = 5, rows: int = 1
) -> Figure:
    """Panels in `rows` rows, those that a run has logged; a line for each run and tag. x: one of
    `X_AXES`. window: steps of the running mean, which scores of evaluations have not."""
    logged = {tag for run in runs for tag in run.series}
    panels = [p for p in panels if rows > 1 or logged.intersection(p.lines)] or panels[:1]
    figure, axes = ink.panels(rows, -(-len(panels) // rows))
    told: set[str] = set()
    for ax, panel in zip(axes, panels, strict=False):
        for run, color in zip(runs, itertools.cycle(ink.COLORS), strict=False):
            for i, (tag, what) in enumerate(panel.lines.items()):
                alone = len(panel.lines) == 1
                shown, of = instead(runs, run, tag) if alone else (tag, run.of.get(tag, ""))
                if shown in run.series:
                    name = ", ".join(filter(None, (run.name, what))) + (f" ({of})" if of else "")
                    _line(ax, run, shown, name, color, ink.DASHES[i % len(ink.DASHES)], x, window)
        names = {*ax.get_legend_handles_labels()[1]}
        finish(ax, panel.title, panel.label, x, legend=not names <= told)  # each name once
        told |= names
    return figure


def dynamics(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """The paper's panels: length, reward, entropy, mean probability, accuracy in training and on
    the evaluation sets at top-p 1."""
    evaluation = Panel("Evaluation", "avg@k at T = 1 [share right]", at_top_p_1(runs))
    figure = lines(runs, (*DYNAMICS, evaluation), x, window, rows=2)
    lengths = [r.series["response/length_mean"] for r in runs if "response/length_mean" in r.series]
    longest = [np.nanmax(values, initial=1.0) for _, values in lengths]
    if longest and max(longest) > 20 * min(longest):  # a small model beside a large one
        figure.axes[0].set_yscale("log")
    return figure


# Figure 1 of the paper and the rung it starts from: AIME 2024, avg@32, 32B.
PAPER = {0.30: "naive GRPO", 0.47: "R1-Zero-Qwen-32B", 0.50: "DAPO"}
_AIME24 = re.compile(r"aime[-_ ]?(20)?24", re.IGNORECASE)


def headline(runs: Sequence[Run], x: str = "updates") -> Figure:
    """Figure 1 of the paper: avg@k, pass@k and maj@k of each evaluation set, with the second
    setting (`eval.top_p`, the paper's .7) where there is one. The paper's scores are lines where
    the set is AIME 2024 by its name."""
    sets = evaluations(runs)
    shown = {tag: of for tag, of in sets.items() if of[1]} or sets or {"": ("evaluation", "")}
    panels, label = [], "right [share of samples, of problems]"
    for tag, (name, top_p) in shown.items():
        scores = {tag.removesuffix("avg@k") + s: s for s in ("avg@k", "pass@k", "maj@k")}
        panels.append(Panel(f"{name}, top-p {top_p or 1}", label, scores))
    figure = lines(runs, panels, x)
    for ax, (name, _) in zip(figure.axes, shown.values(), strict=True):
        paper_scores(ax, name)
    return figure


def paper_scores(ax: Axes, name: str) -> None:
    """The paper's scores as lines, where an evaluation set is AIME 2024 by its name."""
    for score, who in PAPER.items() if _AIME24.search(name) else ():
        ax.axhline(score, color="gray", lw=1, ls=(0, (1, 3)))
        side = "top" if score == 0.47 else "bottom"  # clear of the line above it
        at = ax.get_yaxis_transform()
        ax.text(1.01, score, f"{who}: {score:.0%}", fontsize=7, va=side, transform=at)


def generalization(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Accuracy on the problems that are trained on beside that of each evaluation set, both at
    top-p 1: where the two part, problems are learned by heart (guard.eval_fall is the alarm)."""
    panels = [
        Panel(f"Training and {name}", RIGHT, {"reward/accuracy": "training", tag: name})
        for tag, name in at_top_p_1(runs).items()
    ]
    return lines(runs, panels or [Panel("Training and evaluation", RIGHT, {})], x, window)


def filter_accuracy(runs: Sequence[Run], x: str = "step", window: int = 5) -> Figure:
    """Accuracy of all that was drawn beside that of the groups which passed the filter, and by
    source of the problems."""
    found = sorted({t for r in runs for t in r.series if t.startswith("source/")})
    sources = {t: t.removeprefix("source/").removesuffix("/accuracy") for t in found}
    by_source = Panel("By source of the problem, drawn", RIGHT, sources)
    return lines(runs, [*PANELS["FILTER"], by_source], x, window)


def phrases(
    counts: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]], name: str = "", window: int = 5
) -> Figure:
    """Reflective phrases over the steps; counts: `browse.reflection(...)`."""
    runs = [
        Run(phrase, {"share": (steps, share), "rate": (steps, rate)})
        for phrase, (steps, share, rate) in counts.items()
    ]
    share = Panel(f"Samples that reflect: {name}", "share of logged samples", {"share": ""})
    rate = Panel(f"Reflective phrases: {name}", "times per 1,000 response tokens", {"rate": ""})
    return lines(runs, [share, rate], "step", window)


def scaling(
    runs: Sequence[Run], x: str = "tokens", share: float = 1 / 3, skip: float = 0.0
) -> Figure:
    """ScaleRL's sigmoid through the scores of each evaluation set at top-p 1, with its interval
    (scaling.py), and dashed the one through the first `share` of the run's compute, drawn to the
    end: what one would have foretold. Points of compute below `skip` are left out of both."""
    sets = at_top_p_1(runs) or {"": "evaluation"}
    figure, axes = ink.panels(1, len(sets), width=5.4)
    for ax, (tag, name) in zip(axes, sets.items(), strict=True):
        for run, color in zip(runs, itertools.cycle(ink.COLORS), strict=False):
            steps, score = run.series.get(tag, (np.zeros(0), np.zeros(0)))
            at = x_of(run, steps, x)
            if at is not None and len(at):
                _foretold(ax, run.name, at, score, color, share, skip)
        finish(ax, f"Score over compute: {name}", "avg@k at T = 1 [share right]", x)
    return figure


def _foretold(ax: Axes, name: str, at, score, color: str, share: float, skip: float) -> None:
    """Points, curve and band of all of them and of the first; where there is none, the reason."""
    ax.plot(at, score, "o", ms=3, color=color)
    grid, end = np.linspace(0, np.nanmax(at), 200), np.nanmax(at)
    early = at <= share * end * (1 + 1e-9)
    for used, style, what in ((np.isfinite(at), "-", "all"), (early, "--", f"first {share:.0%}")):
        try:
            fit = curves.fit(at[used], score[used], skip=skip)
        except ValueError as error:
            ax.plot([], [], color=color, ls=style, label=f"{name}, {what}: {error}")
            continue
        drawn, last = fit.curve(grid), fit.curve(end)
        label = f"{name}, {what}: ceiling {fit.ceiling}, at the end {last}"
        ax.plot(grid, drawn.value, color=color, ls=style, lw=1.6, label=label)
        ax.fill_between(grid, drawn.low, drawn.high, color=color, alpha=0.12, linewidth=0)


def group_heatmap(counts: tuple[np.ndarray, np.ndarray], name: str = "") -> Figure:
    """Drawn groups by their number of right responses over the steps. counts: steps [n] and counts
    [n, G + 1], `logs.histograms(path)["sampling/groups_by_correct"]`. The filter drops the outer
    rows, beyond the dashed lines."""
    G = counts[1].shape[1] - 1
    title, label = f"Groups by right responses: {name}", f"right responses of a group [of {G}]"
    figure = _map(counts, np.arange(G + 2) - 0.5, title, label)
    for border in (0.5, G - 0.5):
        figure.axes[0].axhline(border, color="white", lw=1.2, ls="--")
    figure.axes[0].yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def difficulty(counts: tuple[np.ndarray, np.ndarray], name: str = "") -> Figure:
    """Problems by their recorded pass rate over the steps. counts: steps [n] and counts [n, 11],
    `logs.histograms(path)["curriculum/by_pass_rate"]`; the lowest row are those at 0."""
    borders = tags.edges("curriculum/by_pass_rate", 0, 0)
    title = f"Problems by pass rate when last drawn: {name}"
    figure = _map(counts, borders, title, "pass rate [share of responses]")
    figure.axes[0].set_yticks([-0.05, *borders[3::2]], ["0", *map(str, borders[3::2])])
    return figure


def _map(counts: tuple[np.ndarray, np.ndarray], borders, title: str, label: str) -> Figure:
    """Each step's shares as a column, as wide as it is to the next step. borders: of the rows."""
    steps, table = counts
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    figure, (ax,) = ink.panels(1, 1, width=8)
    columns = np.append(steps, steps[-1] + 1) - 0.5
    mesh = ax.pcolormesh(columns, borders, share.T, cmap="magma", vmin=0)
    figure.colorbar(mesh, ax=ax, label="share of the step")
    ax.set(title=title.removesuffix(": "), xlabel=X_AXES["step"][1], ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def x_of(run: Run, steps: np.ndarray, x: str) -> np.ndarray | None:
    """Where `steps` [n] of a run lie on an axis of `X_AXES`; 0 at step 0. None: the run has not
    logged what the axis counts. ValueError: an unknown axis."""
    if x not in X_AXES:
        raise ValueError(f"x = {x!r}: must be one of {', '.join(X_AXES)}")
    if x == "step":
        return np.asarray(steps, float)
    known, values = run.series.get(X_AXES[x][0], (np.zeros(0), np.zeros(0)))
    known, values = known[np.isfinite(values)], values[np.isfinite(values)]
    if not len(known):
        return None
    if x == "seconds":  # logged step by step
        values = np.cumsum(values)
    if known[0] > 0:
        known, values = np.append(0, known), np.append(0.0, values)
    return np.interp(steps, known, values, left=np.nan, right=np.nan)


def evaluations(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """Each tag of avg@k -> the name of its evaluation set and, of a second setting, its top-p."""
    logged = (tag for run in runs for tag in run.series)
    found = (re.fullmatch(r"eval/(.+?)(?:_top_p([\d.]+))?/avg@k", tag) for tag in logged)
    return {m[0]: (m[1], m[2] or "") for m in found if m}


def at_top_p_1(runs: Sequence[Run]) -> dict[str, str]:
    """Each tag of avg@k at top-p 1 -> the name of its evaluation set."""
    return {tag: name for tag, (name, top_p) in evaluations(runs).items() if not top_p}


def instead(runs: Sequence[Run], run: Run, tag: str) -> tuple[str, str]:
    """(the tag that a run is drawn by, what it describes): that of the trained batch (`INSTEAD`)
    where all runs have it and one has no other, so that like stands beside like."""
    other, of = INSTEAD.get(tag, (tag, ""))
    if all(tag in r.series for r in runs if tag in r.series or other in r.series):
        return tag, run.of.get(tag, "")
    shared = all(other in r.series for r in runs) or tag not in run.series
    return (other, run.of.get(other, of)) if shared else (tag, run.of.get(tag, ""))


_MARKERS = dict(zip(ink.DASHES, "os^Dv", strict=True))


def _line(ax: Axes, run: Run, tag: str, label: str, color, dash, x: str, window: int) -> None:
    steps, values = run.series[tag]
    at = x_of(run, steps, x)
    if at is None or not np.isfinite(values).any():
        return
    if window > 1 and len(steps) > 2 and not tag.startswith("eval/"):
        ax.plot(at, values, color=color, lw=0.8, alpha=0.35)
        values = ink.smooth(values, window)
    every = 1 if len(steps) <= 12 else [len(steps) - 1]
    style = {"ls": dash, "marker": _MARKERS[dash], "markevery": every, "ms": 4}
    ax.plot(at, values, color=color, lw=1.8, label=label, **style)


def finish(ax: Axes, title: str, label: str, x: str, legend: bool = True) -> None:
    """Title, labels, ticks and legend of a panel; where it is empty, the word for that."""
    ax.set_title(title.removesuffix(": "), fontsize=11)
    ax.set(xlabel=X_AXES[x][1], ylabel=label)
    if x == "step":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    else:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not ax.has_data():
        ax.text(0.5, 0.5, "not logged", ha="center", transform=ax.transAxes, color="gray")
    elif legend:
        ax.legend(fontsize=7.5, framealpha=0.7)
