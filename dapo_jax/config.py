"""The one schema of every run: each field's default, meaning, unit and source, and the checks.

A config file is Python: `get_config()` starts from `base()` (or a preset), changes what it wants
and returns it. On the command line any leaf is overridden as `--config.optim.lr=1e-6`.

    from dapo_jax import config
    def get_config():
        c = config.paper()
        c.optim.lr = 2e-6
        return c

`validate` runs before anything compiles and raises `ConfigError` with one line a mistake.
Lengths are in TOKENS everywhere. "verl" is the code the DAPO authors name for their released run.
"""

import difflib
import math
from typing import Any, NamedTuple

import ml_collections


class ConfigError(ValueError):
    """A config value that cannot work; the message says which field, why, and what would."""


class Field(NamedTuple):
    default: Any
    doc: str
    low: float | None = None  # smallest allowed value
    high: float | None = None  # largest allowed value
    choices: tuple[str, ...] = ()  # allowed strings


# fmt: off
SCHEMA: dict[str, Field] = {
    # --- the run -------------------------------------------------------------------------------
    "seed": Field(0, "seeds the problem order, every sample's uniforms, initialisation and minibatch shuffles", 0),
    "steps": Field(100, "rollout steps (one = sample a batch, then `optim.minibatches` updates)", 0),
    "init_from": Field("", "checkpoint directory of another run to start from (used when the workdir has none)"),

    # --- model: read from `path`, or from the fields below where path is '' ---------------------
    "model.path": Field("", "Hugging Face directory or hub name of a Qwen2 checkpoint; '' = random weights of the shape below"),
    "model.vocab_size": Field(48, "rows of the embedding (Qwen2.5: 151936 or 152064)", 2),
    "model.hidden_size": Field(64, "width of the residual stream, D", 1),
    "model.intermediate_size": Field(192, "width of the SwiGLU hidden layer, F", 1),
    "model.num_layers": Field(2, "decoder blocks, L", 1),
    "model.num_heads": Field(4, "query heads, H", 1),
    "model.num_kv_heads": Field(2, "key/value heads, K; divides num_heads", 1),
    "model.head_dim": Field(16, "width of one head, even (RoPE rotates halves)", 2),
    "model.rope_theta": Field(1e4, "RoPE base (Qwen2.5: 1e6)", 1.0),
    "model.rms_eps": Field(1e-6, "epsilon inside RMSNorm's square root", 0.0),
    "model.tie_embeddings": Field(True, "the output head is the embedding's transpose"),
    "model.init_std": Field(0.25, "std of the random embedding (linear layers: 1/sqrt(fan_in))", 0.0),
    "model.dtype": Field("float32", "compute dtype; master weights and Adam are float32 always", choices=("float32", "bfloat16")),
    "model.scan_layers": Field(False, "training: scan over layers (one compiled body) instead of unrolling them"),
    "model.remat": Field("none", "what the backward pass recomputes: nothing, all but matmul outputs, blocks but for attention, whole blocks", choices=("none", "dots", "attention", "full")),
    "model.attention": Field("auto", "training attention: splash on TPU, cudnn on GPU, chunked (XLA) elsewhere; auto = by platform", choices=("auto", "chunked", "splash", "cudnn")),
    "model.attention_chunk": Field(512, "queries a step of training attention; bounds its scores to chunk x row", 1),
    "model.head_chunk": Field(1024, "tokens a step of the output head; bounds logits to chunk x vocabulary", 1),

    # --- text ---------------------------------------------------------------------------------
    "tokenizer.path": Field("", "directory or file: tokenizer.json or SentencePiece .model; '' = model.path, else the embedded task's"),
    "tokenizer.chat": Field(False, "render prompts through the chat template (False: message contents as they are)"),
    "tokenizer.chat_template": Field("", "Jinja file; '' = the tokenizer's own"),

    # --- problems -----------------------------------------------------------------------------
    "data.train": Field("", "problem files, comma-separated (parquet, jsonl, jsonl.gz); '' = the embedded arithmetic task"),
    "data.on_bad": Field("refuse", "a row without an integer answer: stop and name it, or skip and count", choices=("refuse", "skip")),
    "data.on_long": Field("filter", "a prompt over max_prompt_tokens: leave the problem out, or cut the prompt's beginning (verl)", choices=("filter", "left_truncate")),
    "data.max_prompt_tokens": Field(32, "longest prompt (paper: 2048)", 1),
    "data.embedded_problems": Field(4096, "training problems of the embedded task", 1),

    # --- supervised warm-up: makes a base model that can but rarely does (embedded task only) -----
    "warmup.skill_steps": Field(0, "steps on mostly careful worked examples; 0 = no warm-up", 0),
    "warmup.skill_lr": Field(3e-3, "peak learning rate of those steps (schedule in warmup.py)", 0.0),
    "warmup.habit_steps": Field(0, "steps on hasty examples that skip the work, so that care becomes rare", 0),
    "warmup.habit_lr": Field(1.5e-3, "peak learning rate of those steps", 0.0),
    "warmup.batch": Field(64, "examples a step", 1),

    # --- rollout (paper section 4.1: 512 prompts x 16, 20480 tokens) -------------------------------
    "rollout.groups": Field(32, "groups (prompts) a training batch needs, N", 1),
    "rollout.group_size": Field(8, "responses a prompt, G", 2),
    "rollout.max_response_tokens": Field(32, "longest response, L_max, end-of-text token included (paper: 20480)", 1),
    "rollout.temperature": Field(1.0, "divides the logits; the recorded log-probs are at this temperature", 1e-3),
    "rollout.top_p": Field(1.0, "nucleus mass of training samples; below 1 the samples no longer come from the policy", 1e-6, 1.0),
    "rollout.slots": Field(128, "responses decoded at a time", 1),
    "rollout.chunk": Field(8, "tokens decoded between two host visits", 1),
    "rollout.prefill_prompts": Field(16, "prompts a prefill call", 1),
    "rollout.prefill_tokens": Field(512, "tokens of each prompt a prefill call; longer prompts take several", 8),
    "rollout.page_tokens": Field(0, "tokens of a cache page; 0 = 128, and on CPU what model/paged.py measured to be quick", 0),
    "rollout.cache_fraction": Field(1.0, "size of the cache, of what all slots at full length would fill; rows that no longer fit are made again later", 1e-6, 1.0),

    # --- dynamic sampling (paper Eq. 11) -------------------------------------------------------------
    "sampling.dynamic": Field(True, "keep only groups with 0 < correct < G, and refill what is missing"),
    "sampling.max_rounds": Field(10, "generation rounds a step before `on_exhausted` applies (verl: 10)", 1),
    "sampling.on_exhausted": Field("train", "rounds are used up: train on the groups there are, or stop with a checkpoint", choices=("train", "stop")),
    "sampling.max_empty_steps": Field(3, "steps in a row without one learnable group before the run stops with a checkpoint", 1),
    "sampling.surplus": Field("drop", "accepted groups beyond N: sample their problems again next step, or carry the groups over", choices=("drop", "carry")),

    # --- reward (paper Eq. 7 and 13) -------------------------------------------------------------------
    "reward.mode": Field("dapo", "verifier that decides correctness (the other one is logged beside it)", choices=("dapo", "integer")),
    "reward.correct": Field(1.0, "reward of a correct response"),
    "reward.wrong": Field(-1.0, "reward of a wrong response"),
    "reward.overlong_buffer_tokens": Field(12, "L_cache: the penalty ramps over this many last tokens (paper: 4096)", 0),
    "reward.overlong_penalty": Field(1.0, "size of the full penalty at L_max; 0 = no soft punishment", 0.0),

    # --- advantage -------------------------------------------------------------------------------------
    "advantage.ddof": Field(1, "1: sample std of a group, as in verl; 0: population std", 0, 1),
    "advantage.epsilon": Field(1e-6, "added to the std (verl: 1e-6; AReaL 1e-5; TRL 1e-4)", 0.0),

    # --- objective (paper Eq. 8) ------------------------------------------------------------------------
    "loss.clip_low": Field(0.2, "ratio is clipped below at 1 - clip_low", 0.0, 1.0),
    "loss.clip_high": Field(0.28, "ratio is clipped above at 1 + clip_high (Clip-Higher; GRPO: = clip_low)", 0.0),
    "loss.dual_clip": Field(0.0, "bound c > 1 on a negative advantage's loss (verl: 10); 0 = off (paper)", 0.0),
    "loss.log_ratio_max": Field(20.0, "log-ratios are clamped to +- this before exp, so that one token cannot overflow", 1.0),
    "loss.normalizer": Field("batch_tokens", "what a token's loss is divided by; see dapo/objective.py", choices=("batch_tokens", "group_tokens", "chunk_tokens", "sequence")),
    "loss.chunk_sequences": Field(32, "responses a chunk of normalizer='chunk_tokens'", 1),
    "loss.overlong_filter": Field("off", "truncated responses: off = train on them; loss = leave the loss; group = leave loss and group statistics", choices=("off", "loss", "group")),
    "loss.old_logprobs": Field("recompute", "denominator of the ratio: the trainer's own pass, or the sampler's records", choices=("recompute", "reuse")),
    "loss.importance_cap": Field(0.0, "truncated importance weight min(pi_trainer/pi_sampler, cap) on recomputed log-probs; 0 = off", 0.0),
    "loss.kl_coef": Field(0.0, "weight of the k3 estimate of KL(policy || start of the run); 0 = no reference model", 0.0),
    "loss.entropy_coef": Field(0.0, "weight of the entropy bonus", 0.0),
    "loss.entropy_enough": Field(0.0, "nats a token from which on the bonus no longer pushes: a guard against collapse only; 0 = no end", 0.0),

    # --- optimizer -----------------------------------------------------------------------------------------
    "optim.lr": Field(3e-4, "AdamW learning rate after warm-up (paper: 1e-6)", 0.0),
    "optim.warmup_steps": Field(2, "ROLLOUT steps of linear warm-up (paper: 20; verl: 10)", 0),
    "optim.warmup_from_zero": Field(False, "the first rollout step trains at lr 0, as verl's schedule does"),
    "optim.b1": Field(0.9, "Adam's first decay", 0.0, 1.0),
    "optim.b2": Field(0.95, "Adam's second decay (verl: 0.999)", 0.0, 1.0),
    "optim.eps": Field(1e-8, "Adam's epsilon", 0.0),
    "optim.weight_decay": Field(0.0, "decoupled weight decay (verl: 0.1)", 0.0),
    "optim.clip_norm": Field(1.0, "global gradient norm is clipped to this", 0.0),
    "optim.minibatches": Field(8, "gradient updates a rollout step (paper: 16)", 1),
    "optim.micro_rows": Field(8, "packed rows a device pass; gradients accumulate over passes in float32", 1),
    "optim.row_tokens": Field(0, "length of a packed row; 0 = longest prompt + longest response, rounded up to 8", 0),
    "optim.offload": Field(False, "keep Adam's moments in the hosts' memory between updates"),
    "optim.max_skipped": Field(8, "non-finite gradients in a row before the run stops with a checkpoint", 1),

    # --- evaluation ---------------------------------------------------------------------------------------
    "eval.files": Field("", "problem files, comma-separated name=path; '' = the embedded held-out and harder sets"),
    "eval.every": Field(20, "rollout steps between evaluations (first and last are always evaluated); 0 = those two only", 0),
    "eval.k": Field(4, "samples a problem (paper: 32)", 1),
    "eval.problems": Field(128, "problems a file, the first ones; 0 = all", 0),
    "eval.temperature": Field(1.0, "sampling temperature of evaluation; 0 = greedy", 0.0),
    "eval.top_p": Field(0.7, "second setting evaluated beside top_p=1 (paper: 0.7); 1 = none", 1e-6, 1.0),
    "eval.stop_strings": Field("", "texts that end a response of evaluation, separated by |, with \\n for a new line; '' = only stop tokens do"),
    "eval.max_response_tokens": Field(0, "longest response in evaluation; 0 = rollout.max_response_tokens", 0),

    # --- checkpoints and logs --------------------------------------------------------------------------------
    "checkpoint.every": Field(10, "rollout steps between checkpoints (the last is always saved); 0 = only the last", 0),
    "checkpoint.keep": Field(2, "newest checkpoints kept; the one before is used where the newest is damaged", 1),
    "checkpoint.keep_every": Field(0, "also keep the checkpoints of steps divisible by this; 0 = none", 0),
    "checkpoint.keep_best": Field(0, "also keep this many with the best evaluation (each evaluated step is then saved)", 0),
    "checkpoint.best": Field("", "metric that says which is best; '' = avg@k of the first evaluation set"),
    "checkpoint.directory": Field("", "where checkpoints go, e.g. gs://bucket/run; '' = WORKDIR/checkpoints"),
    "log.samples": Field(4, "groups a step of which rollouts/ keeps a right and a wrong response, and as many truncated responses", 0),
    "log.tensorboard": Field(True, "write TensorBoard events beside metrics.jsonl"),
    "log.wandb": Field("", "project at Weights & Biases that gets the numbers too (pip install wandb); '' = none"),
    "log.mlflow": Field("", "experiment of MLflow that gets the numbers too (pip install mlflow); '' = none"),
    "log.text_every": Field(10, "rollout steps between text samples in TensorBoard; 0 = none", 0),

    # --- alarms of a run that goes wrong --------------------------------------------------------------------
    "guard.entropy_min": Field(0.0, "alarm below this mean entropy of a token, nats (collapse); 0 = off", 0.0),
    "guard.entropy_max": Field(0.0, "alarm above it (noise); 0 = off", 0.0),
    "guard.entropy_fall": Field(0.1, "alarm where entropy falls below this share of its first steps' and accuracy no longer rises; 0 = off", 0.0, 1.0),
    "guard.entropy_rise": Field(3.0, "alarm where it grows beyond this many times, and accuracy no longer rises; 0 = off", 0.0),
    "guard.length_min": Field(0.0, "alarm below this mean response length; 0 = off", 0.0),
    "guard.length_max": Field(0.0, "alarm above it; 0 = off", 0.0),
    "guard.length_rise": Field(1.5, "alarm where it grows by this factor in ten steps and accuracy no longer rises; 0 = off", 0.0),
    "guard.truncated_max": Field(0.5, "alarm above this share of truncated responses; 0 = off", 0.0, 1.0),
    "guard.gap_max": Field(-1.0, "alarm above this difference of sampler's and trainer's log-probs, nats; -1 = 1e-3 for float32 on CPU, else 1; 0 = off", -1.0),
    "guard.accept_min": Field(0.01, "alarm below this share of drawn problems with right and wrong responses; 0 = off", 0.0, 1.0),
    "guard.stop_after": Field(0, "steps in a row with an alarm before the run stops with a checkpoint; 0 = only warn", 0),
    "guard.hang_factor": Field(10.0, "print all Python stacks when a phase takes this many times its usual time; 0 = off", 0.0),
    "guard.hang_floor_s": Field(120.0, "and at least this many seconds", 0.0),

    # --- devices -----------------------------------------------------------------------------------------------
    "mesh.data": Field(1, "devices along `data` (replicas of the weights); -1 = all that are left", -1),
    "mesh.fsdp": Field(-1, "devices along `fsdp` (weights and optimizer are split); -1 = all that are left", -1),
    "mesh.tensor": Field(1, "devices along `tensor` (heads, MLP and vocabulary are split); divides num_kv_heads", 1),
}

# Logical axis -> mesh axes ('' = replicated), one table for training and one for decoding. Weights and
# activations name logical axes only, so another strategy is another table.
_TRAIN_RULES = {
    "vocab": "tensor", "embed": "fsdp", "mlp": "tensor", "heads": "tensor", "kv_heads": "tensor",
    "layers": "", "head_dim": "", "batch": "data,fsdp", "token": "", "act_embed": "",
    "sequence": "tensor",  # tokens of the residual stream, between blocks
}
# Decoding reads every weight once a token: split over `tensor` only, never gathered.
_DECODE_RULES = _TRAIN_RULES | {"embed": "", "sequence": ""}
SCHEMA |= {f"sharding.train.{k}": Field(v, f"mesh axes of logical axis {k!r} in training") for k, v in _TRAIN_RULES.items()}
SCHEMA |= {f"sharding.decode.{k}": Field(v, f"mesh axes of logical axis {k!r} in decoding") for k, v in _DECODE_RULES.items()}
# fmt: on


# ------------------------------------------------------------------------------------------------
# Presets: config functions, each a difference from the one before it.
# ------------------------------------------------------------------------------------------------


def base() -> ml_collections.ConfigDict:
    """Every field at its default: full DAPO on the embedded task. Locked: unknown names raise."""
    tree: dict = {}
    for name, field in SCHEMA.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = field.default
    return ml_collections.ConfigDict(tree).lock()


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
    c.eval.k, c.eval.every, c.eval.problems = 32, 5, 0
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
    c.sampling.dynamic = False
    return c


# ------------------------------------------------------------------------------------------------
# Validation
# ------------------------------------------------------------------------------------------------


def leaves(c: ml_collections.ConfigDict) -> dict[str, Any]:
    """Dotted name -> value, in the schema's order."""

    def walk(node, prefix):
        for key, value in node.items():
            name = f"{prefix}{key}"
            if isinstance(value, ml_collections.ConfigDict):
                yield from walk(value, name + ".")
            else:
                yield name, value

    flat = dict(walk(c, ""))
    return {k: flat[k] for k in SCHEMA if k in flat} | flat


def nearest(name: str) -> str:
    """', did you mean a, b?' for a mistyped field name; '' when nothing is close."""
    short = {}
    for known in SCHEMA:
        short.setdefault(known.rsplit(".", 1)[-1], []).append(known)
    close = difflib.get_close_matches(name, SCHEMA, n=3, cutoff=0.5)
    for leaf in difflib.get_close_matches(name.rsplit(".", 1)[-1], short, n=3, cutoff=0.6):
        close += [k for k in short[leaf] if k not in close]
    return f"; did you mean {', '.join(close[:3])}?" if close else ""


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


def resolve_mesh(c: ml_collections.ConfigDict, devices: int) -> dict[str, int]:
    """Mesh axis -> size, with -1 filled in. Raises ConfigError when the sizes cannot cover it."""
    sizes = dict(c.mesh)
    free = [k for k, v in sizes.items() if v == -1]
    known = math.prod(v for v in sizes.values() if v != -1)
    text = " x ".join(f"{k}={v}" for k, v in c.mesh.items())
    if 0 in sizes.values() or len(free) > 1 or (free and devices % known):
        raise ConfigError(
            f"config.mesh: {text} cannot be laid over {devices} devices; use at most one -1 and"
            f" sizes whose product divides {devices}"
        )
    if free:
        sizes[free[0]] = devices // known
    elif known != devices:
        raise ConfigError(
            f"config.mesh: {text} wants {known} devices and there are {devices}; change the sizes or"
            " set one of them to -1"
        )
    return sizes


def stop_strings(field: str) -> list[str]:
    """`eval.stop_strings` taken apart."""
    return [t.replace("\\n", "\n") for t in field.split("|")] if field else []


def row_tokens(c: ml_collections.ConfigDict) -> int:
    """Length of a packed training row in TOKENS (optim.row_tokens, or derived when that is 0)."""
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    return c.optim.row_tokens or -(-longest // 8) * 8


def validate(c: ml_collections.ConfigDict, devices: int) -> None:
    """Raise ConfigError listing every mistake, one line each, before anything compiles."""
    bad = [e for n, v in leaves(c).items() if (e := _check_field(n, v))]
    bad += [f"config.{n}: missing" for n in SCHEMA if n not in leaves(c)]
    if bad:  # the relations below assume sane fields
        raise ConfigError("\n".join(bad))

    sizes = resolve_mesh(c, devices)
    shards, tensor = sizes["data"] * sizes["fsdp"], sizes["tensor"]
    why = f"mesh data x fsdp = {shards}"
    _divides(bad, "config.optim.micro_rows", c.optim.micro_rows, shards, why)
    _divides(bad, "config.rollout.slots", c.rollout.slots, shards, why)
    _divides(bad, "config.rollout.prefill_prompts", c.rollout.prefill_prompts, shards, why)
    _divides(
        bad, "config.rollout.groups", c.rollout.groups, c.optim.minibatches, "optim.minibatches"
    )
    if not c.model.path:
        bad += check_shape(c.model, tensor, sizes["fsdp"])
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    if c.optim.row_tokens and c.optim.row_tokens < longest:
        bad.append(
            f"config.optim.row_tokens: {c.optim.row_tokens} cannot hold the longest prompt +"
            f" response ({longest}); raise it or set 0"
        )
    parts = math.prod(sizes[a] for a in c.sharding.train.sequence.split(",") if a)
    why = f"the mesh axes of sharding.train.sequence; set optim.row_tokens to a multiple of {parts}"
    _divides(bad, "length of a packed row", row_tokens(c), parts, why)
    if (
        c.reward.overlong_penalty
        and c.reward.overlong_buffer_tokens > c.rollout.max_response_tokens
    ):
        bad.append(
            f"config.reward.overlong_buffer_tokens: {c.reward.overlong_buffer_tokens} exceeds"
            f" rollout.max_response_tokens = {c.rollout.max_response_tokens}: every response would"
            " be punished"
        )
    if "" in stop_strings(c.eval.stop_strings):
        bad.append(
            f"config.eval.stop_strings: {c.eval.stop_strings!r} has an empty text between its |"
        )
    if c.loss.dual_clip and c.loss.dual_clip <= 1.0:
        bad.append(f"config.loss.dual_clip: {c.loss.dual_clip} must exceed 1 (or be 0: off)")
    if c.loss.importance_cap and c.loss.old_logprobs == "reuse":
        bad.append(
            "config.loss.importance_cap: needs loss.old_logprobs='recompute'; with 'reuse' the"
            " sampler's log-probs already are the denominator"
        )
    if c.sampling.surplus == "carry" and not c.sampling.dynamic:
        bad.append("config.sampling.surplus: 'carry' needs sampling.dynamic=True")
    if c.warmup.skill_steps + c.warmup.habit_steps and (c.data.train or c.model.path):
        bad.append(
            "config.warmup: the supervised warm-up is for the embedded task only; set"
            " warmup.skill_steps=0 and warmup.habit_steps=0"
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


def warnings(c: ml_collections.ConfigDict) -> list[str]:
    """Settings that work but deserve a word before a long run."""
    out = []
    if c.loss.overlong_filter == "group" and not c.reward.overlong_penalty:
        out.append(
            "loss.overlong_filter='group' without the soft ramp (reward.overlong_penalty=0): nothing"
            " restrains response length"
        )
    if c.rollout.top_p < 1.0:
        out.append(
            f"rollout.top_p={c.rollout.top_p}: training samples are cut, log-probs are not; the"
            " gradient is biased"
        )
    return out
