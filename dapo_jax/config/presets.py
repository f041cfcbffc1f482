"""Presets: config functions, each a difference from the one before it; configs/ adds files.

base (schema.py) -> paper -> verl, vapo, grpo and the RECIPES of others; `dapo_math(size)` lays
`paper` over a slice of TPUs; `rung` takes the paper's techniques away one by one.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dapo_jax.config import schema
from dapo_jax.config.schema import Config, base


def paper() -> Config:
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
    c.checkpoint.every = 1  # a step takes minutes, and a save runs beside the next one
    c.tokenizer.chat = True
    c.model.dtype = "bfloat16"
    c.model.scan_layers, c.model.remat = True, "full"
    return c


def verl(c: Config | None = None) -> Config:
    """What verl's released script does where it differs from the paper: warm-up over 10 rollout
    steps with the first at lr 0, decay 0.1, dual clip 10, and a mean over chunks of 32 responses
    (the size its data-parallel ranks saw) of token means."""
    c = paper() if c is None else c
    c.optim.warmup_steps, c.optim.warmup_from_zero = 10, True
    c.optim.weight_decay = 0.1
    c.loss.dual_clip = 10.0
    c.loss.normalizer = "chunk_tokens"
    return c


def grpo(c: Config | None = None) -> Config:
    """Naive GRPO, the paper's starting point: symmetric clip, sample-level mean, every group
    trained on, no length shaping. (Set loss.kl_coef for GRPO with its KL term.)

    Measured: 0.898 +- 0.021 at 275 updates, 0.934 +- 0.020 at 0.19 M tokens.
    """
    c = base() if c is None else c
    c.loss.clip_high = c.loss.clip_low
    c.loss.normalizer = "sequence"
    c.loss.overlong_filter = "off"
    c.reward.overlong_penalty = 0.0
    c.dynamic_sampling.enabled = False
    return c


def vapo(c: Config | None = None) -> Config:
    """VAPO (arXiv 2504.05118, section 5.1): PPO with a value model, 16 updates of 512 responses a
    rollout, Clip-Higher and the token mean. What the paper leaves open: docs/vapo.md."""
    c = paper() if c is None else c
    c.critic.enabled = True  # 50 steps for it alone, lr 2e-6, lambda 1 and 1 - 1 / (.05 l)
    c.loss.positive_coef = 0.1
    c.dynamic_sampling.enabled = False  # an all-right group still has A = R - V
    c.reward.overlong_penalty = 0.0
    return c


# ------------------------------------------------------------------------------------------------
# The field's recipes: each changes the algorithm of `c`; without `c`, of the paper's config, and
# gives it the sizes and rates of its source. configs/quickstart.py:NAME runs one on a laptop.
# "Measured" is held-out accuracy on that quickstart, five seeds (benchmarks/arms.py), at rates
# that were chosen for DAPO, which has 0.924 +- 0.020 and 0.914 +- 0.024 there.
# ------------------------------------------------------------------------------------------------


def dr_grpo(c: Config | None = None) -> Config:
    """Dr. GRPO (arXiv 2503.20783): naive GRPO without its two divisions, by the group's std and by
    the response's length: A = r - mean, token losses summed and divided by L_max.

    Measured: 0.910 +- 0.021 at 275 updates, 0.939 +- 0.016 at 0.19 M tokens.
    """
    c = grpo(paper() if c is None else c)
    c.advantage.scale = "none"
    c.loss.normalizer = "constant"
    return c


def gspo(c: Config | None = None) -> Config:
    """GSPO (arXiv 2507.18071, section 5.1): naive GRPO whose clipped ratio is the geometric mean of
    the response's, within 3e-4 and 4e-4 of 1; four updates per rollout.

    Measured: 0.778 +- 0.077 at 275 updates, 0.900 +- 0.025 at 0.19 M tokens.
    """
    if c is None:
        c = paper()
        c.optim.minibatches = 4
    c = grpo(c)
    c.loss.objective = "gspo"
    c.loss.clip_low, c.loss.clip_high = 3e-4, 4e-4
    return c


def cispo(c: Config | None = None) -> Config:
    """DAPO with CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4-5) for PPO's clip: no lower bound, a
    weight of at most 5 (the paper tunes it and gives no number; ScaleRL finds 4, 5 and 8 alike), a
    mean over questions of token means. M1's Adam has eps 1e-15.

    Measured: 0.926 +- 0.023 at 275 updates, 0.916 +- 0.024 at 0.19 M tokens.
    """
    if c is None:
        c = paper()
        c.optim.b2, c.optim.eps = 0.95, 1e-15
    c.loss.objective = "cispo"
    c.loss.clip_low, c.loss.clip_high = 1.0, 4.0
    c.loss.normalizer = "group_tokens"
    return c


def rloo(c: Config | None = None) -> Config:
    """RLOO (arXiv 2402.14740): the response is one action, its baseline the mean reward of the
    group's others, no std. Several updates per rollout clip the product of the ratios, as TRL's
    trainer does; the paper's KL term is in the reward and left out here.

    Measured: 0.905 +- 0.017 at 275 updates, 0.937 +- 0.015 at 0.19 M tokens.
    """
    if c is None:
        c = paper()
        c.rollout.group_size, c.optim.minibatches = 4, 1
    c = grpo(c)
    c.loss.objective = "rloo"
    c.advantage.scale, c.advantage.leave_one_out = "none", True
    return c


def scale_rl(c: Config | None = None) -> Config:
    """ScaleRL (arXiv 2510.13786, section 3): CISPO on the sampler's log-probs, a mean over
    questions, gaps divided by the batch's std, questions without a gap dropped and not replaced, a
    float32 head, no length penalty.

    Its generators lag the trainer by up to 8 updates of 48 x 16; here 8 such updates follow one
    rollout. Problems of pass rate .9 are not drawn again (No-Positive-Resampling). Not here: the
    phrase that ends long thinking.

    Measured: 0.936 +- 0.016 at 275 updates, 0.941 +- 0.016 at 0.19 M tokens.
    """
    if c is None:
        c = paper()
        c.rollout.groups, c.rollout.max_response_tokens = 8 * 48, 14336
        c.optim.lr, c.optim.warmup_steps, c.optim.minibatches = 5e-7, 100, 8
        c.optim.weight_decay, c.optim.eps = 0.01, 1e-15
    c = cispo(c)
    c.loss.old_logprobs = "reuse"
    c.advantage.scale, c.advantage.ddof = "batch", 0
    c.dynamic_sampling.refill = False
    c.curriculum.pass_rate_cap = 0.9
    c.reward.overlong_penalty = 0.0
    c.model.float32_head = True
    return c


def just_rl(c: Config | None = None) -> Config:
    """JustRL (arXiv 2512.16649, run_scaling_ssh_distill.sh): GRPO with Clip-Higher, dual clip 10
    and a token mean, nothing filtered, nothing punished, nothing changed in mid-run.

    Its verifier reads \\boxed{} answers, here the 'integer' one; its token mean was one per
    micro-batch of 32,768 tokens, here of the mini-batch.

    Measured: 0.900 +- 0.019 at 275 updates, 0.927 +- 0.013 at 0.19 M tokens.
    """
    if c is None:
        c = paper()
        c.data.max_prompt_tokens, c.rollout.max_response_tokens = 1024, 15360
        c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 256, 8, 4
        c.optim.warmup_steps, c.optim.weight_decay = 10, 0.1
        c.reward.verifier = "integer"
        c.eval.temperature, c.eval.top_p, c.eval.every = 0.7, 0.9, 50
        c.eval.max_response_tokens = 31744
    c.dynamic_sampling.enabled = False
    c.reward.overlong_penalty = 0.0
    c.loss.dual_clip = 10.0
    return c


def gsm8k_dapo(c: Config | None = None) -> Config:
    """AReaL's examples/math/gsm8k_dapo_dynamic_bs.yaml, knob by knob in
    configs/gsm8k_dapo_qwen2_5_1_5b.py: groups without a gap dropped and not replaced, advantages
    normalised a second time over the batch, tokens of importance weight beyond 5 zeroed.

    Measured: 0.931 +- 0.015 at 275 updates, 0.939 +- 0.016 at 0.19 M tokens.
    """
    if c is None:
        c = paper()
        c.data.max_prompt_tokens, c.rollout.max_response_tokens = 1024, 4096
        c.rollout.groups, c.rollout.group_size, c.optim.minibatches = 256, 4, 1
        c.reward.overlong_buffer_tokens = 512
        c.optim.lr, c.optim.warmup_steps, c.optim.weight_decay = 1.7e-5, 0, 0.017
    c.reward.correct, c.reward.wrong = 1.0, 0.0
    c.advantage.epsilon, c.advantage.whiten = 1e-5, True
    c.loss.importance, c.loss.importance_cap = "token_mask", 5.0
    c.dynamic_sampling.refill = False
    return c


RECIPES: dict[str, Callable[..., Config]] = {
    f.__name__: f for f in (grpo, dr_grpo, gspo, cispo, rloo, scale_rl, just_rl, gsm8k_dapo)
}


# ------------------------------------------------------------------------------------------------
# Qwen on TPU slices
# ------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A slice for a model, and how its mesh is cut: by `python -m dapo_jax.plan`."""

    pod: str  # Cloud's name
    tensor: int  # at most the key/value heads
    shards: int  # chips / tensor
    slots: int
    cache_fraction: float  # of the cache in which all slots could grow to the longest sequence
    decode_tensor: int = 0  # chips that decode a row together, where not `tensor`
    remat: str = "full"


class Place(NamedTuple):
    model: str  # hub name
    slice: Slice
    context: int = 32_768  # tokens that the model was trained on, or more


# With the paper's lengths, or what the context leaves of them; the smaller slices are the smallest
# that decode a batch in tens of waves and not in hundreds. Keys and values decide: of Qwen3 each
# size has 8 heads of 128, of Qwen2.5 the small ones have 2.
PLACES = {
    "0.5B": Place("Qwen/Qwen2.5-0.5B", Slice("v6e-8", 2, 4, 1024, 0.25)),
    "1.5B": Place("Qwen/Qwen2.5-1.5B", Slice("v6e-16", 2, 8, 1024, 0.5)),
    "3B": Place("Qwen/Qwen2.5-3B", Slice("v6e-32", 2, 16, 2048, 0.3, 2, "attention")),
    "7B": Place("Qwen/Qwen2.5-7B", Slice("v6e-64", 4, 16, 2048, 0.5)),
    "14B": Place("Qwen/Qwen2.5-14B", Slice("v5p-128", 4, 16, 2048, 0.5, 4, "attention")),
    "32B": Place("Qwen/Qwen2.5-32B", Slice("v5p-256", 4, 32, 4096, 0.25, 8, "attention")),
    "72B": Place("Qwen/Qwen2.5-72B", Slice("v5p-512", 4, 64, 8192, 0.25, 8, "attention")),
    "Math-1.5B": Place(
        "Qwen/Qwen2.5-Math-1.5B", Slice("v6e-8", 1, 8, 4096, 0.25, 1, "attention"), 4096
    ),
    "Math-7B": Place(
        "Qwen/Qwen2.5-Math-7B", Slice("v6e-16", 1, 16, 2048, 0.4, 4, "attention"), 4096
    ),
    "Qwen3-0.6B": Place("Qwen/Qwen3-0.6B-Base", Slice("v6e-32", 1, 32, 1024, 0.25, 1, "attention")),
    "Qwen3-1.7B": Place("Qwen/Qwen3-1.7B-Base", Slice("v6e-32", 2, 16, 1024, 0.25, 2, "attention")),
    "Qwen3-4B": Place("Qwen/Qwen3-4B-Base", Slice("v6e-64", 2, 32, 1024, 0.3, 8, "attention")),
    "Qwen3-8B": Place("Qwen/Qwen3-8B-Base", Slice("v6e-128", 2, 64, 2048, 0.25, 8, "attention")),
    "Qwen3-14B": Place("Qwen/Qwen3-14B-Base", Slice("v5p-128", 4, 16, 4096, 0.3, 4, "attention")),
    "Qwen3-32B": Place("Qwen/Qwen3-32B", Slice("v5p-256", 4, 32, 4096, 0.25, 8, "attention")),
}
PLACES |= {
    f"R1-{size}": Place(f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}", PLACES[size].slice)
    for size in ("1.5B", "7B", "14B", "32B")
}


def dapo_math(argument: str) -> Config:
    """The paper's section 4.1 on a model of `PLACES`, laid over its slice: trained on
    DAPO-Math-17k, evaluated on AIME 2024. "7B,verl" is `verl`'s reading of it. Responses are as
    long as the model's context allows, at most the paper's, and their last fifth is the overlong
    buffer. For another slice ask the planner and override what it prints. ValueError: no such
    model, or reading."""
    size, _, reading = argument.partition(",")
    if size not in PLACES:
        raise ValueError(f"no size {size!r} of Qwen; there are {', '.join(PLACES)}")
    if reading not in ("", "verl"):
        raise ValueError(f"no reading {reading!r}; there is SIZE (the paper's) and SIZE,verl")
    model, where, context = PLACES[size]
    c = verl() if reading else paper()
    c.model.path = model
    c.data.train = "dapo-math-17k.parquet"
    c.eval.files = "aime24=aime-2024.parquet"
    response = min(c.rollout.max_response_tokens, context - c.data.max_prompt_tokens)
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = response, response // 5
    c.steps = 320  # 5,120 updates
    return place(c, where)


def place(c: Config, where: Slice) -> Config:
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


def lay_out(c: Config, shards: int, tensor: int, decode_tensor: int) -> None:
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
        setattr(c.sharding.decode, axis, "tensor" if joined == 1 else "fsdp,tensor")


def one_chip() -> Config:
    """Qwen2.5-0.5B on GSM8K, all its weights trained, on one chip of 16 GB (configs/one_chip.py):
    the paper's algorithm at 16 x 8 responses of at most 512 tokens. The model writes its answers in
    \\boxed{} unasked, so the prompt asks for that."""
    c = paper()
    c.model.path = "Qwen/Qwen2.5-0.5B"
    c.data.train = "openai/gsm8k:main/train-*"
    c.eval.files = "gsm8k=openai/gsm8k:main/test-*"
    c.data.template, c.reward.verifier = "boxed", "boxed"
    c.data.max_prompt_tokens, c.data.on_long = 256, "filter"
    c.rollout.groups, c.rollout.group_size, c.rollout.max_response_tokens = 16, 8, 512
    c.rollout.slots, c.rollout.chunk, c.rollout.prefill_prompts = 128, 64, 16
    c.model.head_chunk = 256  # logits of 256 tokens at a time: 156 MB
    c.reward.overlong_buffer_tokens = 128
    c.optim.minibatches, c.optim.micro_batch_rows, c.optim.warmup_steps = 4, 2, 5
    c.steps = 100
    c.eval.every, c.eval.k, c.eval.max_problems, c.eval.top_p = 20, 1, 256, 1.0
    c.checkpoint.every, c.checkpoint.keep = 10, 1
    return c


# ------------------------------------------------------------------------------------------------
# The ladder
# ------------------------------------------------------------------------------------------------

# The paper's techniques in the order of its Table 1 -> the fields of full DAPO that change when the
# technique is taken away.
WITHOUT: dict[str, Callable[[Config], dict[str, Any]]] = {
    "overlong_filtering": lambda c: {"loss.overlong_filter": "off"},
    "clip_higher": lambda c: {"loss.clip_high": c.loss.clip_low},
    "soft_overlong": lambda c: {"reward.overlong_penalty": 0.0},
    "token_loss": lambda c: {"loss.normalizer": "sequence"},
    "dynamic_sampling": lambda c: {
        "dynamic_sampling.enabled": False,
        "dynamic_sampling.surplus": "drop",
    },
}


class Ladder(NamedTuple):
    """A paper's techniques, one on the other and each left out."""

    full: str  # what has all of them, in words
    bare: str  # name of the rung without any
    without: Mapping[str, Callable[[Config], dict[str, Any]]]
    paper: Mapping[str, int]  # rung -> AIME 2024, avg@32, of Qwen2.5-32B

    @property
    def cumulative(self) -> tuple[str, ...]:
        return self.bare, *(f"+{name}" for name in self.without)

    @property
    def leave_one_out(self) -> tuple[str, ...]:
        return tuple(f"-{name}" for name in self.without)

    @property
    def rungs(self) -> tuple[str, ...]:
        """All of them, once: the last one left out is the last but one of the cumulative."""
        return *self.cumulative, *self.leave_one_out[:-1]


# Table 1 of each paper; VAPO's (arXiv 2504.05118) adds nothing one by one. Without decoupled GAE
# the value model's targets have the policy's fixed lambda; without group sampling there are as many
# responses, each to a problem of its own.
LADDERS = {
    "dapo": Ladder(
        "full DAPO",
        "grpo",
        WITHOUT,
        {
            "grpo": 30, "+overlong_filtering": 36, "+clip_higher": 38, "+soft_overlong": 41,
            "+token_loss": 42, "+dynamic_sampling": 50,
        },
    ),
    "vapo": Ladder(
        "VAPO",
        "ppo",
        {
            "value_pretraining": lambda c: {  # there is none without a value model
                "critic.pretrain_steps": 0 if c.critic.enabled else c.critic.pretrain_steps
            },
            "decoupled_gae": lambda c: {"critic.lambda_value": c.critic.lambda_policy},
            "length_adaptive_gae": lambda c: {"critic.length_alpha": 0.0},
            "clip_higher": WITHOUT["clip_higher"],
            "token_loss": WITHOUT["token_loss"],
            "positive_lm": lambda c: {"loss.positive_coef": 0.0},
            "group_sampling": lambda c: {
                "rollout.groups": c.rollout.groups * c.rollout.group_size,
                "rollout.group_size": 1,
            },
        },
        {
            "ppo": 5, "-value_pretraining": 11, "-decoupled_gae": 33, "-length_adaptive_gae": 45,
            "-clip_higher": 46, "-token_loss": 53, "-positive_lm": 54, "+positive_lm": 55,
            "+group_sampling": 60,
        },
    ),
}  # fmt: skip
# DAPO's Table 1, and then all of it with one technique taken away; '-dynamic_sampling' is
# '+token_loss'.
CUMULATIVE, LEAVE_ONE_OUT = LADDERS["dapo"].cumulative, LADDERS["dapo"].leave_one_out
RUNGS = LADDERS["dapo"].rungs


def rung(c: Config, name: str, ladder: Ladder = LADDERS["dapo"]) -> Config:
    """`c`, which is full DAPO, or all that `ladder` is of, as the rung `name` of it.

    A rung with overlong filtering takes truncated responses out of the loss and leaves them in the
    statistics of their group (loss.overlong_filter 'loss'), unless `c` itself says 'group': the
    paper "masks the loss of truncated samples", and says nothing of the group's mean and std.
    Raises ValueError for another name, and where `c` lacks a technique of its own.
    """
    if name not in ladder.cumulative + ladder.leave_one_out:
        known = ", ".join(ladder.cumulative + ladder.leave_one_out)
        raise ValueError(f"the ladder has no rung {name!r}; there are {known}")
    c = copy.deepcopy(c)
    if "overlong_filtering" in ladder.without and c.loss.overlong_filter == "off":
        c.loss.overlong_filter = "loss"
    flat = schema.leaves(c)
    for technique, fields in ladder.without.items():
        if all(flat[field] == value for field, value in fields(c).items()):
            raise ValueError(
                f"the ladder starts from {ladder.full}, and this config is without {technique}"
            )
    techniques, up_to = list(ladder.without), ladder.cumulative
    taken = techniques[up_to.index(name) :] if name in up_to else [name[1:]]
    for technique in taken:
        c.update(ladder.without[technique](c))
    return c


def ladder_task() -> Config:
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


def vapo_ladder_task() -> Config:
    """VAPO on the task of `ladder_task`, whose responses have about 12 tokens.

    Fewer steps and a lower rate for the policy than there, so that it still learns when rungs are
    compared. The lambda that the length does not decide is .5, a trace of 2 tokens: the paper's .95
    is one of 20 tokens, little of its responses and more than any of these, so that neither target
    nor length would change much.
    """
    c = vapo(ladder_task())
    c.critic.pretrain_steps, c.critic.lr = 20, 1e-3
    c.critic.lambda_policy, c.critic.length_alpha = 0.5, 1.5
    c.steps, c.optim.lr = 30 + c.critic.pretrain_steps, 2e-4
    c.eval.every, c.checkpoint.every = 10, 25
    return c
