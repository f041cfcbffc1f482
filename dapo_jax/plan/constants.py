"""What the time model takes as given: constants.txt, every number with its range and its source."""

import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dapo_jax.pods.slices import CHIPS


class Constant(NamedTuple):
    value: float
    low: float  # the value that makes a step shortest
    high: float
    unit: str
    source: str


def read(text: str, families: Iterable[str]) -> dict[str, Constant]:
    """Those of a family of chips by names like 'ici.v5p'."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, *numbers, unit, source = (cell.strip() for cell in line.split("|"))
            numbers = [json.loads(x) for x in numbers]
            if len(numbers) == 3:
                found[name] = Constant(*numbers, unit, source)
            else:
                of_family = zip(families, numbers, strict=True)
                found |= {f"{name}.{f}": Constant(x, x, x, unit, source) for f, x in of_family}
    return found


CONSTANTS = read(pathlib.Path(__file__).with_name("constants.txt").read_text(), CHIPS)
Values = Mapping[str, float]
VALUES: dict[str, float] = {name: c.value for name, c in CONSTANTS.items()}


def override(given: Iterable[str]) -> None:
    """Take other values from here on: ['keys_hbm=0.9']. ValueError: no such constant or value."""
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in VALUES or not 0 < number < math.inf:
            raise ValueError(f"--constants: {text!r}: wants NAME=NUMBER of plan/constants.txt")
        VALUES[name] = number
        CONSTANTS[name] = CONSTANTS[name]._replace(value=number)
