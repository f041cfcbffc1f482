"""Presets: config functions, each a difference from the one before it; configs/ adds files.

base (schema.py) -> paper -> verl, vapo, grpo (paper.py) and RECIPES of other papers;
`dapo_math(size)` lays `paper` over a TPU slice; `rung` (ladder.py) drops techniques one by one.
"""

# ruff: noqa: F401 - the lab and configs/ find all presets here
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from dapo_jax.config.ladder import LADDERS, Ladder, ladder_task, rung, vapo_ladder_task
from dapo_jax.config.paper import grpo, paper, vapo, verl
from dapo_jax.config.schema import Config

# --- Recipes of other papers ---
# Each changes the algorithm of `c`, by default of the paper's config with the sizes and rates of
# its source. configs/quickstart.py:NAME runs one on a laptop; results: docs/results/learning.md.

RECIPES: dict[str, Callable[..., Config]] = {"grpo": grpo}


def _recipe(sizes: dict[str, Any]) -> Callable:
    """Registers a change of a config as a recipe. sizes: the fields of its source's run."""

    def register(change: Callable[[Config], None]) -> Callable[..., Config]:
        @functools.wraps(change)
        def recipe(c: Config | None = None) -> Config:
            if c is None:
                c = paper()
                c.update(sizes)
            change(c)
            return c

        return RECIPES.setdefault(change.__name__, recipe)

    return register


@_recipe({})
def dr_grpo(c: Config) -> None:
    """Dr. GRPO (arXiv 2503.20783): naive GRPO without its two divisions, by the group's std and by
    the response's length: A = r - mean, token losses summed and divided by L_max."""
    grpo(c)
    c.advantage.scale = "none"
    c.loss.normalizer = "constant"


@_recipe({"optim.minibatches": 4})
def gspo(c: Config) -> None:
    """GSPO (arXiv 2507.18071, section 5.1): naive GRPO whose clipped ratio is the geometric mean of
    the response's, within 3e-4 and 4e-4 of 1; four updates per rollout."""
    grpo(c)
    c.loss.objective = "gspo"
    c.loss.clip_low, c.loss.clip_high = 3e-4, 4e-4


@_recipe({"optim.b2": 0.95, "optim.eps": 1e-15})
def cispo(c: Config) -> None:
    """DAPO with CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4-5) for PPO's clip: no lower bound, a
    weight of at most 5 (the paper tunes it and gives no number; ScaleRL finds 4, 5 and 8 alike), a
    mean over questions of token means. M1's Adam has eps 1e-15."""
    c.loss.objective = "cispo"
    c.loss.clip_low, c.loss.clip_high = 1.0, 4.0
    c.loss.normalizer = "group_tokens"


@_recipe({"rollout.group_size": 4, "optim.minibatches": 1})
def rloo(c: Config) -> None:
    """RLOO (arXiv 2402.14740): the response is one action, its baseline the mean reward of the
    group's others, no std. Several updates per rollout clip the product of the ratios, as TRL's
    trainer does; the paper's KL term is in the reward and left out here."""
    grpo(c)
    c.loss.objective = "rloo"
    c.advantage.scale, c.advantage.leave_one_out = "none", True


@_recipe(
    {
        "rollout": {"groups": 8 * 48, "max_response_tokens": 14336},
        "optim": {"lr": 5e-7, "minibatches": 8, "weight_decay": 0.01, "eps": 1e-15},
        "optim.warmup_steps": 13,  # rollouts of 8 updates: the source has 100 steps of 48 x 16
    }
)
def scale_rl(c: Config) -> None:
    """ScaleRL (arXiv 2510.13786, section 3): CISPO on the sampler's log-probs, a mean over
    questions, gaps divided by the batch's std, questions without a gap dropped and not replaced, a
    float32 head, no length penalty.

    Its generators lag the trainer by up to 8 updates of 48 x 16; here 8 such updates follow one
    rollout. Problems of pass rate .9 are not drawn again (No-Positive-Resampling). Not here: the
    phrase that ends long thinking."""
    cispo(c)
    c.loss.old_logprobs = "reuse"
    c.advantage.scale, c.advantage.ddof = "batch", 0
    c.dynamic_sampling.refill = False
    c.curriculum.pass_rate_cap = 0.9
    c.reward.overlong_penalty = 0.0
    c.model.float32_head = True


@_recipe(
    {
        "data.max_prompt_tokens": 1024,
        "rollout": {"groups": 256, "group_size": 8, "max_response_tokens": 15360},
        "optim": {"minibatches": 4, "warmup_steps": 10, "weight_decay": 0.1},
        "optim.warmup_from_zero": True,  # verl 0.4
        "data.template": "boxed",
        "reward.verifier": "boxed",
        "eval": {"temperature": 0.7, "top_p": 0.9, "every": 50, "max_response_tokens": 31744},
    }
)
def just_rl(c: Config) -> None:
    """JustRL (arXiv 2512.16649, run_scaling_ssh_distill.sh): GRPO with Clip-Higher, dual clip 10
    and a token mean, nothing filtered, nothing punished, nothing changed in mid-run.

    Its verifier reads a \\boxed{} answer in the last 100 characters, here anywhere; its token mean
    was one per micro-batch of 32,768 tokens, here of the mini-batch."""
    c.dynamic_sampling.enabled = False
    c.reward.overlong_penalty = 0.0
    c.loss.dual_clip = 10.0


@_recipe(
    {
        "data.max_prompt_tokens": 1024,
        "rollout": {"groups": 256, "group_size": 4, "max_response_tokens": 4096},
        "reward.overlong_buffer_tokens": 512,
        "optim": {"minibatches": 1, "lr": 1.7e-5, "warmup_steps": 0, "weight_decay": 0.017},
    }
)
def gsm8k_dapo(c: Config) -> None:
    """AReaL's examples/math/gsm8k_dapo_dynamic_bs.yaml, knob by knob in
    configs/gsm8k_dapo_qwen2_5_1_5b.py: groups without a gap dropped and not replaced, advantages
    normalised a second time over the batch, tokens of importance weight beyond 5 zeroed."""
    c.reward.correct, c.reward.wrong = 1.0, 0.0
    c.advantage.epsilon, c.advantage.whiten = 1e-5, True
    c.loss.importance, c.loss.importance_cap = "token_mask", 5.0
    c.dynamic_sampling.refill = False


# --- Qwen on TPU slices ---


class Slice(NamedTuple):
    """A slice for a model, and how its mesh is cut: columns of places.txt."""

    pod: str
    tensor: int
    shards: int
    slots: int
    cache_fraction: float
    decode_tensor: int = 0  # where not `tensor`
    remat: str = "full"


class Place(NamedTuple):
    model: str  # hub name
    slice: Slice
    context: int


def _read(text: str) -> dict[str, Place]:
    places = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, model, pod, *numbers, cache, decode, remat, context = line.split()
            where = Slice(pod, *map(int, numbers), float(cache), int(decode), remat)
            places[name] = Place(model, where, int(context))
    return places


PLACES = _read(pathlib.Path(__file__).with_name("places.txt").read_text())


def dapo_math(argument: str) -> Config:
    """The paper's section 4.1 on a model of `PLACES`, on its slice, trained on DAPO-Math-17k,
    evaluated on AIME 2024. "7B,verl" is `verl`'s reading of it. Responses are as long as the
    model's context allows, at most the paper's, their last fifth the overlong buffer. For another
    slice override what the planner prints. ValueError: no such model, or reading."""
    size, _, reading = argument.partition(",")
    if size not in PLACES:
        raise ValueError(f"no size {size!r} of Qwen; there are {', '.join(PLACES)}")
    if reading not in ("", "verl"):
        raise ValueError(f"no reading {reading!r}; there is SIZE (the paper's) and SIZE,verl")
    model, where, context = PLACES[size]
    c = verl() if reading else paper()
    c.model.path, c.data.train = model, "dapo-math-17k.parquet"
    c.eval.files = "aime24=aime-2024.parquet"
    response = min(c.rollout.max_response_tokens, context - c.data.max_prompt_tokens)
    c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens = response, response // 5
    c.steps = 320  # 5,120 updates
    c.dynamic_sampling.surplus, c.rollout.prefill_tokens = "end", 256  # prompts have about 200
    c.optim.last_row_tokens = (c.data.max_prompt_tokens + response) // 2
    return place(c, where)


def place(c: Config, where: Slice) -> Config:
    """`c` on the mesh of `where` (-1 takes other slices), a row a device and pass, slots, cache."""
    decode_tensor = where.decode_tensor or where.tensor
    lay_out(c, where.shards, where.tensor, decode_tensor)
    c.update({"mesh.fsdp" if decode_tensor == where.tensor else "mesh.data": -1})
    c.optim.micro_batch_rows = where.shards
    c.model.remat = where.remat
    c.rollout.slots, c.rollout.cache_fraction = where.slots, where.cache_fraction
    c.rollout.prefill_prompts = 4 * where.shards * where.tensor // decode_tensor
    return c


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
    for axis in ("vocab", "mlp", "heads", "kv_heads"):  # what `tensor` splits
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
    c.reward.overlong_buffer_tokens = 128
    c.optim.minibatches, c.optim.micro_batch_rows, c.optim.warmup_steps = 4, 2, 5
    c.eval.every, c.eval.k, c.eval.max_problems, c.eval.top_p = 20, 1, 256, 1.0
    c.steps, c.checkpoint.every, c.checkpoint.keep = 100, 10, 1
    return c
