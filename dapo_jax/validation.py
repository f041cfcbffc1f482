"""The checks of a config before anything compiles, and what follows from its fields.

`validate` raises `ConfigError` with one line per mistake.
"""

import math
from typing import Any

import ml_collections

from dapo_jax.schema import SCHEMA, ConfigError, leaves, nearest


def _check_field(name: str, value: Any) -> str | None:
    field = SCHEMA.get(name)
    if field is None:
        return f"config.{name}: no such field{nearest(name)}"
    kind = type(field.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        return f"config.{name}: wants {kind.__name__}, got {value!r} ({type(value).__name__})"
    if kind is float and not math.isfinite(value):
        return f"config.{name}: wants a finite number, got {value}"
    if field.choices and value not in field.choices:
        return f"config.{name}: {value!r} is not one of {', '.join(field.choices)}"
    if field.low is not None and value < field.low:
        return f"config.{name}: {value} is too small, at least {field.low:g} ({field.doc})"
    if field.high is not None and value > field.high:
        return f"config.{name}: {value} is too large, at most {field.high:g} ({field.doc})"
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


def validate(config: ml_collections.ConfigDict, devices: int) -> None:
    """Raise ConfigError listing every mistake, one line each, before anything compiles."""
    bad = [e for n, v in leaves(config).items() if (e := _check_field(n, v))]
    bad += [f"config.{n}: missing" for n in SCHEMA if n not in leaves(config)]
    if bad:  # the relations below assume sane fields
        raise ConfigError("\n".join(bad))

    sizes = resolve_mesh(config, devices)
    shards, tensor = sizes["data"] * sizes["fsdp"], sizes["tensor"]
    why = f"mesh data x fsdp = {shards}"
    _divides(bad, "config.optim.micro_batch_rows", config.optim.micro_batch_rows, shards, why)
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
        bad += check_shape(config.model, tensor, sizes["fsdp"])
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.optim.row_tokens and config.optim.row_tokens < longest:
        bad.append(
            f"config.optim.row_tokens: {config.optim.row_tokens} cannot hold the longest prompt +"
            f" response ({longest}); raise it or set 0"
        )
    parts = math.prod(sizes[a] for a in config.sharding.train.sequence.split(",") if a)
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
    if config.loss.dual_clip and config.loss.dual_clip <= 1.0:
        bad.append(f"config.loss.dual_clip: {config.loss.dual_clip} must exceed 1 (or be 0: off)")
    if config.loss.importance_cap and config.loss.old_logprobs == "reuse":
        bad.append(
            "config.loss.importance_cap: needs loss.old_logprobs='recompute'; with 'reuse' the"
            " sampler's log-probs already are the denominator"
        )
    if config.dynamic_sampling.surplus == "carry" and not config.dynamic_sampling.enabled:
        bad.append("config.dynamic_sampling.surplus: 'carry' needs dynamic_sampling.enabled=True")
    if config.supervised_warmup.skill_steps + config.supervised_warmup.habit_steps and (
        config.data.train or config.model.path
    ):
        bad.append(
            "config.supervised_warmup: the supervised warm-up is for the embedded task only; set"
            " supervised_warmup.skill_steps=0 and supervised_warmup.habit_steps=0"
        )
    if bad:
        raise ConfigError("\n".join(bad))


def check_shape(model, tensor: int, fsdp: int) -> list[str]:
    """Mistakes of a model shape under a mesh; `model` has the fields of `config.model`."""
    bad: list[str] = []
    _divides(bad, "model.num_heads", model.num_heads, model.num_kv_heads, "model.num_kv_heads")
    if model.head_dim % 2:
        bad.append(f"model.head_dim = {model.head_dim} must be even (RoPE rotates halves)")
    allowed = [t for t in range(1, model.num_kv_heads + 1) if model.num_kv_heads % t == 0]
    if tensor not in allowed:
        bad.append(
            f"config.mesh.tensor = {tensor} does not divide the {model.num_kv_heads} key/value"
            f" heads; allowed: {', '.join(map(str, allowed))}"
        )
    _divides(bad, "model.vocab_size", model.vocab_size, tensor, "mesh.tensor")
    _divides(bad, "model.intermediate_size", model.intermediate_size, tensor, "mesh.tensor")
    _divides(bad, "model.hidden_size", model.hidden_size, fsdp, "mesh.fsdp")
    return bad


def warnings(config: ml_collections.ConfigDict) -> list[str]:
    """Settings that work but deserve a word before a long run."""
    out = []
    if config.loss.overlong_filter == "group" and not config.reward.overlong_penalty:
        out.append(
            "loss.overlong_filter='group' without the soft ramp (reward.overlong_penalty=0):"
            " nothing restrains response length"
        )
    if config.rollout.top_p < 1.0:
        out.append(
            f"rollout.top_p={config.rollout.top_p}: training samples are cut, log-probs are not;"
            " the gradient is biased"
        )
    return out
