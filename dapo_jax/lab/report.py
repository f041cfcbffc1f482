"""A run as one HTML file that opens without a server: scores, curves, alarms, cost, samples.

    python -m dapo_jax.lab report RUN [OTHER ...] [--out=report.html] [--pictures=DIR]

RUN is a workdir, on a disk or in a bucket. Other runs, or logs of other systems that `compare`
reads, are drawn beside it, and their configs stand beside its own; samples, alarms and cost are
RUN's. Nothing in the file is fetched from anywhere: curves are inline SVG, there is no script.
--pictures writes the curves for a paper too (pictures.py), each as .pdf and .png.
"""

import datetime
import io
import pathlib
import re
import sys
from collections.abc import Sequence

import matplotlib

from dapo_jax.config import cli, schema
from dapo_jax.data import files
from dapo_jax.lab import compare, pictures
from dapo_jax.lab.dynamics import browse, logs
from dapo_jax.lab.experiments import ink
from dapo_jax.log import goodput

MOST = 12  # lines of alarms that stand open


def svg(picture: pictures.Picture) -> str:
    """A figure as an element of a page."""
    out = io.StringIO()
    salt = {"svg.hashsalt": f"{picture.section}: {picture.title}"}  # ids of figures differ
    with matplotlib.rc_context(pictures.STYLE | salt):
        picture.figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().partition("<svg")[2].join(["<svg", ""])


def curves(columns: Sequence[compare.Column]) -> dict[str, list[tuple[str, str]]]:
    """Section -> (title, SVG) of its panels."""
    out: dict[str, list[tuple[str, str]]] = {}
    for picture in pictures.pictures(columns):
        out.setdefault(picture.section, []).append((picture.title, svg(picture)))
    return out


def settings(columns: Sequence[compare.Column]) -> list[tuple[bool, list[str]]]:
    """(whether the columns differ, field, value in each column, default) of each field that has
    another value than its default in one of them; '-' in a log without a config."""
    usual = {name: about.default for name, about in schema.SCHEMA.items()}
    rows = []
    for name, default in usual.items():
        known = [c.fields[name] for c in columns if c.fields]
        if any(x != default for x in known):
            cells = [repr(c.fields[name]) if c.fields else "-" for c in columns]
            rows.append((len(set(map(repr, known))) > 1, [name, *cells, repr(default)]))
    return sorted(rows, key=lambda row: not row[0])


def alarms(path: str) -> list[tuple[str, str]]:
    """(steps, words) of the alarms of a workdir; those that differ in numbers alone are one."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for step, words in logs.alarms(path):
        kinds.setdefault(re.sub(r"[\d.]+", "#", words), []).append((step, words))
    steps = lambda rows: (
        f"step {rows[0][0]}"
        if len(rows) == 1
        else f"{len(rows)} times from step {rows[0][0]} to {rows[-1][0]}, last"
    )
    return [(steps(rows), rows[-1][1]) for rows in kinds.values()]


def scores(columns: Sequence[compare.Column]) -> list[list[str]]:
    """Evaluation set, and for each column its first, best and last avg@k; a mean over seeds."""
    rows = []
    for tag in compare.scores(columns):
        cells = [tag.removeprefix("eval/").removesuffix("/avg@k")]
        for c in columns:
            found = [values for r in c.runs if len(values := compare.curve(r, tag, "step")[1])]
            ends = [[v[0] for v in found], [v.max() for v in found], [v[-1] for v in found]]
            cells += [f"{compare.stats.interval(x)}" if x else "-" for x in ends]
        rows.append(cells)
    return rows


def facts(column: compare.Column) -> list[tuple[str, str]]:
    """(what, how much) of the first run of a column, to be read at a glance."""
    run = column.runs[0]
    found = compare.facts(run, logs.last_step(run))
    shown = (*compare.TAKEN, ("length, tokens", "length", ".1f"))
    shown += (("training accuracy", "training_accuracy", ".3f"),)
    return [(what, format(x, form)) for what, key, form in shown if (x := found[key]) == x]


def about(column: compare.Column) -> str:
    """One line: model, data, loss and the day of the last record."""
    c, (_, walls) = column.fields or {}, compare.curve(column.runs[0], "time/wall", "step")
    words = [c.get("model.path") or "a model of its own"] if c else ["a log without a config"]
    words += [f"trained on {c['data.train'] or 'the embedded task'}"] if c else []
    words += [f"loss {c['loss.objective']}"] if c else []
    if len(walls):
        day = datetime.datetime.fromtimestamp(walls[-1], datetime.UTC)
        words += [f"last record {day:%Y-%m-%d %H:%M} UTC"]
    return ", ".join(words)


def page(paths: Sequence[str], samples: int = 12, pool_seeds: bool = False) -> str:
    """The file's content; samples: of how many problems of the first run. ValueError: a path holds
    no run."""
    first, columns = paths[0], compare.read(paths, pool_seeds)
    there = logs.numbered(first, "rollouts")
    shown = browse.few(first, samples) if there else []
    ledger = goodput.read(logs.place(first) / "events.jsonl")
    parts = [(goodput.LOST.get(what.rpartition("/")[2], "steps that count"), share)
             for what, share in ledger.shares().items() if share >= 0.0005]  # fmt: skip
    found = {
        "run": first, "about": about(columns[0]), "facts": facts(columns[0]),
        "columns": [c.name for c in columns], "colors": ink.COLORS, "scores": scores(columns),
        "table": compare.table(compare.summary(columns), 120), "alarms": alarms(first),
        "most": MOST, "curves": curves(columns), "settings": settings(columns),
        "cost": goodput.summary(ledger).strip() if ledger.steps else "", "parts": parts,
        "samples": browse.page(shown) if shown else "",
    }  # fmt: skip
    return browse.html("report", found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser("python -m dapo_jax.lab report", description=__doc__)
    parser.add_argument("run", nargs="+", help="workdir, local or gs://, then other runs or logs")
    parser.add_argument("--out", default="report.html", help="the file that is written")
    parser.add_argument("--samples", type=int, default=12, help="problems whose samples are shown")
    parser.add_argument("--pictures", default="", metavar="DIR", help="write each curve there too")
    parser.add_argument("--pool_seeds", action="store_true", help="seeds of a config: one curve")
    a = parser.parse_args(argv)
    try:
        if a.samples < 0:
            raise ValueError(f"--samples={a.samples}: wants 0 or more")
        files.write(pathlib.Path(a.out), page(a.run, a.samples, a.pool_seeds))
        if a.pictures:
            written = pictures.write(compare.read(a.run, a.pool_seeds), pathlib.Path(a.pictures))
            print(f"{a.pictures}: {len(written)} files, 3.3 inches wide: .pdf, and .png at 300 dpi")
    except (ValueError, OSError) as error:
        return cli.fail(str(error) or type(error).__name__)
    print(f"{a.out}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
