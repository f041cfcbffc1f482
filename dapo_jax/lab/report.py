"""A run as one HTML file that opens without a server: curves, samples, alarms, cost, config.

    python -m dapo_jax.lab report RUN [OTHER ...] [--out=report.html]

RUN is a workdir, on a disk or in a bucket. Other runs, or logs of other systems that `compare`
reads, are drawn beside it and stand in the table; samples, alarms and cost are RUN's. Nothing in
the file is fetched from anywhere: curves are inline SVG, there is no script.
"""

import argparse
import io
import pathlib
import sys
from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.figure import Figure

from dapo_jax.config import cli, schema
from dapo_jax.data import files
from dapo_jax.lab import compare
from dapo_jax.lab.dynamics import browse, logs, plots
from dapo_jax.log import goodput

PANELS = {
    "What Dynamic Sampling finds": plots.SAMPLING, "Length and truncation": plots.TRUNCATION,
    "Clipping": plots.CLIPPING, "Where time goes": plots.TIME,
}  # fmt: skip


def svg(figure: Figure) -> str:
    """A figure as an element of a page."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": str(id(figure))}):  # ids of figures differ
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().partition("<svg")[2].join(["<svg", ""])


def figures(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(title, SVG) of the curves of all runs, those that one of them has logged."""
    runs = logs.compare(paths)
    logged = {tag for run in runs for tag in run.series}
    if any(tag.endswith("/avg@k") for tag in logged):
        yield "Scores", svg(plots.headline(runs))
    yield "Dynamics", svg(plots.dynamics(runs))
    for title, panels in PANELS.items():
        if any(logged.intersection(p.lines) for p in panels):
            yield title, svg(plots.lines(runs, panels))


def settings(path: str) -> list[tuple[str, str, str]]:
    """(field, value of the run, default) of each field that has another value than its default."""
    fields = schema.leaves(logs.config_of(path) or schema.base())
    usual = {name: about.default for name, about in schema.SCHEMA.items()}
    return [(n, repr(x), repr(usual[n])) for n, x in fields.items() if x != usual[n]]


def page(paths: Sequence[str], samples: int = 12) -> str:
    """The file's content; samples: of how many problems of the first run. ValueError: a path holds
    no run."""
    first, columns = paths[0], compare.read(paths)
    there = logs.attempt(first, (logs.place(first) / "rollouts").is_dir)
    shown = browse.choose(browse.read(first), samples) if there else []
    ledger = goodput.read(logs.place(first) / "events.jsonl")
    sections = {"curves": list(figures(paths)), "alarms": logs.alarms(first)}
    return browse.html(
        "report", first, compare.table(compare.summary(columns), 120), sections,
        goodput.summary(ledger) if ledger.steps else "", settings(first),
        browse.page(shown) if shown else "",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser(
        prog="python -m dapo_jax.lab report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", nargs="+", help="workdir, local or gs://, then other runs or logs")
    parser.add_argument("--out", default="report.html", help="the file that is written")
    parser.add_argument("--samples", type=int, default=12, help="problems whose samples are shown")
    a = parser.parse_args(argv)
    try:
        files.write(pathlib.Path(a.out), page(a.run, a.samples))
    except (ValueError, OSError) as error:
        return cli.fail(str(error) or type(error).__name__)
    print(f"{a.out}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
