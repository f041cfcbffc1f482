"""Checks across sections before anything compiles, and values that follow from several fields.

Bounds and choices stand with the fields, contradictions within one section in its `mistakes`;
here are the relations between sections, the mesh and the files. `validate` raises `ConfigError`
with one line per mistake.
"""

import glob
import math
import pathlib
from collections.abc import Iterator, Mapping

from dapo_jax.config.schema import SCHEMA, Config, ConfigError, leaves
from dapo_jax.config.sections import Sharding, stop_strings
from dapo_jax.dapo.settings import Advantage, Loss
from dapo_jax.model.settings import Lora
from dapo_jax.variants.settings import Curriculum

__all__ = [
    "check_objective",
    "check_shape",
    "micro_rows",
    "missing",
    "resolve_mesh",
    "row_tokens",
    "stop_strings",
    "validate",
    "warm_up",
    "warnings",
]

# ------------------------------------------------------------------------------------------------
# Values that follow from several fields
# ------------------------------------------------------------------------------------------------


def resolve_mesh(config: Config, devices: int) -> dict[str, int]:
    """Mesh axis -> size, with -1 filled in. Raises ConfigError when the sizes cannot cover it."""
    sizes = dict(config.mesh)
    text = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    free = [k for k, v in sizes.items() if v == -1]
    known = math.prod(v for v in sizes.values() if v != -1)
    if 0 in sizes.values() or len(free) > 1 or (free and devices % known):
        raise ConfigError(
            f"config.mesh: {text} cannot be laid over {devices} devices; use at most one -1"
            f" and sizes whose product divides {devices}"
        )
    if free:
        sizes[free[0]] = devices // known
    elif known != devices:
        raise ConfigError(
            f"config.mesh: {text} wants {known} devices and there are {devices}; change the sizes"
            " or set one of them to -1"
        )
    return sizes


def row_tokens(config: Config) -> int:
    """Length of a packed training row in TOKENS (optim.row_tokens, or derived when that is 0)."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return config.optim.row_tokens or -(-longest // 8) * 8


def micro_rows(config: Config, sizes: Mapping[str, int]) -> int:
    """Packed rows per pass on a mesh of these sizes: the same number on each device with rows."""
    shards = sizes["data"] * sizes["fsdp"]
    return -(-config.optim.micro_batch_rows // shards) * shards


def warm_up(config: Config) -> tuple[str, ...]:
    """What the model imitates before its first step, in this order, unless `init_from` gives the
    weights: examples of the embedded 'task', rows of 'files'; () = nothing."""
    settings = config.supervised_warmup
    asked = {"task": settings.skill_steps + settings.habit_steps, "files": settings.files}
    return tuple(what for what, wanted in asked.items() if wanted)


# ------------------------------------------------------------------------------------------------
# All mistakes
# ------------------------------------------------------------------------------------------------


def validate(config: Config, devices: int, files: bool = False) -> None:
    """Raise ConfigError listing every mistake, one line each, before anything compiles.

    files: include missing files and folders; the planner's machine need not have them."""
    fields = leaves(config).items()
    bad = [line for name, value in fields if (line := SCHEMA[name].mistake(name, value))]
    if bad:  # the relations below assume values within their bounds
        raise ConfigError("\n".join(bad))
    bad += missing(config) if files else []
    try:
        sizes = resolve_mesh(config, devices)
    except ConfigError as error:
        bad.append(str(error))
        sizes = dict.fromkeys(config.mesh, 1)  # divides everything
    bad += _check_batch(config, sizes)
    bad += [] if config.model.path else check_shape(config.model, sizes, config.sharding)
    bad += _check_rules(config.sharding, sizes)
    bad += config.mistakes()  # within each section
    bad += check_objective(config.loss) + _check_lora(config.model.lora)
    bad += _check_sampling(config) + _check_curriculum(config)
    bad += _check_critic(config) if config.critic.enabled else []
    if "task" in warm_up(config) and (config.data.train or config.model.path):
        bad.append(
            "config.supervised_warmup: skill_steps and habit_steps are for the embedded task only;"
            " set both to 0, and name worked examples of your own in supervised_warmup.files"
        )
    if bad:
        raise ConfigError("\n".join(bad))


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

_LISTS = ("data.train", "supervised_warmup.files", "eval.files")  # several, with commas between


def missing(config: Config) -> list[str]:
    """One line per file or folder of the config that is not there; hub names are not looked up."""
    fields = leaves(config)
    paths = [(name, path) for name in _LISTS[:2] for path in fields[name].split(",")]
    paths += [("eval.files", entry.rpartition("=")[2]) for entry in config.eval.files.split(",")]
    paths += [(name, fields[name]) for name in ("tokenizer.path", "tokenizer.chat_template")]
    for name in ("model.path", "critic.init_from"):
        path = fields[name]
        if "://" not in path and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
            paths.append((name, path))
    return [
        f"config.{name}: {path.strip()}: no such file or folder"
        for name, path in paths
        if path.strip()
        and not _exists(path.strip())
        and not (name in _LISTS and _names_several(path.strip()))
    ]


def _names_several(path: str) -> bool:
    """Whether it may be a pattern or a data set of the hub: the reader looks (data/rows.py)."""
    local = path.startswith(("/", ".", "~")) or "/" not in path
    named = ":" in path or not path.endswith((".parquet", ".jsonl", ".json", ".csv", ".gz"))
    return glob.has_magic(path) or (named and not local)


def _exists(path: str) -> bool:
    try:
        return pathlib.Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a name too long, no such user
        return False


# ------------------------------------------------------------------------------------------------
# Sizes on the mesh
# ------------------------------------------------------------------------------------------------


def _divides(what: str, total: int, part: int, why: str) -> Iterator[str]:
    if part < 1 or total % part:
        yield f"{what} = {total} is not divisible by {part} ({why})"


def _check_batch(config: Config, sizes: Mapping[str, int]) -> list[str]:
    """Sizes of a batch, and lengths in TOKENS."""
    rollout, optim, bad = config.rollout, config.optim, []
    if rollout.group_size == 1 and (config.dynamic_sampling.enabled or not config.critic.enabled):
        bad.append(
            "config.rollout.group_size: 1 response makes no group to compare or to filter; set 2 or"
            " more, or critic.enabled=True and dynamic_sampling.enabled=False"
        )
    shards = sizes["data"] * sizes["fsdp"]
    why = f"mesh data x fsdp = {shards}"
    bad += _divides("config.rollout.slots", rollout.slots, shards, why)
    bad += _divides("config.rollout.prefill_prompts", rollout.prefill_prompts, shards, why)
    minibatches = optim.minibatches, "optim.minibatches"
    bad += _divides("config.rollout.groups", rollout.groups, *minibatches)
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    if optim.row_tokens and optim.row_tokens < longest:
        bad.append(
            f"config.optim.row_tokens: {optim.row_tokens} cannot hold the longest prompt +"
            f" response ({longest}); raise it or set 0"
        )
    split = {a for a in config.sharding.train.sequence.split(",") if a} & set(sizes)
    parts = math.prod(sizes[a] for a in split)
    why = f"the mesh axes of sharding.train.sequence; set optim.row_tokens to a multiple of {parts}"
    bad += _divides("length of a packed row", row_tokens(config), parts, why)
    buffer = config.reward.overlong_buffer_tokens
    if config.reward.overlong_penalty and buffer > rollout.max_response_tokens:
        bad.append(
            f"config.reward.overlong_buffer_tokens: {buffer} exceeds"
            f" rollout.max_response_tokens = {rollout.max_response_tokens}: every response would be"
            " punished"
        )
    return bad


def _check_rules(sharding: Sharding, sizes: Mapping[str, int]) -> list[str]:
    return [
        f"config.sharding.{phase}.{axis}: {names!r}: wants each of {', '.join(sizes)} at most once,"
        " with commas between"
        for phase, rules in sharding.to_dict().items()
        for axis, names in rules.items()
        if (axes := [a for a in names.split(",") if a])
        and (not set(axes) <= set(sizes) or len(axes) > len(set(axes)))
    ]


def check_shape(model, sizes: Mapping[str, int], sharding: Sharding) -> list[str]:
    """Mistakes of a model shape on a mesh of these sizes; `model` has the fields of
    `config.model`, or of a checkpoint's shape."""
    bad, tensor = [], sizes["tensor"]
    bad += _divides("model.num_heads", model.num_heads, model.num_kv_heads, "model.num_kv_heads")
    if model.head_dim % 2:
        bad.append(f"model.head_dim = {model.head_dim} must be even (RoPE rotates halves)")
    if model.num_kv_heads % tensor:
        allowed = (t for t in range(1, tensor) if model.num_kv_heads % t == 0)
        bad.append(
            f"config.mesh.tensor = {tensor} does not divide the {model.num_kv_heads} key/value"
            f" heads; allowed below it: {', '.join(map(str, allowed))}"
        )
    bad += _divides("model.vocab_size", model.vocab_size, tensor, "mesh.tensor")
    narrow = min(model.hidden_size, model.intermediate_size, model.num_kv_heads * model.head_dim)
    if model.lora and model.lora.rank > narrow:
        bad.append(
            f"config.model.lora.rank = {model.lora.rank} exceeds {narrow}, the narrowest side of a"
            " linear layer of this model, whose weights it could as well train whole (rank 0)"
        )
    bad += _divides("model.intermediate_size", model.intermediate_size, tensor, "mesh.tensor")
    bad += _divides("model.hidden_size", model.hidden_size, sizes["fsdp"], "mesh.fsdp")
    fields = dict(
        kv_heads="num_kv_heads", vocab="vocab_size", mlp="intermediate_size", embed="hidden_size"
    )
    for phase, rules in sharding.to_dict().items():
        for axis, field in fields.items():
            if "," in rules[axis]:
                parts = math.prod(sizes.get(a, 1) for a in rules[axis].split(","))
                why = f"mesh {rules[axis]}, by sharding.{phase}.{axis}"
                bad += _divides(f"model.{field}", getattr(model, field), parts, why)
    return bad


# ------------------------------------------------------------------------------------------------
# What an algorithm forbids
# ------------------------------------------------------------------------------------------------


def _check_sampling(config: Config) -> list[str]:
    """Samples that do not come from the trained policy need weights that correct for that."""
    bad, corrected = [], config.loss.importance_cap > 0  # which needs old_logprobs='recompute'
    if config.rollout.cache_dtype == "int8" and not corrected:
        bad.append(
            "config.rollout.cache_dtype: 'int8' samples from a policy that is a little off; needs"
            " loss.old_logprobs='recompute' and loss.importance_cap (2 is usual), which weigh that"
        )
    if not config.rollout.staleness:
        return bad
    if not corrected:
        bad.append(
            "config.rollout.staleness: trains on tokens of earlier weights; needs"
            " loss.old_logprobs='recompute' and loss.importance_cap (AReaL: 5), which weigh that"
        )
    if not config.dynamic_sampling.refill:
        bad.append(
            "config.rollout.staleness: a batch that is short by dynamic_sampling.refill=False needs"
            " the end of a round, and there are none; set refill=True or staleness=0"
        )
    if config.curriculum != Curriculum():
        bad.append(
            "config.rollout.staleness: a curriculum chooses by what earlier steps have finished,"
            " and here they have not; set 0, or leave config.curriculum as it is"
        )
    return bad


def _check_curriculum(config: Config) -> list[str]:
    c, bad = config.curriculum, []
    if (c.band_low > 0 or c.band_high < 1) and not config.dynamic_sampling.enabled:
        bad.append(
            "config.curriculum.band_low: a band is a rule of Dynamic Sampling; set"
            " dynamic_sampling.enabled=True"
        )
    if c.temperature_schedule != "constant" and config.dynamic_sampling.surplus == "carry":
        bad.append(
            "config.curriculum.temperature_schedule: the log-probs of groups carried over are of an"
            " earlier temperature; set dynamic_sampling.surplus='drop'"
        )
    return bad


def check_objective(loss: Loss) -> list[str]:
    """Unknown objectives and weights, and a dual clip for an objective without one."""
    from dapo_jax.variants import objectives  # imports JAX, which a config file does not need

    tables = {"objective": objectives.OBJECTIVES, "importance": objectives.IMPORTANCE}
    bad = [
        f"config.loss.{name}: {getattr(loss, name)!r} is not one of {', '.join(table)}"
        for name, table in tables.items()
        if getattr(loss, name) not in table
    ]
    chosen = objectives.OBJECTIVES.get(loss.objective)
    if chosen and loss.dual_clip and not chosen.dual_clip:
        bad.append(
            f"config.loss.dual_clip: objective {loss.objective!r} has no dual clip; set 0 (off)"
        )
    return bad


def _check_critic(config: Config) -> list[str]:
    """Fields without meaning beside a value model, which gives each token its own advantage."""
    from dapo_jax.variants import objectives

    bad, by_group = [], Advantage()
    for name in ("scale", "leave_one_out", "whiten"):
        value, usual = getattr(config.advantage, name), getattr(by_group, name)
        if value != usual:
            bad.append(
                f"config.advantage.{name}: {value!r} is of advantages within a group; with"
                f" critic.enabled they are GAE's: leave it at {usual!r}"
            )
    if config.optim.share_prompts:
        bad.append(
            "config.optim.share_prompts: a value model reads each response behind a prompt of its"
            " own; with critic.enabled set it to False"
        )
    if config.critic.bootstrap_truncated and config.loss.overlong_filter != "off":
        bad.append(
            "config.critic.bootstrap_truncated: True is of truncated responses, and"
            f" loss.overlong_filter={config.loss.overlong_filter!r} leaves them out; set it to off"
        )
    chosen = objectives.OBJECTIVES.get(config.loss.objective)
    if chosen and chosen.of_responses and config.loss.objective != "gspo_token":
        bad.append(
            f"config.loss.objective: {config.loss.objective!r} has one ratio for a response, and"
            " with critic.enabled each token has its own advantage; set ppo, cispo or gspo_token"
        )
    return bad


def _check_lora(lora: Lora) -> list[str]:
    if not lora.rank:
        return []
    from dapo_jax.model import qwen2  # imports JAX

    names = lora.targets.split(",")
    if not set(names) - set(qwen2.LINEAR) and len(names) == len(set(names)):
        return []
    known = ", ".join(qwen2.LINEAR)
    return [
        f"config.model.lora.targets: {lora.targets!r}: wants each of {known} at most once, with"
        " commas between"
    ]


def warnings(config: Config) -> list[str]:
    """Settings that work but deserve a word before a long run."""
    from dapo_jax.variants import objectives

    loss, critic, out = config.loss, config.critic, []
    if critic.enabled and critic.pretrain_steps >= config.steps > 0:
        out.append(
            f"critic.pretrain_steps={critic.pretrain_steps} of steps={config.steps}: the"
            " policy does not learn in this run"
        )
    if loss.overlong_filter == "group" and not config.reward.overlong_penalty:
        out.append(
            "loss.overlong_filter='group' without the soft ramp (reward.overlong_penalty=0):"
            " nothing restrains response length"
        )
    if objectives.OBJECTIVES[loss.objective].of_responses and loss.normalizer != "sequence":
        out.append(
            f"loss.normalizer={loss.normalizer!r} with the objective {loss.objective!r}: the"
            " paper's is 'sequence', where every response weighs the same"
        )
    if loss.objective == "cispo" and loss.clip_low < 1:
        out.append(
            f"loss.clip_low={loss.clip_low} with the objective 'cispo' lifts small ratios to"
            " a bound; MiniMax-M1 and ScaleRL have none (clip_low=1, clip_high=4)"
        )
    if config.rollout.top_p < 1.0:
        out.append(
            f"rollout.top_p={config.rollout.top_p}: training samples are cut, log-probs are not;"
            " the gradient is biased"
        )
    return out
