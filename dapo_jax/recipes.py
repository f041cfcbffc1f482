"""What the configs of real runs share; each file in configs/ adds its docstring and differences."""

from typing import NamedTuple

import ml_collections

from dapo_jax import config


class Place(NamedTuple):
    """A slice for a size of Qwen2.5, and how its mesh is cut: by `python -m dapo_jax.plan`."""

    pod: str  # Cloud's name
    tensor: int  # at most the key/value heads
    shards: int  # fsdp: chips / tensor
    slots: int
    cache_fraction: float  # of the cache in which all slots could grow to the longest sequence


# With the paper's lengths; the smaller ones are the smallest slices that decode a batch in tens of
# waves and not in hundreds.
PLACES = {
    "0.5B": Place("v6e-8", 2, 4, 1024, 0.25),
    "1.5B": Place("v6e-16", 2, 8, 1024, 0.5),
    "7B": Place("v6e-64", 4, 16, 2048, 0.5),
    "32B": Place("v5p-256", 8, 16, 2048, 0.5),
}


def dapo_math(size: str) -> ml_collections.ConfigDict:
    """The paper's section 4.1 on Qwen2.5 (base) of `size`, laid over its slice of `PLACES`: trained
    on DAPO-Math-17k, evaluated on AIME 2024. For another slice ask the planner and override
    what it prints."""
    c = config.paper()
    c.model.path = f"Qwen/Qwen2.5-{size}"
    c.data.train = "dapo-math-17k.parquet"
    c.eval.files = "aime24=aime-2024.parquet"
    c.steps = 320  # 5,120 updates
    return place(c, PLACES[size])


def place(c: ml_collections.ConfigDict, where: Place) -> ml_collections.ConfigDict:
    """`c` with the mesh of `where`, one row a device and pass, and its slots and cache."""
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 1, where.shards, where.tensor
    c.optim.micro_rows = where.shards
    c.rollout.slots, c.rollout.cache_fraction = where.slots, where.cache_fraction
    c.rollout.prefill_prompts = 4 * where.shards
    return c
