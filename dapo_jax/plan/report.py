"""The plan for people: templates of this folder, filled in with JSON values."""

from typing import Any

import jinja2

from dapo_jax.plan.footprint import GB
from dapo_jax.pods import topology


def table(text: str) -> str:
    """Lines with cells apart by ' | ' in columns: the first to the left, the others to the right.
    The first line is their heading. Nothing where there are no rows."""
    head, *lines = filter(None, text.splitlines())
    rows, out = [line.split(" | ") for line in lines], [head]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        right = (f"  {x:>{n}}" for x, n in zip(cells, widths[1:], strict=True))
        out.append(f"  {name:{widths[0]}}{''.join(right)}".rstrip())
    return "\n".join(out) if rows else ""


FILTERS = {
    "table": table,
    "whole": lambda n: f"{n:,.0f}",
    "percent": lambda share: f"{share:.0%}",
    "size": topology.size,
    "sizes": lambda items: ", ".join(f"{what} {topology.size(n)}" for what, n in items.items()),
    "gb": lambda n, digits: f"{n / GB:,.{digits}f}",
    "number": lambda x: f"{x:,.0f}" if abs(x) >= 10 else f"{x:.2g}",
    "clock": lambda s: f"{s:,.1f} s" if s < 100 else f"{s / 60:.1f} min",
    "long": lambda s: f"{s / 86400:.1f} days" if s >= 86400 else f"{s / 60:,.1f} min",
}


def filled_in(name: str, **values) -> list[str]:
    """The lines of a template of this folder, but for empty ones."""
    loader = jinja2.PackageLoader("dapo_jax.plan", "")
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= FILTERS
    return list(filter(None, environment.get_template(name).render(values).splitlines()))


def report(r: dict[str, Any]) -> list[str]:
    """All of `planner.plan`."""
    uncertain = r["step"]["uncertain"].items() if r["fits"] else ()
    most = sorted(uncertain, key=lambda x: x[1][0] - x[1][1])[:3]
    return filled_in("report.txt", r=r, most_uncertain=most)
