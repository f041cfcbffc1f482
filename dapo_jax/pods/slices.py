"""TPU slices by name, and what a chip of each family can do.

A slice is named as Google Cloud does (v5p-256, v6e-256, v5litepod-256, two of them: 2xv5p-256) or
by the sides of its torus in chips (v5p:4x4x8, v6e:16x16). Cloud counts cores for v4, v5p and tpu7x,
two a chip, and chips for v5e and v6e. slices.txt, which launch/ reads too, says which there are.
"""

import math
import pathlib
import re
from typing import NamedTuple

from dapo_jax.pods import topology

GIB = 2**30


class Chip(NamedTuple):
    """A device: one chip, of tpu7x half of one. Peaks are published; reality stays below."""

    hbm: int  # bytes that a program may have: out-of-memory messages of libtpu 0.0.42 - 0.0.50
    flops: float  # bfloat16 a second
    bandwidth: float  # bytes of HBM a second
    devices: int = 1  # of a chip, as jax sees it


CHIPS = {
    "v4": Chip(int(30.75 * GIB), 275e12, 1228e9),
    "v5e": Chip(int(15.75 * GIB), 197e12, 819e9),
    "v5p": Chip(int(95.73 * GIB), 459e12, 2765e9),
    "v6e": Chip(int(31.24 * GIB), 918e12, 1640e9),
    "tpu7x": Chip(int(94.75 * GIB), 2307e12 / 2, 7380e9 / 2, devices=2),
}
# By jax's name of a device.
_TPUS = {"TPU v5": "v5p", "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
_TPUS |= {f"TPU {family}": family for family in CHIPS}
# Dense bfloat16 FLOPs a second, as NVIDIA publishes them, by how jax's name of a GPU begins.
_GPUS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def chip(device_kind: str) -> Chip | None:
    """The TPU chip that jax calls so; None for other devices."""
    return CHIPS.get(_TPUS.get(device_kind))


def peak_flops(device_kind: str) -> float | None:
    """bfloat16 FLOPs a second of a device by jax's name of it; None where that is not known."""
    if tpu := chip(device_kind):
        return tpu.flops
    return next((x for name, x in _GPUS.items() if device_kind.startswith(name)), None)


class Family(NamedTuple):
    """What Cloud rents with chips of one kind: a line of slices.txt."""

    cloud: str  # 'v5litepod'
    size: int  # what a name counts: so many of a chip
    shapes: tuple[tuple[int, ...], ...]  # sides in chips, by size


def _read(text: str) -> dict[str, Family]:
    families = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            family, cloud, size, _, _, _, _, *shapes = line.split()
            sides = tuple(tuple(map(int, shape.split("x"))) for shape in shapes)
            families[family] = Family(cloud, int(size), sides)
    return families


FAMILIES = _read(pathlib.Path(__file__).with_name("slices.txt").read_text())


class Pod(NamedTuple):
    """`slices` tori of `sides` chips each."""

    family: str
    sides: tuple[int, ...]
    slices: int = 1
    platform = "tpu"  # as jax calls it

    @property
    def chips(self) -> int:
        return math.prod(self.sides) * self.slices

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]

    @property
    def topology(self) -> str:
        """'v5p:4x4x8', of one slice: what jax.experimental.topologies calls it."""
        return f"{self.family}:{'x'.join(map(str, self.sides))}"

    @property
    def cloud(self) -> str:
        """'v5p-256'; of a torus that Cloud does not rent, its sides."""
        family, n = FAMILIES[self.family], math.prod(self.sides)
        one = f"{family.cloud}-{n * family.size}" if self.sides in family.shapes else self.topology
        return one if self.slices == 1 else f"{self.slices}x{one}"

    def described(self) -> list:
        """Its devices, for programs that are compiled and not run. ImportError: no compiler."""
        return topology.devices(self.topology, self.slices)

    def compiler(self) -> dict[str, str]:
        """The versions that `described` takes; {} where it is not installed."""
        return topology.versions() if topology.available() else {}

    def larger(self) -> list["Pod"]:
        """The larger slices of the family; powers of two, as others hardly divide a batch."""
        more = (s for s in FAMILIES[self.family].shapes if math.prod(s) > math.prod(self.sides))
        return [Pod(self.family, s) for s in more if math.prod(s).bit_count() == 1]


def parse(name: str) -> Pod:
    """ValueError: there is no slice of that name."""
    if match := re.fullmatch(r"(?:(\d+)x)?(\w+):(\d+(?:x\d+){1,2})", name):
        slices, family, sides = match.groups()
        pod = Pod(family, tuple(map(int, sides.split("x"))), int(slices or 1))
        known = FAMILIES.get(family)
        if known and len(pod.sides) == len(known.shapes[0]) and pod.chips:
            return pod
    elif match := re.fullmatch(r"(?:(\d+)x)?(\w+)-(\d+)", name):
        slices, size = int(match[1] or 1), int(match[3])
        for family, known in FAMILIES.items():
            for sides in known.shapes if match[2] in (family, known.cloud) and slices else ():
                if math.prod(sides) * known.size == size:
                    return Pod(family, sides, slices)
    raise ValueError(
        f"{name!r}: no TPU slice is called that; write v5p-256, v6e-256, v5litepod-256, 2xv5p-256,"
        f" or family:chips as v5p:4x4x8 or v6e:16x16 (families: {', '.join(FAMILIES)})"
    )
