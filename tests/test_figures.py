"""Figures of README.md and docs/ are those of kept results, benchmarks/results/NAME.json. A comment
before a table or paragraph says which: `<!-- RESULTS: name; name -->`."""

import decimal
import re

import pytest
from scripts import ROOT

from benchmarks import tables

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- RESULTS: (.+?) -->\n(.+?)(?:\n\n|\Z)", re.S)
# With a point, or a ratio: 0.95, .95, 1.3, 30x. Not versions, files, counts or sections.
NUMBER = re.compile(r"(?<![\w.,-])[-+]?(\d*\.\d+|\d+(?=x))(?![\w.]*\d)(?=x?\b)")


def results() -> dict[str, str]:
    """Name -> its section of docs/results/."""
    names = (name for topic in tables.TOPICS.values() for name in topic.results)
    return {name: tables.section(tables.read(name)) for name in names}


def rounds_to(kept: str, quoted: str) -> bool:
    kept, quoted = decimal.Decimal(kept), decimal.Decimal(quoted)
    ways = (decimal.ROUND_HALF_UP, decimal.ROUND_HALF_EVEN)
    return any(kept.quantize(quoted, way) == quoted for way in ways)


def missing(text: str, kept: str) -> list[str]:
    """Numbers of `text` that no number of `kept` rounds to."""
    there = set(NUMBER.findall(kept))
    return [n for n in NUMBER.findall(text) if not any(rounds_to(k, n) for k in there)]


QUOTES = [(p, *found) for p in PAGES for found in MARK.findall(p.read_text())]


@pytest.mark.parametrize(
    ("page", "names", "text"), QUOTES, ids=[f"{p.name}: {names}" for p, names, _ in QUOTES]
)
def test_quoted_figures_are_kept_ones(page, names, text):
    kept = results()
    wanted = names.split("; ")
    assert set(wanted) <= kept.keys()
    assert NUMBER.findall(text), "nothing is quoted here"
    assert missing(text, "".join(kept[w] for w in wanted)) == []
