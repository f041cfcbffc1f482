"""The checks of a config before anything compiles, and what follows from its fields.

`validate` raises `ConfigError` with one line per mistake.
"""

import glob
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from dapo_jax.config import schema
from dapo_jax.config.schema import SCHEMA, ConfigError, leaves


def _check_field(name: str, value: Any) -> str | None:
    field = SCHEMA.get(name)
    if field is None:
        return schema.unknown(name)
    kind = type(field.default)
    long = type(value) is int and value.bit_length() > 200  # str() refuses really long ones
    shown = "a number of that size" if long else repr(value)[:60]
    if kind is float and type(value) is int:
        value = float(max(min(value, 10**300), -(10**300)))  # float() refuses larger ones
    if type(value) is not kind:
        return f"config.{name}: wants {kind.__name__}, got {shown} ({type(value).__name__})"
    if kind is float and not math.isfinite(value):
        return f"config.{name}: wants a finite number, got {value}"
    if field.choices and value not in field.choices:
        return f"config.{name}: {shown} is not one of {', '.join(field.choices)}"
    if field.low is not None and value < field.low:
        return f"config.{name}: {shown} is too small, at least {field.low:g} ({field.doc})"
    high = field.high
    if high is None:
        high = {int: schema.INTEGERS, float: schema.FLOATS}.get(kind)
    if high is not None and value > high:
        most = high if kind is int else f"{high:g}"
        return f"config.{name}: {shown} is too large, at most {most} ({field.doc})"
    return None


def _divides(problems, what: str, total: int, part: int, why: str):
    if part < 1 or total % part:
        problems.append(f"{what} = {total} is not divisible by {part} ({why})")


def resolve_mesh(config: ml_collections.ConfigDict, devices: int) -> dict[str, int]:
    """Mesh axis -> size, with -1 filled in. Raises ConfigError when the sizes cannot cover it."""
    sizes = dict(config.mesh)
    free = [k for k, v in sizes.items() if v == -1]
    known = math.prod(v for v in sizes.values() if v != -1)
    text = " x ".join(f"{k}={v}" for k, v in config.mesh.items())
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


def stop_strings(field: str) -> list[str]:
    """`eval.stop_strings` taken apart."""
    return [t.replace("\\n", "\n") for t in field.split("|")] if field else []


def row_tokens(config: ml_collections.ConfigDict) -> int:
    """Length of a packed training row in TOKENS (optim.row_tokens, or derived when that is 0)."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return config.optim.row_tokens or -(-longest // 8) * 8


def micro_rows(config: ml_collections.ConfigDict, sizes: Mapping[str, int]) -> int:
    """Packed rows of a pass over a mesh of these sizes: as many for each device that holds rows."""
    shards = sizes["data"] * sizes["fsdp"]
    return -(-config.optim.micro_batch_rows // shards) * shards


def warm_up(config: ml_collections.ConfigDict) -> tuple[str, ...]:
    """What the model imitates before its first step, one after the other, unless `init_from` gives
    the weights: examples of the embedded 'task', rows of 'files'; () = nothing."""
    of = config.supervised_warmup
    asked = {"task": of.skill_steps + of.habit_steps, "files": of.files}
    return tuple(what for what, wanted in asked.items() if wanted)


_ROWS = "supervised_warmup.files"


def missing(config: ml_collections.ConfigDict) -> list[str]:
    """A line per file or folder of the config that is not there; hub names are not looked up."""
    several = (("data.train", config.data.train), (_ROWS, config.supervised_warmup.files))
    paths = [(name, path) for name, listed in several for path in listed.split(",")]
    paths += [("eval.files", entry.rpartition("=")[2]) for entry in config.eval.files.split(",")]
    paths += [(name, config.tokenizer[name.partition(".")[2]]) for name in schema.PATHS[2:4]]
    for name in ("model.path", "critic.init_from"):
        path = config[name.partition(".")[0]][name.partition(".")[2]]
        if "://" not in path and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
            paths.append((name, path))
    return [
        f"config.{name}: {path.strip()}: no such file or folder"
        for name, path in paths
        if path.strip()
        and not _exists(path.strip())
        and not (name in ("data.train", "eval.files", _ROWS) and _of_many(path.strip()))
    ]


def _of_many(path: str) -> bool:
    """Whether it may be a pattern or a data set of the hub: the reader looks (data/rows.py)."""
    local = path.startswith(("/", ".", "~")) or "/" not in path
    named = ":" in path or not path.endswith((".parquet", ".jsonl", ".json", ".csv", ".gz"))
    return glob.has_magic(path) or (named and not local)


def _exists(path: str) -> bool:
    try:
        return pathlib.Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a name too long, no such user
        return False


def validate(config: ml_collections.ConfigDict, devices: int, files: bool = False) -> None:
    """Raise ConfigError listing every mistake, one line each, before anything compiles.

    files: also those that `missing` finds; the planner's machine need not have them."""
    given = leaves(config)
    bad = [e for n, v in given.items() if (e := _check_field(n, v))]
    bad += [f"config.{n}: missing" for n in SCHEMA if n not in given]
    if bad:  # the relations below assume sane fields
        raise ConfigError("\n".join(bad))

    bad += missing(config) if files else []
    try:
        sizes = resolve_mesh(config, devices)
    except ConfigError as error:
        bad.append(str(error))
        sizes = dict.fromkeys(config.mesh, 1)  # divides everything
    if config.rollout.group_size == 1 and (
        config.dynamic_sampling.enabled or not config.critic.enabled
    ):
        bad.append(
            "config.rollout.group_size: 1 response makes no group to compare or to filter; set 2 or"
            " more, or critic.enabled=True and dynamic_sampling.enabled=False"
        )
    shards = sizes["data"] * sizes["fsdp"]
    why = f"mesh data x fsdp = {shards}"
    _divides(bad, "config.rollout.slots", config.rollout.slots, shards, why)
    _divides(bad, "config.rollout.prefill_prompts", config.rollout.prefill_prompts, shards, why)
    _divides(
        bad,
        "config.rollout.groups",
        config.rollout.groups,
        config.optim.minibatches,
        "optim.minibatches",
    )
    if not config.model.path:
        bad += check_shape(config.model, sizes, config.sharding)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.optim.row_tokens and config.optim.row_tokens < longest:
        bad.append(
            f"config.optim.row_tokens: {config.optim.row_tokens} cannot hold the longest prompt +"
            f" response ({longest}); raise it or set 0"
        )
    for phase, rules in config.sharding.items():
        for axis, names in rules.items():
            axes = [a for a in names.split(",") if a]
            if not set(axes) <= set(sizes) or len(axes) > len(set(axes)):
                bad.append(
                    f"config.sharding.{phase}.{axis}: {names!r}: wants each of"
                    f" {', '.join(sizes)} at most once, with commas between"
                )
    split = {a for a in config.sharding.train.sequence.split(",") if a} & set(sizes)
    parts = math.prod(sizes[a] for a in split)
    why = f"the mesh axes of sharding.train.sequence; set optim.row_tokens to a multiple of {parts}"
    _divides(bad, "length of a packed row", row_tokens(config), parts, why)
    if (
        config.reward.overlong_penalty
        and config.reward.overlong_buffer_tokens > config.rollout.max_response_tokens
    ):
        bad.append(
            f"config.reward.overlong_buffer_tokens: {config.reward.overlong_buffer_tokens} exceeds"
            f" rollout.max_response_tokens = {config.rollout.max_response_tokens}: every response"
            " would be punished"
        )
    if "" in stop_strings(config.eval.stop_strings):
        bad.append(
            f"config.eval.stop_strings: {config.eval.stop_strings!r} has an empty text between"
            " its |"
        )
    bad += check_objective(config.loss) + check_curriculum(config) + check_lora(config.model)
    bad += check_critic(config) if config.critic.enabled else []
    if config.optim.schedule != "constant" and not config.optim.decay_steps:
        bad.append(
            f"config.optim.decay_steps: schedule {config.optim.schedule!r} needs the rollout steps"
            " after warm-up in which the rate falls"
        )
    if config.loss.dual_clip and config.loss.dual_clip <= 1.0:
        bad.append(f"config.loss.dual_clip: {config.loss.dual_clip} must exceed 1 (or be 0: off)")
    if config.loss.importance_cap and config.loss.old_logprobs == "reuse":
        bad.append(
            "config.loss.importance_cap: needs loss.old_logprobs='recompute'; with 'reuse' the"
            " sampler's log-probs already are the denominator"
        )
    exact = config.loss.old_logprobs == "recompute" and config.loss.importance_cap
    if config.rollout.cache_dtype == "int8" and not exact:
        bad.append(
            "config.rollout.cache_dtype: 'int8' samples from a policy that is a little off; needs"
            " loss.old_logprobs='recompute' and loss.importance_cap (2 is usual), which weigh that"
        )
    if config.rollout.staleness and not exact:
        bad.append(
            "config.rollout.staleness: trains on tokens of earlier weights; needs"
            " loss.old_logprobs='recompute' and loss.importance_cap (AReaL: 5), which weigh that"
        )
    if config.rollout.staleness and not config.dynamic_sampling.refill:
        bad.append(
            "config.rollout.staleness: a batch that is short by dynamic_sampling.refill=False needs"
            " the end of a round, and there are none; set refill=True or staleness=0"
        )
    if not config.dynamic_sampling.refill and config.dynamic_sampling.on_exhausted == "stop":
        bad.append(
            "config.dynamic_sampling.on_exhausted: 'stop' would end the run at its first short"
            " batch, and with refill=False most are; set 'train'"
        )
    if config.dynamic_sampling.surplus == "carry" and not config.dynamic_sampling.enabled:
        bad.append("config.dynamic_sampling.surplus: 'carry' needs dynamic_sampling.enabled=True")
    if "task" in warm_up(config) and (config.data.train or config.model.path):
        bad.append(
            "config.supervised_warmup: skill_steps and habit_steps are for the embedded task only;"
            " set both to 0, and name worked examples of your own in supervised_warmup.files"
        )
    if config.supervised_warmup.steps and "files" not in warm_up(config):
        bad.append(f"config.supervised_warmup.steps: wants {_ROWS}, the examples to take them on")
    if bad:
        raise ConfigError("\n".join(bad))


def check_objective(loss) -> list[str]:
    """Names that `config.loss` gives and nothing has, and numbers that what it names has no use
    for."""
    from dapo_jax.variants import objectives  # brings JAX in, which a config file does not need

    tables = {"objective": objectives.OBJECTIVES, "importance": objectives.IMPORTANCE}
    bad = [
        f"config.loss.{name}: {loss[name]!r} is not one of {', '.join(table)}"
        for name, table in tables.items()
        if loss[name] not in table
    ]
    chosen = objectives.OBJECTIVES.get(loss.objective)
    if chosen and loss.dual_clip and not chosen.dual_clip:
        bad.append(
            f"config.loss.dual_clip: objective {loss.objective!r} has no dual clip; set 0 (off)"
        )
    if loss.importance != "token" and not loss.importance_cap:
        bad.append(
            f"config.loss.importance: {loss.importance!r} needs loss.importance_cap > 0, the"
            " largest weight"
        )
    if loss.importance_floor and not loss.importance.endswith("_mask"):
        bad.append(
            f"config.loss.importance_floor: only a mask has one, and loss.importance is"
            f" {loss.importance!r}"
        )
    return bad


def check_curriculum(config) -> list[str]:
    """Fields of `config.curriculum` that would do nothing, or not what they say."""
    c, bad = config.curriculum, []
    if config.rollout.staleness and c != schema.base().curriculum:
        bad.append(
            "config.rollout.staleness: a curriculum chooses by what earlier steps have finished,"
            " and here they have not; set 0, or leave config.curriculum as it is"
        )
    if c.revisit_epochs and not c.pass_rate_cap:
        bad.append("config.curriculum.revisit_epochs: wants pass_rate_cap, which leaves them out")
    if not c.band_low < c.band_high:
        bad.append(
            f"config.curriculum.band_low: {c.band_low} is not below band_high = {c.band_high}: no"
            " group would lie between them"
        )
    if (c.band_low > 0 or c.band_high < 1) and not config.dynamic_sampling.enabled:
        bad.append(
            "config.curriculum.band_low: a band is a rule of Dynamic Sampling; set"
            " dynamic_sampling.enabled=True"
        )
    if c.temperature_schedule != "constant" and not c.temperature_steps:
        bad.append(
            f"config.curriculum.temperature_steps: schedule {c.temperature_schedule!r} needs the"
            " rollout steps in which the temperature changes"
        )
    if c.temperature_schedule == "constant" and c.temperature_steps:
        bad.append(
            "config.curriculum.temperature_schedule: 'constant' takes no temperature_steps; set"
            " 'linear' or 'cosine'"
        )
    if c.temperature_schedule != "constant" and config.dynamic_sampling.surplus == "carry":
        bad.append(
            "config.curriculum.temperature_schedule: the log-probs of groups carried over are of an"
            " earlier temperature; set dynamic_sampling.surplus='drop'"
        )
    return bad


def check_critic(config) -> list[str]:
    """Fields that mean nothing beside a value model, whose advantages are a token's own."""
    from dapo_jax.variants import objectives

    bad, of_group = [], schema.base().advantage
    for name in ("scale", "leave_one_out", "whiten"):
        if config.advantage[name] != of_group[name]:
            bad.append(
                f"config.advantage.{name}: {config.advantage[name]!r} is of advantages within a"
                f" group; with critic.enabled they are GAE's: leave it at {of_group[name]!r}"
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


def check_lora(model) -> list[str]:
    """Mistakes of `config.model.lora`, as far as they do not depend on the network's shape."""
    lora, bad = model.lora, []
    if not lora.rank:
        return bad
    from dapo_jax.model import qwen2  # brings JAX in

    names = lora.targets.split(",")
    if set(names) - set(qwen2.LINEAR) or len(names) > len(set(names)):
        bad.append(
            f"config.model.lora.targets: {lora.targets!r}: wants each of {', '.join(qwen2.LINEAR)}"
            " at most once, with commas between"
        )
    if not lora.alpha:
        bad.append("config.model.lora.alpha: 0 leaves adapters without effect; 16 is usual")
    return bad


def check_shape(model, sizes: Mapping[str, int], sharding) -> list[str]:
    """Mistakes of a model shape under a mesh and its rules; `model` has the fields of
    `config.model`."""
    bad: list[str] = []
    tensor = sizes["tensor"]
    _divides(bad, "model.num_heads", model.num_heads, model.num_kv_heads, "model.num_kv_heads")
    if model.head_dim % 2:
        bad.append(f"model.head_dim = {model.head_dim} must be even (RoPE rotates halves)")
    if model.num_kv_heads % tensor:
        allowed = (t for t in range(1, tensor) if model.num_kv_heads % t == 0)
        bad.append(
            f"config.mesh.tensor = {tensor} does not divide the {model.num_kv_heads} key/value"
            f" heads; allowed below it: {', '.join(map(str, allowed))}"
        )
    _divides(bad, "model.vocab_size", model.vocab_size, tensor, "mesh.tensor")
    narrow = min(model.hidden_size, model.intermediate_size, model.num_kv_heads * model.head_dim)
    if model.lora and model.lora.rank > narrow:
        bad.append(
            f"config.model.lora.rank = {model.lora.rank} exceeds {narrow}, the narrowest side of a"
            " linear layer of this model, whose weights it could as well train whole (rank 0)"
        )
    _divides(bad, "model.intermediate_size", model.intermediate_size, tensor, "mesh.tensor")
    _divides(bad, "model.hidden_size", model.hidden_size, sizes["fsdp"], "mesh.fsdp")
    fields = dict(
        kv_heads="num_kv_heads", vocab="vocab_size", mlp="intermediate_size", embed="hidden_size"
    )
    for phase, rules in sharding.items():
        for axis, field in fields.items():
            if "," in rules[axis]:
                parts = math.prod(sizes.get(a, 1) for a in rules[axis].split(","))
                why = f"mesh {rules[axis]}, by sharding.{phase}.{axis}"
                _divides(bad, f"model.{field}", getattr(model, field), parts, why)
    return bad


def warnings(config: ml_collections.ConfigDict) -> list[str]:
    """Settings that work but deserve a word before a long run."""
    out = []
    if config.critic.enabled and config.critic.pretrain_steps >= config.steps > 0:
        out.append(
            f"critic.pretrain_steps={config.critic.pretrain_steps} of steps={config.steps}: the"
            " policy does not learn in this run"
        )
    if config.loss.overlong_filter == "group" and not config.reward.overlong_penalty:
        out.append(
            "loss.overlong_filter='group' without the soft ramp (reward.overlong_penalty=0):"
            " nothing restrains response length"
        )
    from dapo_jax.variants import objectives

    if (
        objectives.OBJECTIVES[config.loss.objective].of_responses
        and config.loss.normalizer != "sequence"
    ):
        out.append(
            f"loss.normalizer={config.loss.normalizer!r} with the objective"
            f" {config.loss.objective!r}: the paper's is 'sequence', where every response weighs"
            " the same"
        )
    if config.loss.objective == "cispo" and config.loss.clip_low < 1:
        out.append(
            f"loss.clip_low={config.loss.clip_low} with the objective 'cispo' lifts small ratios to"
            " a bound; MiniMax-M1 and ScaleRL have none (clip_low=1, clip_high=4)"
        )
    if config.rollout.top_p < 1.0:
        out.append(
            f"rollout.top_p={config.rollout.top_p}: training samples are cut, log-probs are not;"
            " the gradient is biased"
        )
    return out
