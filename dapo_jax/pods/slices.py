"""TPU slices by name, and what a chip of each family can do.

A slice is named as Google Cloud does (v5p-256, v6e-256, v5litepod-256, two of them: 2xv5p-256) or
by the sides of its torus in chips (v5p:4x4x8, v6e:16x16). Cloud counts cores for v4 and v5p, two a
chip, and chips for v5e and v6e.
"""

import math
import re
from typing import NamedTuple

from dapo_jax.pods.topology import HBM_LIMIT_GIB

GIB = 2**30


class Chip(NamedTuple):
    """One chip. Peaks are Google's published figures; reality stays below them."""

    hbm: int  # bytes that XLA:TPU lets a program have
    flops: float  # bfloat16 a second
    bandwidth: float  # bytes of HBM a second


CHIPS = {
    "v4": Chip(int(HBM_LIMIT_GIB["TPU v4"] * GIB), 275e12, 1228e9),
    "v5e": Chip(int(HBM_LIMIT_GIB["TPU v5 lite"] * GIB), 197e12, 819e9),
    "v5p": Chip(int(HBM_LIMIT_GIB["TPU v5"] * GIB), 459e12, 2765e9),
    "v6e": Chip(int(HBM_LIMIT_GIB["TPU v6 lite"] * GIB), 918e12, 1640e9),
}
_CLOUD = {"v4": ("v4", 2), "v5p": ("v5p", 2), "v5litepod": ("v5e", 1), "v5e": ("v5e", 1)}
_CLOUD["v6e"] = ("v6e", 1)
_SIDES = {
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16 16x16x16",
    2: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
}


class Pod(NamedTuple):
    """`slices` tori of `sides` chips each."""

    family: str
    sides: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self.sides) * self.slices

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]

    @property
    def topology(self) -> str:
        """'v5p:4x4x8', of one slice: what jax.experimental.topologies calls it."""
        return f"{self.family}:{'x'.join(map(str, self.sides))}"

    @property
    def cloud(self) -> str:
        """'v5p-256'."""
        torus = self.family in ("v4", "v5p")
        name = {"v5e": "v5litepod"}.get(self.family, self.family)
        one = f"{name}-{math.prod(self.sides) * (2 if torus else 1)}"
        return one if self.slices == 1 else f"{self.slices}x{one}"


def parse(name: str) -> Pod:
    """ValueError: there is no slice of that name."""
    if match := re.fullmatch(r"(?:(\d+)x)?(\w+):(\d+(?:x\d+){1,2})", name):
        slices, family, sides = match.groups()
        pod = Pod(family, tuple(map(int, sides.split("x"))), int(slices or 1))
        if family in CHIPS and len(pod.sides) == _dimensions(family) and pod.chips:
            return pod
    elif (match := re.fullmatch(r"(?:(\d+)x)?(\w+)-(\d+)", name)) and match[2] in _CLOUD:
        (family, cores), slices = _CLOUD[match[2]], int(match[1] or 1)
        for sides in _all_sides(family):
            if math.prod(sides) * cores == int(match[3]) and slices:
                return Pod(family, sides, slices)
    raise ValueError(
        f"{name!r}: no TPU slice is called that; write v5p-256, v6e-256, v5litepod-256, 2xv5p-256,"
        f" or family:chips as v5p:4x4x8 or v6e:16x16 (families: {', '.join(CHIPS)})"
    )


def _dimensions(family: str) -> int:
    return 3 if family in ("v4", "v5p") else 2


def _all_sides(family: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, s.split("x"))) for s in _SIDES[_dimensions(family)].split()]


def larger(pod: Pod) -> list[Pod]:
    """The slices of the same family with more chips, by size."""
    return [
        Pod(pod.family, s) for s in _all_sides(pod.family) if math.prod(s) > math.prod(pod.sides)
    ]
