"""Checks before anything compiles, and values that follow from several fields.

Bounds and choices stand with the fields, contradictions within one section in its `mistakes`,
those between sections in rules.py; here are sizes on the mesh, names and files.
"""

import glob
import math
import os
from collections.abc import Iterable, Mapping

from dapo_jax.config.rules import check_cache, longest, relations, warm_up, warnings  # noqa: F401
from dapo_jax.config.schema import Config, ConfigError, leaves, walk
from dapo_jax.config.sections import Sharding, stop_strings  # noqa: F401
from dapo_jax.dapo.settings import Loss
from dapo_jax.data import environments, hub, rows
from dapo_jax.gate import wrong


def resolve_mesh(config: Config, devices: int) -> dict[str, int]:
    """Mesh axis -> size, with -1 filled in. Raises ConfigError when the sizes cannot cover it."""
    sizes = config.mesh.to_dict()
    text = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    free = [k for k, v in sizes.items() if v == -1]
    known = math.prod(v for v in sizes.values() if v != -1)
    if known < 1 or devices % known or len(free) > 1 or (known != devices and not free):
        fits = f"sizes whose product is {devices}, or one -1 beside sizes whose product divides it"
        raise ConfigError(f"config.mesh: {text} cannot be laid over {devices} devices; use {fits}")
    return sizes | {axis: devices // known for axis in free}


def row_tokens(config: Config) -> int:
    """Length of a packed training row in TOKENS (optim.row_tokens, or derived when that is 0)."""
    return config.optim.row_tokens or -(-longest(config) // 8) * 8


def micro_rows(config: Config, sizes: Mapping[str, int]) -> int:
    """Packed rows per pass on a mesh of these sizes: the same number on each device with rows."""
    shards = sizes["data"] * sizes["fsdp"]
    return -(-config.optim.micro_batch_rows // shards) * shards


def validate(config: Config, devices: int, files: bool = False) -> None:
    """Raise ConfigError listing every mistake, one line each, before anything compiles.

    files: include missing files and folders; the planner's machine need not have them."""
    bad = [line for name, about, x in walk(config) if (line := about.mistake(name, x))]
    if bad:  # the relations below assume values within their bounds
        raise ConfigError("\n".join(bad))
    bad += missing(config) if files else []
    try:
        sizes = resolve_mesh(config, devices)
    except ConfigError as error:
        bad.append(str(error))
        sizes = dict.fromkeys(config.mesh.to_dict(), 1)  # divides everything
    bad += _check_sizes(config, sizes)
    bad += [] if config.model.path else check_shape(config.model, sizes, config.sharding)
    bad += config.mistakes()  # within each section
    from dapo_jax.model.qwen2 import LINEAR  # imports JAX, which a config file does not need

    lora = config.model.lora
    targets = _each_once("model.lora.targets", lora.targets.split(",") * bool(lora.rank), LINEAR)
    bad += check_objective(config.loss) + targets + relations(config)
    if bad:
        raise ConfigError("\n".join(bad))


# --- Files ---

_LISTS = ("data.train", "supervised_warmup.files", "eval.files")  # several, with commas between


def missing(config: Config) -> list[str]:
    """One line per file or folder of the config that is not there; hub names are not looked up."""
    fields, bad = leaves(config), []
    for name in (*_LISTS, "tokenizer.path", "tokenizer.chat_template", *_MODELS):
        entries = fields[name].split(",") if name in _LISTS else [fields[name]]
        whole = os.path.exists(os.path.expanduser(rows.entry(fields[name])[1]))
        for entry in entries:
            path = (rows.entry(entry)[1] if name == "eval.files" else entry).strip()
            # A model may lie in a bucket, or be AUTHOR/MODEL of the hub.
            local = path.startswith(("/", ".", "~")) or path.count("/") > 1
            several = glob.has_magic(path) or hub.named(path, rows.SUFFIXES)  # the reader looks
            elsewhere = name in _LISTS and (several or path.startswith(environments.PREFIX))
            elsewhere |= name in _MODELS and ("://" in path or not local)
            if path and not elsewhere and not os.path.exists(os.path.expanduser(path)):
                why = " (a comma begins another path: rename the one that has it)" * whole
                bad.append(f"config.{name}: {path}: no such file or folder{why}")
    return bad


_MODELS = ("model.path", "critic.init_from")  # of a directory, or of the hub


# --- Sizes and names ---


def _undivided(rows: Iterable[tuple[str, int, int, str]]) -> list[str]:
    """One line per (what, total, part, why) whose part does not divide the total."""
    return [
        f"{what} = {total} is not divisible by {part} ({why})"
        for what, total, part, why in rows
        if part < 1 or total % part
    ]


def _each_once(field: str, given: list[str], known: Iterable[str]) -> list[str]:
    """A line where the names that a field lists are not all known, or one is there twice."""
    if set(given) <= set(known) and len(given) == len(set(given)):
        return []
    wanted = f"wants each of {', '.join(known)} at most once, with commas between"
    return [f"config.{field}: {','.join(given)!r}: {wanted}"]


def _check_sizes(config: Config, sizes: Mapping[str, int]) -> list[str]:
    """Parts of a batch on the mesh, and the names of its axes in the rules."""
    rollout, shards = config.rollout, sizes["data"] * sizes["fsdp"]
    last = config.optim.last_row_tokens
    split = set(config.sharding.train.sequence.split(","))
    parts = math.prod(size for axis, size in sizes.items() if axis in split)
    over = "the mesh axes of sharding.train.sequence; set optim.%s to a multiple of %d"
    why = f"mesh data x fsdp = {shards}"
    rows = (
        ("config.rollout.slots", rollout.slots, shards, why),
        ("config.rollout.prefill_prompts", rollout.prefill_prompts, shards, why),
        ("config.rollout.groups", rollout.groups, config.optim.minibatches, "optim.minibatches"),
        ("length of a packed row", row_tokens(config), parts, over % ("row_tokens", parts)),
        ("config.optim.last_row_tokens", last, parts, over % ("last_row_tokens", parts)),
    )
    bad = _undivided(rows)
    for name, axes in leaves(config.sharding).items():
        bad += _each_once(name, [axis for axis in axes.split(",") if axis], sizes)
    for phase, rules in config.sharding.to_dict().items():
        bad += _check_rules(f"sharding.{phase}", rules, sizes)
    return bad


def _check_rules(phase: str, rules: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    """Rules by which sums would mix rows, or a device lack what it reads."""
    over = {axis: [n for n in rules[axis].split(",") if sizes.get(n, 1) > 1] for axis in rules}
    both = ", ".join(n for n in over["vocab"] if n in over["batch"])
    of_rows = "splits the rows of a batch too; leave it out of this or of"
    beside = f"{phase}.heads = {rules['heads']!r}: a device needs the keys of its queries"
    one = "would split the one token of a row that is decoded; set ''"
    return wrong(
        (both, f"config.{phase}.vocab: {both} {of_rows} {phase}.batch"),
        (over["heads"] != over["kv_heads"],
         f"config.{phase}.kv_heads: {rules['kv_heads']!r} beside {beside}; set both alike"),
        (phase == "sharding.decode" and over["sequence"],
         f"config.{phase}.sequence: {rules['sequence']!r} {one}"),
    )  # fmt: skip


def check_shape(model, sizes: Mapping[str, int], sharding: Sharding) -> list[str]:
    """Mistakes of a shape on a mesh of these sizes. model: `config.model` or a `qwen2.Shape`."""
    tensor, lora = sizes["tensor"], model.lora
    size = lambda field: (f"model.{field}", getattr(model, field))
    rows = [(*size("num_heads"), model.num_kv_heads, "model.num_kv_heads")]
    fields = dict(vocab="vocab_size", mlp="intermediate_size", embed="hidden_size")
    fields |= dict(heads="num_heads", kv_heads="num_kv_heads", head_dim="head_dim")
    fields |= dict(layers="num_layers")
    split = {
        (fields[axis], axes): f"mesh {axes}, by sharding.{phase}.{axis}"
        for phase, rules in sharding.to_dict().items()
        for axis, axes in rules.items()
        if axis in fields and (axis, axes) != ("kv_heads", "tensor")  # that is said below
    }
    for (field, axes), why in split.items():
        rows.append((*size(field), math.prod(sizes.get(a, 1) for a in axes.split(",")), why))
    bad = _undivided(rows)
    if model.head_dim % 2:
        bad.append(f"model.head_dim = {model.head_dim} must be even (RoPE rotates halves)")
    if model.num_kv_heads % tensor:
        allowed = ", ".join(str(t) for t in range(1, tensor) if model.num_kv_heads % t == 0)
        heads = f"the {model.num_kv_heads} key/value heads; allowed below it: {allowed}"
        bad.append(f"config.mesh.tensor = {tensor} does not divide {heads}")
    narrow = min(model.hidden_size, model.intermediate_size, model.num_kv_heads * model.head_dim)
    if lora and lora.rank > narrow:
        bad.append(
            f"config.model.lora.rank = {lora.rank} exceeds {narrow}, the narrowest side of a linear"
            " layer of this model, whose weights it could as well train whole (rank 0)"
        )
    return bad


def check_objective(loss: Loss) -> list[str]:
    """Unknown objectives and weights, and a dual clip for an objective without one."""
    from dapo_jax.variants import objectives  # imports JAX, which a config file does not need

    bad, known = [], objectives.OBJECTIVES
    for name, table in (("objective", known), ("importance", objectives.IMPORTANCE)):
        given = getattr(loss, name)
        if name == "objective" and ".py:" in given:
            try:
                objectives.named(given)
            except ValueError as error:
                bad.append(str(error))
        elif given not in table:
            bad.append(f"config.loss.{name}: {given!r} is not one of {', '.join(table)}")
    if loss.dual_clip and loss.objective in known and not known[loss.objective].dual_clip:
        bad.append(f"config.loss.dual_clip: {loss.objective!r} has no dual clip; set 0 (off)")
    return bad
