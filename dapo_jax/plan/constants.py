"""What the time model takes as given: constants.txt, every number with its range and its source."""

import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple


class Constant(NamedTuple):
    value: float
    low: float  # the value that makes a step shortest
    high: float
    unit: str
    source: str


def _read(text: str) -> dict[str, Constant]:
    """Those of a family of chips by names like 'ici.v5p'."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, *numbers, unit, source = (cell.strip() for cell in line.split("|"))
            numbers = [json.loads(x) for x in numbers]
            if len(numbers) == 3:
                found[name] = Constant(*numbers, unit, source)
            else:
                of_family = zip(("v4", "v5e", "v5p", "v6e"), numbers, strict=True)
                found |= {f"{name}.{f}": Constant(x, x, x, unit, source) for f, x in of_family}
    return found


CONSTANTS = _read(pathlib.Path(__file__).with_name("constants.txt").read_text())
Values = Mapping[str, float]
VALUES: dict[str, float] = {name: c.value for name, c in CONSTANTS.items()}
