"""Curves of runs, each panel a figure at the width of a paper's column: 3.3 inches, 8 points.

    python -m dapo_jax.lab report RUN [OTHER ...] --pictures=DIR

writes each as NAME.pdf, whose text stays text, and NAME.png at 300 dpi; the page of report.py shows
the same figures. Thin lines are the numbers as logged, thick ones their running mean. Bands are 95%
t-intervals: over seeds where a column has several, else over the problems of an evaluation set.
"""

import collections
import contextlib
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dapo_jax.lab import compare
from dapo_jax.lab.dynamics import logs, plots
from dapo_jax.lab.dynamics.plots import Panel
from dapo_jax.lab.experiments import ink, stats

INCHES = {"width": 3.3, "height": 2.4}
STYLE = {
    "font.family": "sans-serif", "font.size": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.linewidth": 0.6, "legend.fontsize": 7, "pdf.fonttype": 42,
    "svg.fonttype": "none",
}  # fmt: skip
SECTIONS = {
    "Dynamics": plots.DYNAMICS, "What Dynamic Sampling finds": plots.SAMPLING,
    "Length and truncation": plots.TRUNCATION, "Clipping": plots.CLIPPING,
    "Curriculum": plots.CURRICULUM, "Value model": plots.VALUES, "Where time goes": plots.TIME,
}  # fmt: skip
Band = tuple[np.ndarray, np.ndarray, np.ndarray]  # steps [n], low [n], high [n]


class Picture(NamedTuple):
    section: str
    title: str
    figure: Figure


def pictures(columns: Sequence[compare.Column]) -> Iterator[Picture]:
    """The panels that a run of `columns` has logged, scores over updates and others over steps."""
    runs = [r for c in columns for r in c.runs]
    logged = {tag for run in runs for tag in run.series}
    sets, alone = plots.evaluations(runs), len(columns) == 1
    known = {c.name: intervals(p) for c in columns if len(c.runs) == 1 and (p := c.runs[0].path)}
    for tag, (name, top_p) in sets.items():
        title, label = f"{name}, top-p {top_p or 1}", "right [share of samples, of problems]"
        scores = {tag.removesuffix("avg@k") + s: s for s in ("avg@k", "pass@k", "maj@k")}
        for lines in [scores] if alone else [{t: s} for t, s in scores.items()]:
            what = "" if alone else f": {next(iter(lines.values()))}"
            if logged.intersection(lines):
                panel = Panel(title + what, label, lines)
                figure = draw(columns, panel, "updates", known)
                plots.paper_scores(figure.axes[0], name)
                yield Picture("Scores", panel.title, figure)
    for section, panels in SECTIONS.items():
        for panel in panels:
            if logged.intersection(panel.lines):
                yield Picture(section, panel.title, draw(columns, panel))


def draw(
    columns: Sequence[compare.Column], panel: Panel, x: str = "step",
    bands: Mapping[str, Mapping[str, Band]] = {},
) -> Figure:  # fmt: skip
    """One panel. Columns have colors and tags dashes; the tags of a column alone have colors.
    bands: column -> tag -> what is shaded around its line."""
    runs, alone = [r for c in columns for r in c.runs], len(columns) == 1
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = ink.panels(1, 1, **INCHES)
        for i, c in enumerate(columns):
            for j, (tag, what) in enumerate(panel.lines.items()):
                of = ""
                if len(panel.lines) == 1:
                    tag, of = plots.instead(runs, c.runs[0], tag)
                name = textwrap.shorten(c.name, 24, placeholder="") or f"...{c.name[-20:]}"
                parts = ("" if alone else name, what if len(panel.lines) > 1 else "", of)
                color = ink.COLORS[(j if alone else i) % len(ink.COLORS)]
                style = {"ls": ink.DASHES[0 if alone else j % len(ink.DASHES)], "color": color}
                band = bands.get(c.name, {}).get(tag)
                _line(ax, c, tag, ", ".join(filter(None, parts)), style, x, band)
        plots.finish(ax, "", textwrap.fill(panel.label, 34), x, legend=False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, handlelength=1.8, borderaxespad=0.2)
    return figure


def _line(ax, column: compare.Column, tag: str, label: str, style, x: str, band) -> None:
    curves = [compare.curve(r, tag, x) for r in column.runs]
    curves = [(at, values) for at, values in curves if len(at)]
    if len(curves) > 1:
        color = style.pop("color")
        ink.over_seeds(ax, curves, label, color, even=x != "step", **style)
        return
    for at, values in curves:
        if tag.startswith("eval/"):
            ax.plot(at, values, label=label, lw=1.4, marker="o", ms=2.5, **style)
        else:
            window = max(5, len(at) // 25)
            if len(at) > window:
                ax.plot(at, values, lw=0.5, alpha=0.4, color=style["color"])
                values = ink.smooth(values, window)
            ax.plot(at, values, label=label, lw=1.4, marker="o" if len(at) == 1 else "", **style)
        if band is not None:
            at = plots.x_of(column.runs[0], band[0], x)
            if at is not None:
                ax.fill_between(at, *band[1:], color=style["color"], alpha=0.15, linewidth=0)


# --- Scores over the values of a swept field ---


def over(columns: Sequence[compare.Column], wanted: Sequence[Mapping], folder: pathlib.Path) -> str:
    """Draw the scores of a sweep over the values of its field, where it varies one, as
    over_FIELD.pdf and .png in `folder`. wanted: {field: value} of each column. Returns lines to
    stand below the table, one for each evaluation set; '' where there is nothing to draw."""
    (field, *more), found = wanted[0], compare.summary(columns)
    at = f"at_equal_{compare.AXES['step']}"
    scores = {
        tag: [r["scores"][tag][at] for r in found["runs"]]
        for tag in compare.scores(columns)
        if all(None not in r["scores"][tag][at] for r in found["runs"])
    }
    if more or len(wanted) != len(columns) or len(wanted) < 2 or not scores:
        return ""
    values, step = [setting[field] for setting in wanted], found["equal"]["steps"]
    _save(over_values(field, values, scores, f"avg@k at step {step:,.0f} [share]"),
          folder / re.sub(r"\W+", "_", f"over_{field}"))  # fmt: skip
    return "\n\n" + "\n".join(said(field, values, tag, scores[tag]) for tag in scores)


def said(field: str, values: Sequence, tag: str, scores: Sequence[Sequence[float]]) -> str:
    """One line: which value scores best, and what that does not tell. scores: of each value's
    seeds."""
    found, name = [stats.interval(x) for x in scores], tag.removeprefix("eval/")
    best = max(range(len(found)), key=lambda i: found[i].mean)
    line = f"{name} over {field}: {found[best]} at {values[best]} is the highest"
    if np.isnan([x.half for x in found]).any():
        line += "; one seed tells nothing of chance"
    elif near := [v for v, x in zip(values, found, strict=True)
                  if v != values[best] and x.high >= found[best].low]:  # fmt: skip
        line += f"; the intervals of {', '.join(map(str, near))} reach as high"
    numbers = all(map(logs.is_number, values))
    ends = {min(values): "smallest", max(values): "largest"} if numbers else {}
    if end := ends.get(values[best]):
        line += f"; it is the {end} value, and the best may lie beyond"
    return line


def over_values(
    field: str, values: Sequence, scores: Mapping[str, Sequence[Sequence[float]]], label: str
) -> Figure:
    """Mean and 95% t-interval at each value, and each seed as a point; a line for each tag. An axis
    of numbers that spread over ten times or more is logarithmic; other values stand in order."""
    numbers = all(map(logs.is_number, values))
    places = np.array(values, float) if numbers else np.arange(len(values))
    order = np.argsort(places)
    with matplotlib.rc_context(STYLE):
        figure, (ax,) = ink.panels(1, 1, **INCHES)
        for i, (tag, seeds) in enumerate(scores.items()):
            color, found = ink.COLORS[i % len(ink.COLORS)], [stats.interval(x) for x in seeds]
            mean, half = np.array(found)[order].T
            ax.errorbar(places[order], mean, np.nan_to_num(half), label=tag.removeprefix("eval/"),
                        color=color, lw=1.4, capsize=2, marker="o", ms=3)  # fmt: skip
            for at, each in zip(places, seeds, strict=True):
                ax.plot([at] * len(each), each, ".", ms=2.5, alpha=0.5, color=color)
        if numbers and min(places) > 0 and max(places) >= 10 * min(places):
            ax.set_xscale("log")
            ax.minorticks_off()
        shown = [textwrap.shorten(str(v), 16, placeholder="...") or repr(v) for v in values]
        ax.set_xticks(places, shown)
        ax.set(xlabel=field, ylabel=textwrap.fill(label, 34))
        ax.legend(frameon=False)
    return figure


def intervals(path: str) -> dict[str, Band]:
    """Tag of avg@k -> its 95% t-interval over the problems of the set, by eval/step_*.jsonl of a
    workdir. Files of older versions and other logs have none."""
    found: dict[str, dict[int, list[float]]] = collections.defaultdict(dict)
    for step, file in logs.numbered(path, "eval").items():
        for row in map(logs.json_object, logs.text_of(file, str(file)).splitlines()):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                value = float(np.mean(row["score" if "score" in row else "correct"]))
                more = "" if row["top_p"] == 1 else f"_top_p{row['top_p']:g}"
                tag = f"eval/{row['set']}{more}/avg@k"
                found[tag].setdefault(step, []).append(value)
    out = {}
    for tag, steps in found.items():
        near = [(stats.interval(x), min(x), max(x)) for x in steps.values()]  # within what there is
        low, high = zip(*((max(i.low, a), min(i.high, b)) for i, a, b in near), strict=True)
        out[tag] = np.array(list(steps)), np.array(low), np.array(high)
    return out


def write(columns: Sequence[compare.Column], folder: pathlib.Path) -> list[str]:
    """The files written: two for each panel. OSError: the folder cannot be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    named = lambda title: re.sub(r"\W+", "_", title.lower()).strip("_")
    return [f for p in pictures(columns) for f in _save(p.figure, folder / named(p.title))]


def _save(figure: Figure, path: pathlib.Path) -> list[str]:
    """Write it beside itself as .pdf and .png; returns their names."""
    written = [f"{path}.{kind}" for kind in ("pdf", "png")]
    with matplotlib.rc_context(STYLE):
        for file in written:
            figure.savefig(file, dpi=300)
    return written
