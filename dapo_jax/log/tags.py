"""Every tag of metrics.jsonl, from the tables of tags.md here and in variants/.

    python -m dapo_jax.log.tags      # all of them, as one table in Markdown

TensorBoard has the same tags, with the definition on each card. A number is a scalar, a list of
numbers the counts of a histogram (`edges`), a list of strings text.
"""

import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.variants import choose


class Tag(NamedTuple):
    unit: str
    definition: str
    formula: str
    healthy: str  # range, or course over a run
    bad: str  # what another value means
    source: str
    when: str = "step"  # which records have it; see WHEN


def _rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of Markdown tables whose first cell is `code`."""
    for line in text.splitlines():
        if line.startswith("| `"):
            _, name, *cells, _ = re.split(r"(?<!\\)\|", line)
            yield [name.strip(" `"), *(cell.strip().replace("\\|", "|") for cell in cells)]


FILES = (pathlib.Path(__file__).with_name("tags.md"), choose.TAGS)
_TABLES = [row for file in FILES for row in _rows(file.read_text(encoding="utf-8"))]
WHEN = {name: cells[0] for name, *cells in _TABLES if len(cells) == 1}
LISTS = re.compile(r"alarms|.+(_hist|by_\w+)")  # tags whose values are lists
TAGS = {name: Tag(*cells) for name, *cells in _TABLES if len(cells) > 1}

# Of policy/entropy_hist, nats. Half of all tokens are nearly certain; ln(152,064) = 11.93.
ENTROPY_EDGES = (0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12)
LENGTH_BINS = 32  # of response/length_hist, at most

_FAMILIES = {t: re.compile(re.sub(r"<\w+>", ".+", t)) for t in TAGS if "<" in t}


def family(tag: str) -> str:
    """A tag's row of TAGS: itself, or eval/<set>/avg@k for eval/aime24/avg@k. KeyError: none."""
    found = [tag] if tag in TAGS else [n for n, form in _FAMILIES.items() if form.fullmatch(tag)]
    if not found:
        raise KeyError(f"{tag}: not in dapo_jax/log/tags.md")
    return found[0]


def describe(tag: str) -> str:
    """One paragraph for a card; '' for a tag of another version."""
    try:
        t = TAGS[family(tag)]
    except KeyError:
        return ""
    health = f"Healthy: {t.healthy}. Else: {t.bad}."
    return f"{t.definition} [{t.unit}]: {t.formula}. {health} ({t.source})"


def edges(tag: str, bins: int, longest: int) -> Sequence[float]:
    """The bins + 1 edges of a histogram's counts. longest: rollout.max_response_tokens."""
    if tag == "policy/entropy_hist":
        return ENTROPY_EDGES
    if tag in choose.EDGES:
        return choose.EDGES[tag]
    if tag == "response/length_hist":
        return np.linspace(0, longest, bins + 1).tolist()
    return (np.arange(bins + 1) - 0.5).tolist()  # one bin a whole number


def markdown() -> str:
    rows = [
        "| tag | unit | definition | formula | healthy | else | source | in |",
        "|---" * 8 + "|",
    ]
    for name, t in TAGS.items():
        cells = (f"`{name}`", *t[:-1], WHEN[t.when])
        rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
