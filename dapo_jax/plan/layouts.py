"""What fits a slice: meshes, micro-batches, slots and rematerialization, the quickest first."""

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from dapo_jax.config import presets, schema, validation
from dapo_jax.model import qwen2
from dapo_jax.plan import footprint, step
from dapo_jax.plan.constants import VALUES
from dapo_jax.plan.footprint import mistakes
from dapo_jax.plan.roofline import Scene
from dapo_jax.plan.simulate import Traffic
from dapo_jax.pods.slices import Pod

NEAR = 1.5  # choices slower than this factor of the quickest, roughly, are dropped
SIMULATED = 4  # samplers (slots and shards) whose schedule is simulated


class Choice(NamedTuple):
    mesh: dict[str, int]
    micro_rows: int
    slots: int
    prefill_prompts: int
    cache_fraction: float
    peak: float  # bytes per device
    step: float  # expected seconds
    fields: dict[str, str]  # others that differ from the config's own

    def flags(self) -> str:
        """Returns this choice as the flags of a command line."""
        fields = {f"mesh.{axis}": n for axis, n in self.mesh.items()}
        fields["optim.micro_batch_rows"] = self.micro_rows
        for name in ("slots", "prefill_prompts", "cache_fraction"):
            fields[f"rollout.{name}"] = getattr(self, name)
        fields |= self.fields
        return " ".join(f"--config.{name}={value}" for name, value in fields.items())


def changed(config, settings: dict[str, Any]):
    """A copy of the config with {field: value} replaced."""
    out = copy.deepcopy(config)
    out.update(settings)
    return out


def layouts(config, shape: qwen2.Shape, pod: Pod) -> Iterator:
    """Copies of the config on other meshes, with the rules that `presets.lay_out` makes for each,
    or with the config's own where they are none of these."""
    known = copy.deepcopy(config)
    presets.lay_out(known, 2, 1, 1 if config.sharding.train.embed == "fsdp" else 2)
    free = known.sharding == config.sharding
    widths = range(1, min(shape.num_kv_heads, pod.devices) + 1)
    for tensor, together in itertools.product(widths, (1, 2, 4, 8)):
        shards = pod.devices // tensor
        if shape.num_kv_heads % (tensor * together) or pod.devices % (tensor * together):
            continue
        for data in sorted({1, 2, 4, 8, pod.slices}) if together == 1 else [shards // together]:
            t = copy.deepcopy(config)
            if free:
                presets.lay_out(t, shards, tensor, together * tensor)
            t.mesh.update({"data": data, "fsdp": shards // data, "tensor": tensor})
            # Weights that training splits over `data` too would be gathered between slices.
            if shards % data == 0 and (together == 1 or (free and pod.slices == 1)):
                yield t


def fitting(config, shape: qwen2.Shape, pod: Pod, traffic: Traffic, room: float) -> Iterator:
    """Yields (Choice without its seconds, config) for what fits with `room`, a share of the memory,
    to spare. Of the ways to rematerialize only the first that fits, which computes least again; the
    cache is as large as it can be."""
    ways = "dots_attention", "attention", "full"
    old, limit = schema.leaves(config), (1 - room) * pod.chip.hbm
    length = traffic.prompt + traffic.response
    for laid, rows in itertools.product(layouts(config, shape, pod), (1, 2, 4)):
        sizes, shards = laid.mesh.to_dict(), laid.mesh.data * laid.mesh.fsdp
        micro, prompts = rows * shards, -(-config.rollout.prefill_prompts // shards) * shards
        settings = {"optim.micro_batch_rows": micro, "rollout.prefill_prompts": prompts}
        settings |= {"rollout.slots": shards, "rollout.cache_fraction": 1.0}
        for remat in ways if shape.remat in ways else (shape.remat,):
            net, fits = shape._replace(remat=remat), []
            t = changed(laid, settings | {"model.remat": remat})
            given = t, net, traffic, limit, pod.platform
            for slots, fraction in () if mistakes(t, net, pod) else _samplers(*given):
                u = changed(t, {"rollout.slots": slots, "rollout.cache_fraction": fraction})
                peak = max(footprint.peaks(footprint.memory(u, net, sizes, pod.platform)).values())
                held = footprint.waves(u, net, sizes, length, pod.platform)["sequences"]
                if peak <= limit and held and slots % shards == 0 and not mistakes(u, net, pod):
                    now = ((k, v) for k, v in schema.leaves(u).items() if v != old[k])
                    other = {k: v for k, v in now if k.startswith(("sharding.", "model.remat"))}
                    chosen = sizes, micro, slots, prompts, fraction, peak, math.inf, other
                    fits.append((Choice(*chosen), u))
            yield from fits
            if fits:
                break


def _samplers(t, net: qwen2.Shape, traffic: Traffic, limit: float, platform: str) -> Iterator:
    """Yields (slots, cache_fraction) to try on the mesh of `t`, a config with a slot for each part
    of the batch. limit: bytes per device."""
    sizes, mean = t.mesh.to_dict(), traffic.prompt + traffic.response
    geometry = footprint.cache(t, net, sizes, platform)
    shards, row = geometry.shards, geometry.row_pages * geometry.page_tokens

    def pool(slots: int) -> float:
        """Tokens of cache that a shard has room for, beside all else that so many slots need."""
        wide = changed(t, {"rollout.slots": slots * shards})
        table = footprint.memory(wide, net, sizes, platform)
        held = table["sampling"].pop("cache") / slots  # by a row of a shard
        peaks = footprint.peaks(table)
        return (limit - peaks["sampling"]) / held * row if peaks["updating"] <= limit else 0.0

    if (free := pool(1)) < row:
        return
    wanted = -(-t.rollout.groups * t.rollout.group_size // shards)
    most = min(2 ** int(math.log2(max(free / mean, 1))), wanted)
    for slots in sorted({most, max(most // 2, 1), max(most // 4, 1)}):
        fraction = min(math.floor(pool(slots) / slots / row * 1000) / 1000, 1.0)
        if fraction > 0:
            yield slots * shards, fraction


def search(config, shape: qwen2.Shape, pod: Pod, traffic: Traffic, room: float) -> list[Choice]:
    """What is `fitting`, the shortest expected step first. The schedule is simulated only for those
    that are not far behind without one, with fewer visits of the host."""
    timed = []
    for x, t in fitting(config, shape, pod, traffic, room):
        s = Scene(t, shape._replace(remat=t.model.remat), x.mesh, pod)
        timed.append((step.rough(t, traffic, s, VALUES), x, t, s))
    timed.sort(key=lambda x: x[0])
    found, rollouts = [], {}
    for rough, x, t, s in timed:
        key = s.sizes.shards, s.sizes.slots
        if (key not in rollouts and len(rollouts) == SIMULATED) or rough > NEAR * timed[0][0]:
            continue
        sizes = step.quickly(t, s.sizes)
        if key not in rollouts or rollouts[key].pages > sizes.pages:  # pages not in use are free
            rollouts[key] = step.simulated(t, traffic, sizes)
        work = step.work(t, traffic, s, tests=False, rollouts=rollouts[key])
        found.append(x._replace(step=step.timer(t, work, s)(VALUES).seconds))

    def rank(x: Choice):
        """Within 2% of each other: micro-batches that keep a device busy, then smaller ones."""
        tokens = x.micro_rows * validation.row_tokens(config) // (x.mesh["data"] * x.mesh["fsdp"])
        return round(math.log(x.step) / 0.02), -min(tokens, 16384), x.micro_rows, x.mesh["data"]

    return sorted(found, key=rank)
