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
    "supervised_warmup.skill_steps": Field(0, "steps on mostly careful worked examples; 0 = no warm-up", 0),
    "supervised_warmup.skill_lr": Field(3e-3, "peak learning rate of those steps (schedule in warmup.py)", 0.0),
    "supervised_warmup.habit_steps": Field(0, "steps on hasty examples that skip the work, so that care becomes rare", 0),
    "supervised_warmup.habit_lr": Field(1.5e-3, "peak learning rate of those steps", 0.0),
    "supervised_warmup.batch": Field(64, "examples a step", 1),

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
    "dynamic_sampling.enabled": Field(True, "keep only groups with 0 < correct < G, and refill what is missing"),
    "dynamic_sampling.max_rounds": Field(10, "generation rounds a step before `on_exhausted` applies (verl: 10)", 1),
    "dynamic_sampling.on_exhausted": Field("train", "rounds are used up: train on the groups there are, or stop with a checkpoint", choices=("train", "stop")),
    "dynamic_sampling.max_empty_steps": Field(3, "steps in a row without one learnable group before the run stops with a checkpoint", 1),
    "dynamic_sampling.surplus": Field("drop", "accepted groups beyond N: sample their problems again next step, or carry the groups over", choices=("drop", "carry")),

    # --- reward (paper Eq. 7 and 13) -------------------------------------------------------------------
    "reward.verifier": Field("dapo", "verifier that decides correctness (the other one is logged beside it)", choices=("dapo", "integer")),
    "reward.function": Field("", "a function score(problem, response) -> Grade of one's own, as FILE.py:NAME, in place of the verifier"),
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
    "optim.micro_batch_rows": Field(8, "packed rows a device pass; gradients accumulate over passes in float32", 1),
    "optim.row_tokens": Field(0, "length of a packed row; 0 = longest prompt + longest response, rounded up to 8", 0),
    "optim.offload": Field(False, "keep Adam's moments in the hosts' memory between updates"),
    "optim.max_skipped": Field(8, "updates in a row left out as not finite before the run stops with a checkpoint", 1),

    # --- evaluation ---------------------------------------------------------------------------------------
    "eval.files": Field("", "problem files, comma-separated name=path; '' = the embedded held-out and harder sets"),
    "eval.every": Field(20, "rollout steps between evaluations (first and last are always evaluated); 0 = those two only", 0),
    "eval.k": Field(4, "samples a problem (paper: 32)", 1),
    "eval.max_problems": Field(128, "problems a file, the first ones; 0 = all", 0),
    "eval.temperature": Field(1.0, "sampling temperature of evaluation; 0 = greedy", 0.0),
    "eval.top_p": Field(0.7, "second setting evaluated beside top_p=1 (paper: 0.7); 1 = none", 1e-6, 1.0),
    "eval.stop_strings": Field("", "texts that end a response of evaluation, separated by |, with \\n for a new line; '' = only stop tokens do"),
    "eval.max_response_tokens": Field(0, "longest response in evaluation; 0 = rollout.max_response_tokens", 0),

    # --- checkpoints and logs --------------------------------------------------------------------------------
    "checkpoint.every": Field(10, "rollout steps between checkpoints (the last is always saved); 0 = only the last", 0),
    "checkpoint.keep": Field(2, "newest checkpoints kept; the one before is used where the newest is damaged", 1),
    "checkpoint.keep_every": Field(0, "also keep the checkpoints of steps divisible by this; 0 = none", 0),
    "checkpoint.keep_best": Field(0, "also keep this many with the best evaluation (each evaluated step is then saved)", 0),
    "checkpoint.best_metric": Field("", "metric that says which is best; '' = avg@k of the first evaluation set"),
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
