"""What the configs of real runs share; each file in configs/ adds its docstring and differences."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

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


# ------------------------------------------------------------------------------------------------
# The ladder
# ------------------------------------------------------------------------------------------------

# The paper's techniques in the order of its Table 1 -> the fields of full DAPO that change when the
# technique is taken away.
WITHOUT: dict[str, Callable[[ml_collections.ConfigDict], dict[str, Any]]] = {
    "overlong_filtering": lambda c: {"loss.overlong_filter": "off"},
    "clip_higher": lambda c: {"loss.clip_high": c.loss.clip_low},
    "soft_overlong": lambda c: {"reward.overlong_penalty": 0.0},
    "token_loss": lambda c: {"loss.normalizer": "sequence"},
    "dynamic_sampling": lambda c: {"sampling.dynamic": False, "sampling.surplus": "drop"},
}
# Table 1, and then all of it with one technique taken away; '-dynamic_sampling' is '+token_loss'.
CUMULATIVE = ("grpo", *(f"+{name}" for name in WITHOUT))
LEAVE_ONE_OUT = tuple(f"-{name}" for name in WITHOUT)
RUNGS = (*CUMULATIVE, *LEAVE_ONE_OUT[:-1])


def rung(c: ml_collections.ConfigDict, name: str) -> ml_collections.ConfigDict:
    """`c`, which is full DAPO, as the rung `name` of `CUMULATIVE` or `LEAVE_ONE_OUT`.

    A rung with overlong filtering takes truncated responses out of the loss and leaves them in the
    statistics of their group (loss.overlong_filter 'loss'), unless `c` itself says 'group': the
    paper "masks the loss of truncated samples", and says nothing of the group's mean and std.
    Raises ValueError for another name, and where `c` lacks a technique of its own.
    """
    if name not in CUMULATIVE + LEAVE_ONE_OUT:
        known = ", ".join(CUMULATIVE + LEAVE_ONE_OUT)
        raise ValueError(f"the ladder has no rung {name!r}; there are {known}")
    c = copy.deepcopy(c)
    if c.loss.overlong_filter == "off":
        c.loss.overlong_filter = "loss"
    flat = config.leaves(c)
    for technique, fields in WITHOUT.items():
        if all(flat[field] == value for field, value in fields(c).items()):
            raise ValueError(
                f"the ladder starts from full DAPO, and this config is without {technique}"
            )
    techniques = list(WITHOUT)
    taken = techniques[CUMULATIVE.index(name) :] if name in CUMULATIVE else [name[1:]]
    for technique in taken:
        c.update_from_flattened_dict(WITHOUT[technique](c))
    return c


def ladder_task() -> ml_collections.ConfigDict:
    """Full DAPO on the embedded task, as configs/ladder.py compares its rungs.

    Against the quickstart: a little less warm-up, so that there is more to learn; a higher learning
    rate, at which noise costs accuracy; and responses of at most 20 tokens, of which the longest
    right answers need 17, so that there is truncation to filter and to punish.
    """
    c = config.base()
    c.steps = 90
    c.warmup.skill_steps, c.warmup.habit_steps = 800, 160
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 20, 3
    c.optim.lr = 5e-4
    c.eval.every, c.eval.top_p = 15, 1.0  # T=1, top-p 1 only
    c.checkpoint.every = 30
    return c
