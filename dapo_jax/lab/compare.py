"""Runs side by side: the fields in which they differ, and their scores where they can be compared.

    python -m dapo_jax.lab compare runs/a runs/b --figure=compare.png --json=compare.json
    python -m dapo_jax.lab compare runs/sweep/*/seed_* --pool_seeds

RUN is a workdir, local or in a bucket (gs://...), or another log that `dynamics/logs.py` reads.
Runs are compared at equal steps, equal updates and equal generated tokens: where the one that has
been evaluated the least far ends. Between two evaluations a curve is a straight line. `best` and
`last` are of each run's own length, and their step stands beside them.
"""

import json
import os
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config import cli, schema
from dapo_jax.data import files
from dapo_jax.lab.dynamics import logs, plots
from dapo_jax.lab.dynamics.logs import Run
from dapo_jax.lab.experiments import ink, stats

AXES = {"step": "steps", "updates": "updates", "tokens": "tokens"}  # of plots.X_AXES
RECENT = 5  # steps that a length or a training accuracy is the mean of
CELL = 22  # characters of a column of the table, at most
Rows = list[tuple[str, list[str]]]  # label, a cell for each column


class Column(NamedTuple):
    """Runs that are looked at together: one, or one for each seed."""

    name: str
    runs: list[Run]
    fields: Mapping[str, Any] | None  # of the first; None: a log without a config.json


def read(paths: Sequence[str], pool_seeds: bool = False) -> list[Column]:
    """A column for each run, or for all that differ in nothing but the seed. ValueError: a path
    holds no run, or stands here twice."""
    plain = list(map(os.path.abspath, paths))
    if twice := [p for i, p in enumerate(plain) if p in plain[:i]]:
        raise ValueError(f"{paths[plain.index(twice[0])]}: is named twice")
    pools: dict[str, Column] = {}

    def named(c: Column) -> str:
        """As its run, or as the folder of its runs."""
        if len(c.runs) == 1:
            return c.name
        folder, *more = {os.path.dirname(r.name) for r in c.runs}
        return folder if folder and not more else f"{c.name} and {len(c.runs) - 1} more"

    for path, name in zip(paths, names(paths), strict=True):
        run, config = logs.read(path)._replace(name=name), logs.config_of(path)
        fields = None if config is None else schema.leaves(config)
        rest = {k: v for k, v in (fields or {}).items() if k != "seed"}
        key = json.dumps(rest, sort_keys=True) if pool_seeds and fields else name
        pools.setdefault(key, Column(name, [], fields)).runs.append(run)
    return [c._replace(name=named(c)) for c in pools.values()]


def names(paths: Sequence[str]) -> list[str]:
    """Each path from the folder that all have in common, without a last part that all have, such
    as the seed of a sweep."""
    whole = list(map(os.path.abspath, paths))
    while len(whole) > 1 and len({*map(os.path.basename, whole)}) == 1:
        whole = list(map(os.path.dirname, whole))
    folder = os.path.commonpath(list(map(os.path.dirname, whole)))
    return [os.path.relpath(path, folder) for path in whole]


def differing(columns: Sequence[Column]) -> dict[str, list]:
    """Field -> its value in each column ('-' where it has none); only those that differ."""
    known = [c.fields for c in columns if c.fields is not None]
    return {
        f: [(c.fields or {}).get(f, "-") for c in columns]
        for f in schema.SCHEMA
        if any(k[f] != known[0][f] for k in known)
    }


def scores(columns: Sequence[Column]) -> list[str]:
    """The tags of avg@k, those that all runs have first."""
    runs = [r for c in columns for r in c.runs]
    tags = list(dict.fromkeys(t for r in runs for t in r.series if t.endswith("/avg@k")))
    return sorted(tags, key=lambda tag: not all(tag in r.series for r in runs))


def curve(run: Run, tag: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """(positions on an axis [n], finite values [n]); empty where the run has not logged them."""
    steps, values = run.series.get(tag, (np.zeros(0), np.zeros(0)))
    at = plots.x_of(run, steps, x)
    there = np.isfinite(values) & np.isfinite(np.nan if at is None else at)
    return (steps if at is None else at)[there], values[there]


def end(columns: Sequence[Column], x: str) -> float:
    """How far every run has come on an axis at its last evaluation, or without any its last step.
    NaN where a run does not say."""
    tags = scores(columns)

    def of(run: Run) -> float:
        evaluated = [step for tag in tags for step in curve(run, tag, "step")[0]]
        at = plots.x_of(run, np.array([max(evaluated, default=logs.last_step(run))]), x)
        return np.nan if at is None else at[0]

    return float(np.min([of(r) for c in columns for r in c.runs]))


def facts(run: Run, step: float) -> dict[str, float]:
    """What a run took, and what it was like up to an equal step: NaN where it does not say."""

    def late(tag: str, most: int, to: float = np.inf) -> float:
        """Mean of the last values, `most` of them."""
        at, values = curve(run, tag, "step")
        return float(values[at <= to][-most:].mean()) if (at <= to).any() else np.nan

    spent = [np.nansum(run.series[t][1]) for t in ("time/step_s", "time/eval_s") if t in run.series]
    return {
        "steps": logs.last_step(run),
        "updates": late("optim/updates", 1),
        "tokens": late("spent/tokens", 1),
        "time_s": float(sum(spent)) if spent else np.nan,
        "goodput": late("time/goodput", 1),
        "length": late("response/length_mean", RECENT, step),
        "training_accuracy": late("reward/accuracy", RECENT, step),
    }


def score(run: Run, tag: str, ends: Mapping[str, float]) -> dict[str, float]:
    """A set's avg@k at each equal end, and the best and last of the run with their steps; NaN
    where the curve does not reach."""
    out = {}
    for x, place in ends.items():
        at, values = curve(run, tag, x)
        reached = np.interp(place, at, values, left=np.nan, right=np.nan) if len(at) else np.nan
        out[f"at_equal_{AXES[x]}"] = float(reached)
    steps, values = curve(run, tag, "step")
    for name, i in (("best", values.argmax() if len(values) else 0), ("last", -1)):
        out[name] = float(values[i]) if len(values) else np.nan
        out[f"{name}_step"] = int(steps[i]) if len(values) else np.nan
    return out


def summary(columns: Sequence[Column]) -> dict:
    """Everything that the table says, as plain values: `runs` has a list of one value per run."""
    ends = {x: end(columns, x) for x in AXES}
    ends = {x: place for x, place in ends.items() if np.isfinite(place)}
    differ = differing(columns)

    def lists(rows: Sequence[Mapping[str, float]]) -> dict[str, list]:
        return {k: [None if np.isnan(r[k]) else r[k] for r in rows] for k in rows[0]}

    runs = []
    for i, c in enumerate(columns):
        of = {"name": c.name, "paths": [r.path for r in c.runs]}
        of["fields"] = {f: values[i] for f, values in differ.items()}
        of |= lists([facts(r, ends["step"]) for r in c.runs])
        of["scores"] = {t: lists([score(r, t, ends) for r in c.runs]) for t in scores(columns)}
        runs.append(of)
    return {"equal": {AXES[x]: place for x, place in ends.items()}, "runs": runs}


TAKEN = (  # label, key of a run's `facts`, format
    ("steps done", "steps", ",.0f"),
    ("updates done", "updates", ",.0f"),
    ("tokens drawn", "tokens", ",.0f"),
    ("time of its steps, s", "time_s", ",.0f"),
    ("goodput, share", "goodput", ".2f"),
)


def table(found: Mapping[str, Any], width: int = 80) -> str:
    """A `summary` for people, at most `width` characters wide: a column for each run, in several
    blocks where they do not fit beside each other."""
    runs, ends = found["runs"], found["equal"]
    to = f"at step {ends['steps']:,.0f}"
    rows: Rows = [("", [r["name"] for r in runs])]
    shown = lambda x: repr(x) if x == "" else f"{x:g}" if type(x) is float else str(x)
    rows += [(f, [shown(r["fields"][f]) for r in runs]) for f in runs[0]["fields"]]
    rows += [(label, [_number(r[key], form) for r in runs]) for label, key, form in TAKEN]
    rows.append((f"length {to}", [_mean(r["length"], ".1f") for r in runs]))
    rows.append((f"train. acc. {to}", [_mean(r["training_accuracy"]) for r in runs]))
    for tag in runs[0]["scores"]:
        of = [r["scores"][tag] for r in runs]
        rows.append((tag, [""] * len(runs)))
        for unit, place in ends.items():
            rows.append((f"  at {place:,.0f} {unit}", [_mean(s[f"at_equal_{unit}"]) for s in of]))
        for name in ("best", "last"):
            there = [(_mean(s[name]), _number(s[f"{name}_step"], ".0f")) for s in of]
            cells = [x if x == "-" else f"{x} @ {n.replace(' to ', '-')}" for x, n in there]
            rows.append((f"  {name}, @ its step", cells))
    lengths = {steps for r in runs for steps in r["steps"]}
    notes = [
        f"These runs have different lengths ({min(lengths)} to {max(lengths)} steps): rows with"
        " 'at' compare them where each of them has been; 'best' and 'last' do not."
    ] * (len(lengths) > 1)
    several = max(len(r["paths"]) for r in runs) > 1
    notes += ["No run has been evaluated."] * (not runs[0]["scores"])
    notes += ["Means and 95% t-intervals over the runs of a column."] * several
    return "\n\n".join([*_blocks(rows, width), *(textwrap.fill(n, width) for n in notes)])


def _blocks(rows: Rows, width: int) -> list[str]:
    """Columns side by side as far as they fit; a long cell goes on in the next line. Rows that say
    nothing of a block's columns are left out."""
    label = min(max(len(name) for name, _ in rows), width // 2)
    wide = [max(map(len, cells)) for cells in zip(*(cells for _, cells in rows), strict=True)]
    wide = [min(w, CELL, width - label - 2) for w in wide]
    cut = lambda text, size: [text[i : i + size] for i in range(0, len(text), size)] or [""]
    out, start = [], 0
    while start < len(wide):
        stop = start + 1
        while stop < len(wide) and label + sum(w + 2 for w in wide[start : stop + 1]) <= width:
            stop += 1
        form = f"{{:<{label}}}" + "".join(f"  {{:>{w}}}" for w in wide[start:stop])
        lines = []
        for name, cells in rows:
            if set(cells[start:stop]) != {"-"}:
                parts = map(cut, (name, *cells[start:stop]), (label, *wide[start:stop]))
                lines += [form.format(*of).rstrip() for of in zip_longest(*parts, fillvalue="")]
        out.append("\n".join(lines))
        start = stop
    return out


def _number(values: Sequence[float | None], form: str) -> str:
    """One value, or the smallest and the largest."""
    there = sorted(v for v in values if v is not None)
    return " to ".join(dict.fromkeys(format(v, form) for v in there[:1] + there[-1:])) or "-"


def _mean(values: Sequence[float | None], form: str = ".3f") -> str:
    """The mean over runs; '-' where one of them has no value."""
    return "-" if None in values else format(stats.interval(values), form)


def figure(columns: Sequence[Column]) -> plots.Figure:
    """The first evaluation set over steps, updates and tokens, each to its own end (dotted: how far
    all have come); training accuracy, length and entropy over steps. Of several seeds the mean is
    thick and each one thin; an interval is drawn for three or more, as that of two hides all."""
    tag = next(iter(scores(columns)), "eval/-/avg@k")
    different = len({logs.last_step(r) for c in columns for r in c.runs}) > 1
    panels = [
        *((tag, tag.removeprefix("eval/"), x) for x in AXES),
        ("reward/accuracy", "training accuracy", "step"),
        ("response/length_mean", "length [tokens]", "step"),
        ("policy/entropy", "entropy [nats per token]", "step"),
    ]
    made, axes = ink.panels(2, 3)
    for ax, (name, label, x) in zip(axes, panels, strict=True):
        for i, c in enumerate(columns):
            style = {"ls": ink.DASHES[i // len(ink.COLORS) % len(ink.DASHES)]}
            style |= {"marker": "o", "ms": 3} if name == tag and len(c.runs) == 1 else {}
            color = ink.COLORS[i % len(ink.COLORS)]
            curves = [curve(r, name, x) for r in c.runs]
            ink.over_seeds(ax, curves, c.name, color, even=x == "tokens", fewest=3, **style)
            for at, values in curves if len(curves) > 1 else []:
                ax.plot(at, values, color=color, lw=0.8, alpha=0.5)
        if name == tag and different:
            ax.axvline(end(columns, x), color="gray", lw=1, ls=":")
        plots.finish(ax, "", label, x, legend=False)
    found = [pair for ax in axes for pair in zip(*ax.get_legend_handles_labels(), strict=True)]
    by_label = {label: handle for handle, label in found}
    made.legend(by_label.values(), by_label, loc="outside lower center", ncols=3, fontsize=8)
    return made


def write(columns: Sequence[Column], json_file: str = "", figure_file: str = "") -> str:
    """Write what is wanted; returns the table, as wide as the terminal."""
    found = summary(columns)
    if json_file:
        files.write_json(pathlib.Path(json_file), found)
    if figure_file:
        figure(columns).savefig(figure_file, dpi=130)
    return table(found, shutil.get_terminal_size((80, 24)).columns)


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser("python -m dapo_jax.lab compare", description=__doc__)
    parser.add_argument("run", nargs="+", help="workdir, local or gs://, or another log")
    parser.add_argument("--json", default="", help="write everything here, each run's values too")
    parser.add_argument("--figure", default="", help="draw the runs here: FILE.png, .pdf or .svg")
    parser.add_argument("--pool_seeds", action="store_true", help="seeds of a config: one column")
    options = parser.parse_args(argv)
    try:
        if len(options.run) < 2:
            raise ValueError(f"{options.run[0]}: give two runs or more")
        cli.tell([write(read(options.run, options.pool_seeds), options.json, options.figure)])
    except (ValueError, OSError) as error:
        return cli.fail(str(error) or type(error).__name__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
