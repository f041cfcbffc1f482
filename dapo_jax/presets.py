"""Presets: config functions, each a difference from the one before it; configs/ adds files.

base (schema.py) -> paper -> verl, grpo; `dapo_math(size)` lays `paper` over a slice of TPUs; `rung`
takes the paper's techniques away one by one.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections

from dapo_jax import schema
from dapo_jax.schema import base


def paper() -> ml_collections.ConfigDict:
    """The paper's section 4.1: 512 x 16 responses of 20,480 tokens, 16 updates, AdamW 1e-6.

    Not stated there and taken from verl: Adam's betas, gradient clip 1.0. Overlong filtering is
    off, as in the authors' best run.
    """
    c = base()
    c.data.max_prompt_tokens = 2048
    c.data.on_long = "left_truncate"
    c.data.on_bad = "skip"  # DAPO-Math-17k has five float-damaged answers
    c.rollout.groups, c.rollout.group_size = 512, 16
    c.rollout.max_response_tokens = 20480
    c.rollout.slots, c.rollout.chunk, c.rollout.prefill_prompts = 1024, 128, 64
    c.reward.overlong_buffer_tokens = 4096
    c.optim.lr, c.optim.warmup_steps, c.optim.minibatches = 1e-6, 20, 16
    c.optim.b2 = 0.999
    c.eval.k, c.eval.every, c.eval.max_problems = 32, 5, 0
    c.checkpoint.every = 5
    c.tokenizer.chat = True
    c.model.dtype = "bfloat16"
    c.model.scan_layers, c.model.remat = True, "full"
    return c


def verl(c: ml_collections.ConfigDict | None = None) -> ml_collections.ConfigDict:
    """What verl's released script does where it differs from the paper: warm-up over 10 rollout
    steps with the first at lr 0, decay 0.1, dual clip 10, and a mean over chunks of 32 responses
    (the size its data-parallel ranks saw) of token means."""
    c = paper() if c is None else c
    c.optim.warmup_steps, c.optim.warmup_from_zero = 10, True
    c.optim.weight_decay = 0.1
    c.loss.dual_clip = 10.0
    c.loss.normalizer = "chunk_tokens"
    return c


def grpo(c: ml_collections.ConfigDict | None = None) -> ml_collections.ConfigDict:
    """Naive GRPO, the paper's starting point: symmetric clip, sample-level mean, every group
    trained on, no length shaping. (Set loss.kl_coef for GRPO with its KL term.)"""
    c = base() if c is None else c
    c.loss.clip_high = c.loss.clip_low
    c.loss.normalizer = "sequence"
    c.loss.overlong_filter = "off"
    c.reward.overlong_penalty = 0.0
    c.dynamic_sampling.enabled = False
    return c


# ------------------------------------------------------------------------------------------------
# Qwen2.5 on TPU slices
# ------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A slice for a size of Qwen2.5, and how its mesh is cut: by `python -m dapo_jax.plan`."""

    pod: str  # Cloud's name
    tensor: int  # at most the key/value heads
    shards: int  # chips / tensor
    slots: int
    cache_fraction: float  # of the cache in which all slots could grow to the longest sequence
    decode_tensor: int = 0  # chips that decode a row together, where not `tensor`
    remat: str = "full"


# With the paper's lengths; the smaller ones are the smallest slices that decode a batch in tens of
# waves and not in hundreds.
PLACES = {
    "0.5B": Slice("v6e-8", 2, 4, 1024, 0.25),
    "1.5B": Slice("v6e-16", 2, 8, 1024, 0.5),
    "7B": Slice("v6e-64", 4, 16, 2048, 0.5),
    "32B": Slice("v5p-256", 4, 32, 2048, 0.5, decode_tensor=8, remat="attention"),
}


def dapo_math(size: str) -> ml_collections.ConfigDict:
    """The paper's section 4.1 on Qwen2.5 (base) of `size`, laid over its slice of `PLACES`: trained
    on DAPO-Math-17k, evaluated on AIME 2024. For another slice ask the planner and override
    what it prints."""
    c = paper()
    c.model.path = f"Qwen/Qwen2.5-{size}"
    c.data.train = "dapo-math-17k.parquet"
    c.eval.files = "aime24=aime-2024.parquet"
    c.steps = 320  # 5,120 updates
    return place(c, PLACES[size])


def place(c: ml_collections.ConfigDict, where: Slice) -> ml_collections.ConfigDict:
    """`c` with the mesh of `where`, one row per device and pass, and its slots and cache."""
    lay_out(c, where.shards, where.tensor, where.decode_tensor or where.tensor)
    c.optim.micro_batch_rows = where.shards
    c.model.remat = where.remat
    c.rollout.slots, c.rollout.cache_fraction = where.slots, where.cache_fraction
    c.rollout.prefill_prompts = (
        4 * where.shards * where.tensor // (where.decode_tensor or where.tensor)
    )
    return c


_SPLIT = ("vocab", "mlp", "heads", "kv_heads")  # what `tensor` splits


def lay_out(c: ml_collections.ConfigDict, shards: int, tensor: int, decode_tensor: int) -> None:
    """Mesh and rules for weights that training splits over `shards` x `tensor` devices and decoding
    over `decode_tensor`, a multiple of `tensor`.

    Decoding reads all weights for each token, and is the quicker the more devices share them.
    Training gathers the residual stream over `tensor`, and waits the less the fewer they are. Where
    the two differ, `fsdp` is the part of the shards that decode together.
    """
    joined = decode_tensor // tensor
    c.mesh.tensor = tensor
    c.mesh.data, c.mesh.fsdp = (1, shards) if joined == 1 else (shards // joined, joined)
    c.sharding.train.embed = "fsdp" if joined == 1 else "data,fsdp"
    c.sharding.decode.batch = "data,fsdp" if joined == 1 else "data"
    for axis in _SPLIT:
        c.sharding.decode[axis] = "tensor" if joined == 1 else "fsdp,tensor"


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
    "dynamic_sampling": lambda c: {
        "dynamic_sampling.enabled": False,
        "dynamic_sampling.surplus": "drop",
    },
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
    flat = schema.leaves(c)
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
    c = base()
    c.steps = 90
    c.supervised_warmup.skill_steps, c.supervised_warmup.habit_steps = 800, 160
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = 20, 3
    c.optim.lr = 5e-4
    c.eval.every, c.eval.top_p = 15, 1.0  # T=1, top-p 1 only
    c.checkpoint.every = 30
    return c
