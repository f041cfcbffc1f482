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


def intervals(path: str) -> dict[str, Band]:
    """Tag of avg@k -> its 95% t-interval over the problems of the set, by eval/step_*.jsonl of a
    workdir. Files of older versions and other logs have none."""
    found: dict[str, dict[int, list[float]]] = collections.defaultdict(dict)
    folder = logs.place(path) / "eval"
    files = sorted(folder.glob("step_*.jsonl")) if logs.attempt(path, folder.is_dir) else []
    for file in files:
        step = int(re.sub(r"\D", "", file.name))
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
    written = []
    for picture in pictures(columns):
        name = re.sub(r"\W+", "_", picture.title.lower()).strip("_")
        for kind in ("pdf", "png"):
            file = folder / f"{name}.{kind}"
            with matplotlib.rc_context(STYLE):
                picture.figure.savefig(file, dpi=300)
            written.append(str(file))
    return written
