"""Seconds of the passes over packed rows: log-probs, values and updates.

Products and attention by their operations over what the matrix units do; the rest is waiting for
what other devices send. Seconds are of one device; all devices work alike.
"""

import math
from typing import NamedTuple

from dapo_jax.plan.constants import Values
from dapo_jax.plan.decoding import axis_rate
from dapo_jax.plan.scene import Scene
from dapo_jax.plan.simulate import BLOCK, Packed


class Pass(NamedTuple):
    """One micro-batch of packed rows, on a device."""

    products: float  # seconds
    elementwise: float
    attention: float
    waits: float  # for collectives that nothing runs beside
    flops: float  # of products and attention, what is computed again included

    @property
    def seconds(self) -> float:
        return self.products + self.elementwise + self.attention + self.waits


def micro_batch(scene: Scene, pairs: float, k: Values, *, update: bool) -> Pass:
    """A forward pass; with `update` also the backward pass and what it computes again. pairs: of a
    query and a key that attention computes in these rows."""
    chip, chips = scene.pod.chip, scene.pod.chips
    narrow = ".8" if scene.train_split >= 8 else ""
    passes = 3 - bool(scene.adapters) + scene.again if update else 1
    flops = passes * 2 * scene.multiplied * scene.micro_rows * scene.row_tokens / chips
    products = flops / (k[f"train_mxu{narrow}"] * chip.flops)

    looks = 2 if update and scene.shape.remat == "full" else 1
    blocks = scene.shape.num_heads * scene.shape.num_layers * pairs / BLOCK**2 / chips
    score = 4 * scene.shape.head_dim * BLOCK**2 * blocks  # FLOPs of one look

    def on_cores(way: str, n: int) -> float:
        """Seconds where the cores share out n things of one size."""
        bundles = k[f"splash.{way}.{scene.pod.family}"] * k["splash_waits"] * blocks
        cores = int(k[f"cores.{scene.pod.family}"])
        return bundles / k[f"clock.{scene.pod.family}"] * math.ceil(n / cores) / n

    forward = on_cores("forward", scene.shape.num_heads // scene.train_split)
    backward = on_cores("backward", scene.train_kv_heads)
    return Pass(
        products,
        k[f"elementwise{narrow}"] * products,
        looks * forward + update * backward,
        collective_waits(scene, k, update=update),
        flops + score * (looks + 2.5 * update),
    )


def collective_waits(scene: Scene, k: Values, *, update: bool) -> float:
    """Seconds per micro-batch in which a device waits for others: for whole rows of the residual
    stream that are gathered over `tensor` (a sum that each device gets whole counts twice), layers
    of weights that are gathered over `fsdp`, gradients that replicas of the weights add up."""
    t, f, d = scene.train_split, scene.fsdp, scene.replicas
    kind, seconds = "update" if update else "forward", 0.0
    if t > 1:
        rows = scene.micro_rows * t / scene.pod.chips * scene.row_tokens * scene.stream_bytes
        moved = k[f"{kind}_moved"] * scene.shape.num_layers * rows
        seconds += moved * (t - 1) / t / axis_rate(scene.pod, t, k)
    weights = scene.read_bytes / t
    if f > 1:
        axes = len(scene.pod.sides) - (t > 1)
        gathered = k[f"{kind}_weights" + ".8" * (t >= 8)] * weights
        seconds += gathered * (f - 1) / f / (k[f"ici.{scene.pod.family}"] * axes)
    if d > 1 and update:
        share = (scene.adapters or scene.parameters) / scene.parameters
        seconds += 2 * (d - 1) / d * weights * share / f / axis_rate(scene.pod, d, k)
    return seconds


def mean_pass(packed: Packed, scene: Scene, k: Values, *, update: bool) -> Pass:
    """The mean of a step's micro-batches."""
    return micro_batch(scene, packed.pairs / packed.micro_batches, k, update=update)


def training(packed: Packed, scene: Scene, k: Values) -> dict[str, float]:
    """Seconds of a rollout step by phase."""

    def of(scene: Scene, update: bool) -> float:
        return packed.micro_batches * mean_pass(packed, scene, k, update=update).seconds

    out = {"old log-probs": scene.scored * of(scene, False), "update": of(scene, True)}
    if scene.value:
        out |= {"values": of(scene.value, False), "update of values": of(scene.value, True)}
    return out
