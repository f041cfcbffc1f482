"""Panels of a dashboard, made from the tables of tags (log/tags.md): a section for each heading, in
it a panel for tags that can share an axis.

A tag with a name in it (`eval/<set>/avg@k`) is a panel: a line a name. Others share one where
their first word and their unit are the same; of units that say little of the size (`1`, nats) also
the last word, so that losses, ratios and entropies stand apart. W&B and MLflow make a section for
each first word by themselves.
"""

import re
from collections.abc import Collection

from tensorboardX import summary
from tensorboardX.proto.summary_pb2 import Summary

from dapo_jax.log import tags

_VAGUE = ("1", "nats", "nats per token")


def _sections() -> dict[str, list[str]]:
    """Heading -> the scalars of its table."""
    found: dict[str, list[str]] = {}
    for file in tags.FILES:
        heading = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                heading = re.sub(r" *\(.*", "", line.removeprefix("## "))
            name = line.partition("|")[2].split("|")[0].strip(" `") if line[:3] == "| `" else ""
            if name in tags.TAGS and name != "time/wall" and not tags.LISTS.fullmatch(name):
                found.setdefault(heading, []).append(name)
    return found


def _panel(name: str) -> str:
    """What the tags of a panel have in common, with their unit."""
    unit, words = tags.TAGS[name].unit, re.split(r"[/_]", name)
    title = name if "<" in name else words[0]
    if unit in _VAGUE:
        title += f": {words[-1]}"
    return f"{title} [{unit}]"


def panels() -> dict[str, dict[str, list[str]]]:
    """Section -> panel -> its rows of the table. A tag alone gives its panel the name."""
    out = {}
    for heading, names in _sections().items():
        of: dict[str, list[str]] = {}
        for name in names:
            of.setdefault(_panel(name), []).append(name)
        alone = lambda names: f"{names[0]} [{tags.TAGS[names[0]].unit}]"
        out[heading] = {alone(x) if len(x) == 1 else title: x for title, x in of.items()}
    return out


def summary_of(logged: Collection[str]) -> Summary:
    """TensorBoard's layout ("Custom Scalars") of the panels that have one of these tags."""
    there = {tags.family(t) for t in logged if tags.describe(t)}  # '': of another version
    shown = {
        section: {
            title: ["Multiline", [_pattern(n) for n in names if n in there]]
            for title, names in of.items()
            if there.intersection(names)
        }
        for section, of in panels().items()
    }
    return summary.custom_scalars({name: of for name, of in shown.items() if of})


def _pattern(name: str) -> str:
    """What TensorBoard looks for, from a tag's first letter on, in names as its file has them."""
    parts = [re.escape(summary._clean_tag(x)) if x else "" for x in re.split(r"<\w+>", name)]
    return ".+".join(parts) + "$"
