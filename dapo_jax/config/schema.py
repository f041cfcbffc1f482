"""The one schema of every run: each field's default, meaning, unit and source, and the checks.

A config file is Python: `get_config()` starts from `base()` (or a preset), changes what it wants
and returns it. On the command line any leaf is overridden as `--config.optim.lr=1e-6`.

    from dapo_jax import config
    def get_config():
        c = config.paper()
        c.optim.lr = 2e-6
        return c

`validate` runs before anything compiles and raises `ConfigError` with one line per mistake.
Lengths are in TOKENS everywhere. "verl" is the code the DAPO authors name for their released run.
"""

import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections

from dapo_jax.gate import ConfigError as ConfigError


class Field(NamedTuple):
    default: Any
    doc: str
    low: float | None = None  # smallest allowed value
    high: float | None = None  # largest allowed value
    choices: tuple[str, ...] = ()  # allowed strings


# Beyond these a number is a slip of the keyboard, or asks for more memory than there is anywhere.
_TOKENS, _ROWS = 2**22, 2**20
INTEGERS, FLOATS = 2**31 - 1, 1e12  # of fields without a bound of their own

# fmt: off
SCHEMA: dict[str, Field] = {
    # --- the run -------------------------------------------------------------------------------
    "seed": Field(0, "seeds the problem order, every sample's uniforms, initialisation and minibatch shuffles", 0, 2**31 - 1),
    "steps": Field(100, "rollout steps (one = sample a batch, then `optim.minibatches` updates)", 0),
    "init_from": Field("", "where a run begins whose workdir has no checkpoint: RUN[@STEP] (a workdir or its checkpoints/), one step, or a Hugging Face model"),
    "init_state": Field("weights", "what it takes from there: the weights, or all (optimizer, counters, cursor: a branch that goes on at that step)", choices=("weights", "all")),

    # --- model: read from `path`, or from the fields below where path is '' ---------------------
    "model.path": Field("", "Hugging Face directory, also in a bucket (gs://...), or hub name of a Qwen2.5 or Qwen3 checkpoint; '' = random weights of the shape below"),
    "model.vocab_size": Field(48, "rows of the embedding (Qwen2.5: 151936 or 152064)", 2, 2**24),
    "model.hidden_size": Field(64, "width of the residual stream, D", 1, 2**20),
    "model.intermediate_size": Field(192, "width of the SwiGLU hidden layer, F", 1, 2**20),
    "model.num_layers": Field(2, "decoder blocks, L", 1, 1000),
    "model.num_heads": Field(4, "query heads, H", 1, 2**20),
    "model.num_kv_heads": Field(2, "key/value heads, K; divides num_heads", 1, 2**20),
    "model.head_dim": Field(16, "width of one head, even (RoPE rotates halves)", 2, 2**20),
    "model.rope_theta": Field(1e4, "RoPE base (Qwen2.5: 1e6)", 1.0, 1e15),
    "model.rms_eps": Field(1e-6, "epsilon inside RMSNorm's square root", 1e-12, 1.0),
    "model.tie_embeddings": Field(True, "the output head is the embedding's transpose"),
    "model.qkv_bias": Field(True, "q, k and v have biases (Qwen2.5; Qwen3 has none)"),
    "model.qk_norm": Field(False, "an RMSNorm over each head of q and of k (Qwen3)"),
    "model.init_std": Field(0.25, "std of the random embedding (linear layers: 1/sqrt(fan_in))", 0.0, 1e3),
    "model.dtype": Field("float32", "compute dtype; master weights and Adam are float32 (with LoRA the adapters', and the rest has this dtype)", choices=("float32", "bfloat16")),
    "model.scan_layers": Field(False, "training: scan over layers (one compiled body) instead of unrolling them"),
    "model.remat": Field("none", "what the backward pass recomputes: nothing, all but matmul outputs, blocks but for attention, whole blocks", choices=("none", "dots", "attention", "full")),
    "model.attention": Field("auto", "training attention: splash on TPU, cudnn on GPU, chunked (XLA) elsewhere; auto = by platform", choices=("auto", "chunked", "splash", "cudnn")),
    "model.attention_chunk": Field(512, "queries per step of training attention; bounds its scores to chunk x row", 1, _TOKENS),
    "model.head_chunk": Field(1024, "tokens per step of the output head; bounds logits to chunk x vocabulary", 1, _TOKENS),

    "model.float32_head": Field(False, "output weights and logits' products in float32 under a bfloat16 model, in sampler and trainer (ScaleRL, MiniMax-M1); logits are float32 anyway"),
    # LoRA (arXiv 2106.09685): W + alpha / rank * A B, of which only A and B are trained (docs/lora.md)
    "model.lora.rank": Field(0, "width of the adapters; 0 = none, all weights are trained", 0, 2**14),
    "model.lora.alpha": Field(16.0, "they count alpha / rank", 0.0, 1e6),
    "model.lora.targets": Field("q,k,v,o,gate,up,down", "linear layers of a block that have them"),

    # --- text ---------------------------------------------------------------------------------
    "tokenizer.path": Field("", "directory or file: tokenizer.json or SentencePiece .model; '' = model.path, else the embedded task's"),
    "tokenizer.chat": Field(False, "render prompts through the chat template (False: message contents as they are)"),
    "tokenizer.chat_template": Field("", "Jinja file; '' = the tokenizer's own"),

    # --- problems -----------------------------------------------------------------------------
    "data.train": Field("", "problem files, comma-separated: parquet, jsonl, json, csv, patterns (data/*.jsonl), or data sets of the hub (openai/gsm8k:main/train-*); '' = the embedded arithmetic task"),
    "data.on_bad": Field("refuse", "a row without an answer that the reward takes: stop and name it, or skip and count", choices=("refuse", "skip")),
    "data.columns": Field("", "the rows' own names, as prompt=query,answer=final,source=kind (a.b: b within a; answer= for none); '' = those of verl, TRL, GSM8K and MATH"),
    "data.template": Field("", "text with {problem} around each problem, or dapo, boxed, think, plain; '' = chats as they are, texts in the paper's prompt"),
    "data.system": Field("", "system message before each prompt, in place of the row's; '' = the row's, if any"),
    "data.on_long": Field("filter", "a prompt over max_prompt_tokens: leave the problem out, or cut the prompt's beginning (verl)", choices=("filter", "left_truncate")),
    "data.max_prompt_tokens": Field(32, "longest prompt (paper: 2048)", 1, _TOKENS),
    "data.embedded_problems": Field(4096, "training problems of the embedded task", 1, _ROWS),

    # --- supervised warm-up: worked examples of one's own, or of the embedded task, for which it makes a
    # base model that can but rarely does ----------------------------------------------------------------
    "supervised_warmup.files": Field("", "files of worked examples that the model imitates before its first step, comma-separated, of data.train's kinds: prompt+response, or messages (docs/warm_start.md); '' = none; not where init_from gives the weights"),
    "supervised_warmup.steps": Field(0, "steps on them; 0 = once through", 0),
    "supervised_warmup.lr": Field(1e-5, "peak learning rate of those steps (schedule in warmup.py)", 0.0, 10.0),
    "supervised_warmup.skill_steps": Field(0, "embedded task: steps on mostly careful worked examples; 0 = none", 0),
    "supervised_warmup.skill_lr": Field(3e-3, "peak learning rate of those steps (schedule in warmup.py)", 0.0, 10.0),
    "supervised_warmup.habit_steps": Field(0, "embedded task: steps on hasty examples that skip the work, so that care becomes rare", 0),
    "supervised_warmup.habit_lr": Field(1.5e-3, "peak learning rate of those steps", 0.0, 10.0),
    "supervised_warmup.optimizer": Field("adam", "of all these steps: Adam, or Muon for the matrices of the blocks and Adam for the rest", choices=("adam", "muon")),
    "supervised_warmup.batch": Field(64, "examples per step", 1, _ROWS),

    # --- rollout (paper section 4.1: 512 prompts x 16, 20480 tokens) -------------------------------
    "rollout.groups": Field(32, "groups (prompts) a training batch needs, N", 1, _ROWS),
    "rollout.group_size": Field(8, "responses per prompt, G; 1 with critic.enabled only", 1, _ROWS),
    "rollout.max_response_tokens": Field(32, "longest response, L_max, end-of-text token included (paper: 20480)", 1, _TOKENS),
    "rollout.temperature": Field(1.0, "divides the logits; the recorded log-probs are at this temperature", 1e-3, 1e3),
    "rollout.top_p": Field(1.0, "nucleus mass of training samples; below 1 the samples no longer come from the policy", 1e-6, 1.0),
    "rollout.slots": Field(128, "responses decoded at a time", 1, _ROWS),
    "rollout.chunk": Field(8, "tokens decoded between two host visits", 1, _TOKENS),
    "rollout.prefill_prompts": Field(16, "prompts per prefill call", 1, _ROWS),
    "rollout.prefill_tokens": Field(512, "tokens of each prompt a prefill call; longer prompts take several", 8, _TOKENS),
    "rollout.page_tokens": Field(0, "tokens of a cache page; 0 = 128, and on CPU what model/paged.py measured to be quick", 0, _TOKENS),
    "rollout.cache_dtype": Field("model", "keys and values while sampling: in model.dtype, or int8 with a scale a token and head, half the bytes; needs loss.importance_cap", choices=("model", "int8")),
    "rollout.cache_fraction": Field(1.0, "size of the cache, of what all slots at full length would fill; rows that no longer fit are made again later", 1e-6, 1.0),

    "rollout.staleness": Field(0, "S: a step ends when its batch is there, unfinished responses go on in the next, and no trained token is older than S steps (docs/staleness.md); needs loss.importance_cap; 0 = a step ends when all of its responses have", 0, 64),

    # --- dynamic sampling (paper Eq. 11) -------------------------------------------------------------
    "dynamic_sampling.enabled": Field(True, "keep only groups with 0 < correct < G, and refill what is missing"),
    "dynamic_sampling.max_rounds": Field(10, "generation rounds per step before `on_exhausted` applies (verl: 10)", 1),
    "dynamic_sampling.refill": Field(True, "False: one round of `rollout.groups` problems; groups that do not teach leave the batch and nothing takes their place (AReaL dynamic_bs, ScaleRL)"),
    "dynamic_sampling.on_exhausted": Field("train", "rounds are used up: train on the groups there are, or stop with a checkpoint", choices=("train", "stop")),
    "dynamic_sampling.max_empty_steps": Field(3, "steps in a row without one learnable group before the run stops with a checkpoint", 1),
    "dynamic_sampling.surplus": Field("drop", "accepted groups beyond N: sample their problems again next step, or carry the groups over", choices=("drop", "carry")),

    # --- curriculum: from the pass rate of each problem when it was last drawn (docs/curriculum.md) -------
    "curriculum.pass_rate_cap": Field(0.0, "No-Positive-Resampling: a problem that came to this pass rate is left out of later epochs (ScaleRL: .9); 0 = none is", 0.0, 1.0),
    "curriculum.revisit_epochs": Field(0, "epochs after which such a problem is drawn again; 0 = never", 0),
    "curriculum.band_low": Field(0.0, "band pass: Dynamic Sampling keeps groups of a pass rate above this (a reward that is a score alone: mean score)", 0.0, 1.0),
    "curriculum.band_high": Field(1.0, "and below this; 0 and 1 = no band", 0.0, 1.0),
    "curriculum.temperature_schedule": Field("constant", "how the temperature of sampling goes from rollout.temperature to temperature_end", choices=("constant", "linear", "cosine")),
    "curriculum.temperature_steps": Field(0, "ROLLOUT steps in which it does", 0),
    "curriculum.temperature_end": Field(1.0, "where it goes", 1e-3, 1e3),

    # --- reward (paper Eq. 7 and 13) -------------------------------------------------------------------
    "reward.verifier": Field("dapo", "verifier that decides correctness (another one is logged beside it); data/verifier.py, data/answers.py", choices=("dapo", "integer", "boxed", "math", "exact", "auto")),
    "reward.function": Field("", "in place of the verifier: functions score(problem, response) -> Grade, as FILE.py:NAME, verifiers, or format; several as NAME=WEIGHT*WHAT with commas between"),
    "reward.by_source": Field("", "another reward for some data sources: SOURCE=REWARD;SOURCE=REWARD, * in SOURCE for any text, REWARD as in reward.function"),
    "reward.format_tags": Field("think,answer", "tags that the reward 'format' wants in this order, with commas between"),
    "reward.workers": Field(0, "processes of each host that judge, with a limit of time; 0 = none, judged where the run is", 0, 1000),
    "reward.timeout_s": Field(10.0, "seconds that a worker has for one response", 0.01),
    "reward.on_error": Field("stop", "a response that the reward fails on or takes too long for: stop and name it, or count it as a miss with the score reward.wrong", choices=("stop", "miss")),
    "reward.correct": Field(1.0, "reward of a correct response", -1e6, 1e6),
    "reward.wrong": Field(-1.0, "reward of a wrong response", -1e6, 1e6),
    "reward.overlong_buffer_tokens": Field(12, "L_cache: the penalty ramps over this many last tokens (paper: 4096)", 0, _TOKENS),
    "reward.overlong_penalty": Field(1.0, "size of the full penalty at L_max; 0 = no soft punishment", 0.0, 1e6),

    # --- advantage -------------------------------------------------------------------------------------
    "advantage.ddof": Field(1, "1: sample std of a group, as in verl; 0: population std", 0, 1),
    "advantage.epsilon": Field(1e-6, "added to the std (verl: 1e-6; AReaL 1e-5; TRL 1e-4)", 1e-12, 1e6),
    "advantage.scale": Field("group", "what the reward less its group's mean is divided by: the group's std, one std of the batch, nothing", choices=("group", "batch", "none")),
    "advantage.leave_one_out": Field(False, "the mean of the other responses of the group in place of the group's (RLOO)"),
    "advantage.whiten": Field(False, "normalise a second time, over the trained tokens of the batch (AReaL's adv_norm)"),

    # --- objective (paper Eq. 8) ------------------------------------------------------------------------
    "loss.objective": Field("ppo", "a token's loss, by its name in dapo_jax/variants/objectives.py: ppo (the paper's), cispo, gspo, gspo_token, rloo"),
    "loss.clip_low": Field(0.2, "ratio is clipped below at 1 - clip_low", 0.0, 1.0),
    "loss.clip_high": Field(0.28, "ratio is clipped above at 1 + clip_high (Clip-Higher; GRPO: = clip_low)", 0.0, 1e6),
    "loss.dual_clip": Field(0.0, "bound c > 1 on a negative advantage's loss (verl: 10); 0 = off (paper)", 0.0, 1e6),
    "loss.log_ratio_max": Field(20.0, "log-ratios are clamped to +- this before exp, so that one token cannot overflow", 1.0, 80.0),
    "loss.normalizer": Field("batch_tokens", "what a token's loss is divided by; see dapo/objective.py", choices=("batch_tokens", "group_tokens", "chunk_tokens", "sequence", "constant")),
    "loss.chunk_sequences": Field(32, "responses per chunk of normalizer='chunk_tokens'", 1, _ROWS),
    "loss.overlong_filter": Field("off", "truncated responses: off = train on them; loss = leave the loss; group = leave loss and group statistics", choices=("off", "loss", "group")),
    "loss.old_logprobs": Field("recompute", "denominator of the ratio: the trainer's own pass, or the sampler's records, rounding and all: a pass less", choices=("recompute", "reuse")),
    "loss.importance_cap": Field(0.0, "upper bound of the importance weight pi_trainer/pi_sampler on recomputed log-probs; 0 = no weight", 0.0, 1e6),
    "loss.importance": Field("token", "the weight, by its name in dapo_jax/variants/objectives.py: of a token, of a whole response (sequence: product, mean: geometric mean); truncated at the cap, or with _mask zeroed beyond it"),
    "loss.importance_floor": Field(0.0, "masks also zero weights below this (IcePop: .5)", 0.0, 1.0),
    "loss.kl_coef": Field(0.0, "weight of the k3 estimate of KL(policy || start of the run); 0 = no reference model", 0.0, 1e6),
    "loss.positive_coef": Field(0.0, "mu: weight of the log-likelihood loss on right responses (VAPO: .1), with or without a value model; 0 = none", 0.0, 1e6),
    "loss.entropy_coef": Field(0.0, "weight of the entropy bonus", 0.0, 1e6),
    "loss.entropy_enough": Field(0.0, "nats per token from which on the bonus no longer pushes: a guard against collapse only; 0 = no end", 0.0),

    # --- value model (VAPO, arXiv 2504.05118; docs/vapo.md): advantages by GAE in place of the group's ---------
    "critic.enabled": Field(False, "a value model beside the policy, and its GAE advantages"),
    "critic.init_from": Field("", "Hugging Face directory or hub name it starts from: a reward model (its score.weight is the head) or a language model (new head); '' = the policy's weights and a new head"),
    "critic.lr": Field(2e-6, "its AdamW learning rate; betas, epsilon, decay and clip are optim.*'s", 0.0, 10.0),
    "critic.warmup_steps": Field(0, "ROLLOUT steps of linear warm-up of that rate", 0),
    "critic.pretrain_steps": Field(50, "first ROLLOUT steps, in which only the value model learns (VAPO section 5.1: 50); the policy's warm-up begins behind them", 0),
    "critic.gamma": Field(1.0, "discount per token", 0.0, 1.0),
    "critic.lambda_value": Field(1.0, "lambda of the value model's targets (decoupled GAE); 1 = the target is the reward", 0.0, 1.0),
    "critic.lambda_policy": Field(0.95, "lambda of the policy's advantages where length_alpha is 0", 0.0, 1.0),
    "critic.length_alpha": Field(0.05, "alpha of the policy's length-adaptive lambda 1 - 1 / (alpha l) (VAPO Eq. 5), l tokens; 0 = lambda_policy at any length", 0.0, 1e6),
    "critic.bootstrap_truncated": Field(False, "behind a response cut at rollout.max_response_tokens the value of the state it broke off in follows, in place of its reward; False = its reward, and 0 behind it"),
    "critic.clip": Field(0.0, "a value learns while within this of what it was at the start of the step, in the reward's unit (PPO's value clip); 0 = off", 0.0, 1e6),

    # --- optimizer -----------------------------------------------------------------------------------------
    "optim.lr": Field(3e-4, "AdamW learning rate after warm-up (paper: 1e-6)", 0.0, 10.0),
    "optim.warmup_steps": Field(2, "ROLLOUT steps of linear warm-up (paper: 20; verl: 10)", 0),
    "optim.schedule": Field("constant", "the learning rate after warm-up", choices=("constant", "linear", "cosine")),
    "optim.decay_steps": Field(0, "ROLLOUT steps after warm-up in which `schedule` falls to lr_end", 0),
    "optim.lr_end": Field(0.0, "what it falls to, as a share of lr", 0.0, 1.0),
    "optim.warmup_from_zero": Field(False, "the first rollout step trains at lr 0, as verl's schedule does"),
    "optim.b1": Field(0.9, "Adam's first decay", 0.0, 0.999999),
    "optim.b2": Field(0.95, "Adam's second decay (verl: 0.999)", 0.0, 0.999999),
    "optim.eps": Field(1e-8, "Adam's epsilon", 1e-20, 1.0),
    "optim.weight_decay": Field(0.0, "decoupled weight decay (verl: 0.1)", 0.0, 1e6),
    "optim.clip_norm": Field(1.0, "global gradient norm is clipped to this", 0.0, 1e9),
    "optim.minibatches": Field(8, "gradient updates per rollout step (paper: 16)", 1, _ROWS),
    "optim.micro_batch_rows": Field(8, "packed rows per pass over the devices, rounded up to a multiple of mesh data x fsdp; gradients accumulate over passes in float32", 1, _ROWS),
    "optim.row_tokens": Field(0, "length of a packed row; 0 = longest prompt + longest response, rounded up to 8", 0, _TOKENS),
    "optim.share_prompts": Field(False, "responses to one prompt that lie in one packed row share its tokens, which are then computed once; not with splash attention, nor with a value model"),
    "optim.offload": Field(False, "keep Adam's moments in the hosts' memory between updates"),
    "optim.max_skipped": Field(8, "updates in a row left out as not finite before the run stops with a checkpoint", 1),

    # --- evaluation ---------------------------------------------------------------------------------------
    "eval.files": Field("", "problem files, comma-separated name=path, as in data.train; '' = the embedded held-out and harder sets"),
    "eval.every": Field(20, "rollout steps between evaluations (first and last are always evaluated); 0 = those two only", 0),
    "eval.k": Field(4, "samples per problem (paper: 32)", 1, _ROWS),
    "eval.max_problems": Field(128, "problems per file, the first ones; 0 = all", 0),
    "eval.temperature": Field(1.0, "sampling temperature of evaluation; 0 = greedy", 0.0, 1e3),
    "eval.top_p": Field(0.7, "second setting evaluated beside top_p=1 (paper: 0.7); 1 = none", 1e-6, 1.0),
    "eval.stop_strings": Field("", "texts that end a response of evaluation, separated by |, with \\n for a new line; '' = only stop tokens do"),
    "eval.max_response_tokens": Field(0, "longest response in evaluation; 0 = rollout.max_response_tokens", 0, _TOKENS),

    # --- checkpoints and logs --------------------------------------------------------------------------------
    "checkpoint.every": Field(10, "rollout steps between checkpoints (the last is always saved); 0 = only the last", 0),
    "checkpoint.keep": Field(2, "newest checkpoints kept; the one before is used where the newest is damaged", 1),
    "checkpoint.keep_every": Field(0, "also keep the checkpoints of steps divisible by this; 0 = none", 0),
    "checkpoint.keep_best": Field(0, "also keep this many with the best evaluation (each evaluated step is then saved)", 0),
    "checkpoint.best_metric": Field("", "metric that says which is best; '' = avg@k of the first evaluation set"),
    "checkpoint.directory": Field("", "where checkpoints go, e.g. gs://bucket/run; '' = WORKDIR/checkpoints"),
    "checkpoint.export_every": Field(0, "rollout steps between exports to WORKDIR/export/step_N, in the format of Hugging Face and bfloat16 (the last step is exported too); 0 = none", 0),
    "checkpoint.export_keep": Field(2, "newest exports kept", 1),
    "checkpoint.journal_gb": Field(16.0, "most GB of finished responses kept under WORKDIR/journal for steps that no checkpoint holds yet; 0 = none", 0.0, 1e6),
    "log.samples": Field(4, "groups per step of which rollouts/ keeps a right and a wrong response, and as many truncated responses", 0),
    "log.tensorboard": Field(True, "write TensorBoard events beside metrics.jsonl"),
    "log.wandb": Field("", "project at Weights & Biases that gets numbers, samples and alarms too (pip install wandb); '' = none"),
    "log.mlflow": Field("", "experiment of MLflow that gets numbers, samples and alarms too (pip install mlflow); '' = none"),
    "log.text_every": Field(10, "rollout steps between text samples in TensorBoard, W&B and MLflow; 0 = none", 0),
    "log.alarm_command": Field("", "command that gets an alarm as JSON on its standard input, such as 'curl -d @- URL'; '' = none"),

    # --- alarms of a run that goes wrong --------------------------------------------------------------------
    "guard.entropy_min": Field(0.0, "alarm below this mean entropy of a token, nats (collapse); 0 = off", 0.0),
    "guard.entropy_max": Field(0.0, "alarm above it (noise); 0 = off", 0.0),
    "guard.entropy_fall": Field(0.1, "alarm where entropy falls below this share of its first steps' and accuracy no longer rises; 0 = off", 0.0, 1.0),
    "guard.entropy_rise": Field(3.0, "alarm where it grows beyond this many times, and accuracy no longer rises; 0 = off", 0.0),
    "guard.length_min": Field(0.0, "alarm below this mean response length; 0 = off", 0.0),
    "guard.length_max": Field(0.0, "alarm above it; 0 = off", 0.0),
    "guard.length_rise": Field(1.5, "alarm where it grows by this factor in ten steps and accuracy no longer rises; 0 = off", 0.0),
    "guard.truncated_max": Field(0.5, "alarm above this share of truncated responses; 0 = off", 0.0, 1.0),
    "guard.gap_max": Field(-1.0, "alarm above this difference of sampler's and trainer's log-probs, nats; -1 = 1e-3 for float32 on CPU and GPU, else 1; 0 = off", -1.0),
    "guard.ess_min": Field(0.5, "with rollout.staleness: alarm below this effective sample size of the batch's importance weights, as a share of its tokens; 0 = off", 0.0, 1.0),
    "guard.explained_min": Field(0.1, "with critic.enabled: alarm below this share of the returns' variance explained by the value model, after critic.pretrain_steps and while accuracy is below .9; 0 = off", 0.0, 1.0),
    "guard.accept_min": Field(0.01, "alarm below this share of drawn problems with right and wrong responses; 0 = off", 0.0, 1.0),
    "guard.eval_fall": Field(0.1, "alarm where avg@k of a set (at top_p=1) lies this far below its best at two evaluations in a row, with training accuracy above what it was at that best; 0 = off", 0.0, 1.0),
    "guard.stop_after": Field(0, "steps in a row with an alarm before the run stops with a checkpoint; 0 = only warn", 0),
    "guard.hang_factor": Field(10.0, "print all Python stacks when a phase (a chunk, an update, a save) takes this many times its usual time; 0 = off, also the next three", 0.0),
    "guard.hang_floor_s": Field(120.0, "and at least this many seconds", 0.0),
    "guard.hang_end_s": Field(1800.0, "and leave with status 75, which the launchers answer by starting again, after at least this many; 0 = only print", 0.0),
    "guard.hang_first_s": Field(7200.0, "the same for the first phase of a kind, which compiles or loads; 0 = only print", 0.0),

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


# Fields that hold paths, of one file or of several; the command line expands `~` in them.
PATHS = (
    "init_from",
    "model.path",
    "tokenizer.path",
    "tokenizer.chat_template",
    "critic.init_from",
    "data.train",
    "eval.files",
    "checkpoint.directory",
    "supervised_warmup.files",
)


def base() -> "Config":
    """Every field at its default: full DAPO on the embedded task. Locked: unknown names raise."""
    root = Config()
    for name, field in SCHEMA.items():
        *parents, leaf = name.split(".")
        node = root
        for depth, parent in enumerate(parents, 1):
            if parent not in node:
                node[parent] = Config(section=".".join(parents[:depth]))
            node = node[parent]
        node[leaf] = field.default
    return root.lock()


# ------------------------------------------------------------------------------------------------
# Old names
# ------------------------------------------------------------------------------------------------

_OLD_SECTIONS = {"sampling": "dynamic_sampling", "warmup": "supervised_warmup"}

# Old name -> today's: on the command line, in config files, and in configs that older runs saved.
RENAMED = {
    "sampling.dynamic": "dynamic_sampling.enabled",
    "optim.micro_rows": "optim.micro_batch_rows",
    "reward.mode": "reward.verifier",
    "checkpoint.best": "checkpoint.best_metric",
    "eval.problems": "eval.max_problems",
} | {
    f"{old}.{name.removeprefix(new + '.')}": name
    for old, new in _OLD_SECTIONS.items()
    for name in SCHEMA
    if name.startswith(new + ".") and name != "dynamic_sampling.enabled"
}

_warned: set[str] = set()  # old names of which this process has told


def today(name: str) -> str:
    """Today's name of a field. An old one is told on stderr, once per process."""
    new = RENAMED.get(name, name)
    if new != name and name not in _warned:
        _warned.add(name)
        print(f"warning: config.{name} is now config.{new}", file=sys.stderr)
    return new


def of_run(text: str | bytes) -> "Config":
    """The config that a run has left in its config.json. Fields that this version does not know are
    left out; those that the run did not know have their defaults. ValueError: it is not a run's."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("no JSON") from error
    if not isinstance(saved, dict) or "rollout.group_size" not in saved:
        raise ValueError("not a run's")
    config = base()
    known = {k: v for k, v in translated(saved).items() if k in SCHEMA}
    try:
        config.update_from_flattened_dict(known)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return config


def translated(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config as any version saved it, with today's names."""
    return {RENAMED.get(name, name): value for name, value in saved.items()}


class Config(ml_collections.ConfigDict):
    """A config or one section of it: a ConfigDict that understands the old names of its fields, and
    whose complaint about an unknown one is the project's."""

    _prefix = ""  # 'optim.' for the section optim

    def __init__(self, *args, section: str = "", **kwargs):
        object.__setattr__(self, "_prefix", f"{section}." if section else "")
        super().__init__(*args, **kwargs)

    def copy_and_resolve_references(self, visit_map=None):
        copied = super().copy_and_resolve_references(visit_map)
        object.__setattr__(copied, "_prefix", self._prefix)
        return copied

    def _find(self, key) -> tuple[ml_collections.ConfigDict, Any]:
        """(node, key there) of an own key, dotted or not, old or not."""
        full = f"{self._prefix}{key}"
        *sections, leaf = today(full).removeprefix(self._prefix).split(".")
        node = self
        for section in sections:
            node = ml_collections.ConfigDict.__getitem__(node, section)
        return node, leaf

    def __getitem__(self, key):
        if not self._prefix and key in _OLD_SECTIONS:
            return _OldSection(self, key)
        if f"{self._prefix}{key}" in RENAMED:
            node, leaf = self._find(key)
            return node[leaf]
        try:
            return super().__getitem__(key)
        except KeyError:
            if str(key).startswith("_"):  # Python looks for methods
                raise
            raise KeyError(unknown(f"{self._prefix}{key}")) from None

    def __setitem__(self, key, value):
        if not self._prefix and key in _OLD_SECTIONS and isinstance(value, Mapping):
            for leaf, inner in value.items():
                self[key][leaf] = inner
        elif f"{self._prefix}{key}" in RENAMED:
            node, leaf = self._find(key)
            node[leaf] = value
        elif self.is_locked and key not in self:
            raise KeyError(unknown(f"{self._prefix}{key}"))
        else:
            super().__setitem__(key, value)

    def update_from_flattened_dict(self, flattened_dict, strip_prefix=""):
        own = {k: v for k, v in flattened_dict.items() if k.startswith(strip_prefix)}
        own = {today(self._prefix + k.removeprefix(strip_prefix)): v for k, v in own.items()}
        super().update_from_flattened_dict({k.removeprefix(self._prefix): own[k] for k in own})


class _OldSection:
    """What `c.sampling` still is: a view that leads each old field to where it is today."""

    def __init__(self, root: Config, name: str):
        object.__setattr__(self, "_root", root)
        object.__setattr__(self, "_name", name)

    def _place(self, leaf: str):
        full = f"{self._name}.{leaf}"
        section = self._root[_OLD_SECTIONS[self._name]]
        return self._root._find(full) if full in RENAMED else (section, leaf)

    def __getattr__(self, leaf: str):
        node, name = self._place(leaf)
        return getattr(node, name)

    def __setattr__(self, leaf: str, value) -> None:
        node, name = self._place(leaf)
        setattr(node, name, value)

    __getitem__, __setitem__ = __getattr__, __setattr__


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


# The names that verl, TRL, AReaL, OpenRLHF, tunix and MaxText have for our fields, or for what comes
# closest: the last part of a name, or its last two where one would be ambiguous.
PEERS = {
    "model.path": "model model_name_or_path pretrain load_parameters_path",
    "data.train": "train_files train_dataset dataset_name prompt_data train_ds dataset_path",
    "eval.files": "val_files eval_dataset valid_dataset eval_ds eval_dataset_name",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_prefill_predict_length",
    "data.on_long": "truncation filter_overlong_prompts",
    "tokenizer.chat": "return_raw_chat apply_chat_template",
    "tokenizer.chat_template": "chat_template_path",
    "rollout.groups": "train_batch_size generation_batch_size rollout_batch_size batch_size",
    "rollout.group_size": "n num_generations n_samples n_samples_per_prompt",
    "rollout.max_response_tokens": "max_response_length max_completion_length max_new_tokens "
    "max_tokens generate_max_len max_tokens_to_generate max_target_length",
    "rollout.temperature": "decode_sampling_temperature",
    "rollout.top_p": "decode_sampling_nucleus_p",
    "rollout.slots": "max_num_seqs max_concurrent_rollouts vllm_generate_batch_size "
    "rollout_vllm_max_num_seqs",
    "rollout.cache_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization "
    "mem_fraction_static kv_cache_size hbm_utilization_vllm",
    "rollout.cache_dtype": "kv_cache_dtype quantize_kvcache kv_quant_dtype",
    "dynamic_sampling.enabled": "filter_groups.enable filter_groups dynamic_filter_fn "
    "dynamic_filtering",
    "dynamic_sampling.max_rounds": "max_num_gen_batches",
    "curriculum.pass_rate_cap": "no_resampling_pass_rate",
    "curriculum.band_low": "dynamic_filtering_range dynamic_filtering_reward_range",
    "reward.function": "reward_funcs reward_fn reward_fns reward_weights "
    "custom_reward_function.path custom_reward_function remote_rm_url functions",
    "reward.correct": "reward_scaling reward_bias",
    "reward.wrong": "penalty_incorrect_answer",
    "reward.overlong_buffer_tokens": "overlong_buffer.len soft_punish_cache overlong_tokens "
    "overlong_buffer_len overlong_buffer_length",
    "reward.overlong_penalty": "overlong_buffer.enable penalty_factor overlong_reward_penalty "
    "overlong_penalty_factor overlong_buffer_penalty",
    "loss.clip_low": "clip_ratio_low clip_ratio epsilon eps_clip grpo_epsilon",
    "loss.clip_high": "clip_ratio_high epsilon_high eps_clip_higher eps_clip_low_high",
    "loss.dual_clip": "clip_ratio_c delta c_clip",
    "loss.normalizer": "loss_agg_mode",
    "loss.objective": "loss_type loss_mode policy_loss.loss_mode policy_loss_type loss_algo loss_fn "
    "importance_sampling_level use_cispo_loss",
    "loss.importance": "rejection_sampling rollout_is vllm_importance_sampling_mode",
    "advantage.scale": "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm",
    "advantage.whiten": "adv_norm",
    "advantage.leave_one_out": "adv_estimator advantage_estimator use_leave_one_out_baseline",
    "dynamic_sampling.refill": "dynamic_bs zero_variance_filter filter_zero_std_samples",
    "model.float32_head": "cast_lm_head_to_fp32",
    "model.lora.rank": "lora_rank lora_r use_peft use_lora lora",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules lora_target_modules lora_module_path",
    "optim.schedule": "lr_scheduler_type lr_decay_style lr_scheduler warmup_style",
    "optim.lr_end": "min_lr_ratio",
    "loss.overlong_filter": "mask_truncated_completions mask_no_eos_with_zero",
    "loss.old_logprobs": "recompute_logprob bypass_mode",
    "loss.importance_cap": "tis_imp_ratio_cap vllm_importance_sampling_cap behav_imp_weight_cap "
    "behave_imp_weight_cap enable_vllm_is_correction use_decoupled_loss",
    "loss.kl_coef": "kl_loss_coef use_kl_loss beta kl_ctl init_kl_coef grpo_beta",
    "loss.entropy_coef": "entropy_coeff entropy_loss_coef",
    "critic.lr": "critic_learning_rate critic.optim.lr",
    "critic.pretrain_steps": "critic_warmup critic_warmup_steps policy_training_start_step",
    "critic.lambda_policy": "lam gae_lambda lambd",
    "critic.lambda_value": "gae_lambda_value",
    "critic.length_alpha": "length_adaptive_alpha vapo_length_adaptive_gae",
    "critic.clip": "cliprange_value value_clip value_eps_clip",
    "critic.init_from": "critic.model.path critic_pretrain critic_path",
    "loss.positive_coef": "positive_example_nll_weight positive_nll_coef",
    "optim.lr": "learning_rate actor_learning_rate",
    "optim.warmup_steps": "lr_warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio "
    "warmup_steps_proportion",
    "optim.weight_decay": "l2",
    "optim.b1": "adam_beta1 beta1 adam_b1 betas adam_betas",
    "optim.b2": "adam_beta2 beta2 adam_b2",
    "optim.eps": "adam_epsilon",
    "optim.clip_norm": "grad_clip max_grad_norm gradient_clipping max_norm "
    "gradient_clipping_threshold",
    "optim.minibatches": "ppo_mini_batch_size steps_per_generation ppo_n_minibatches "
    "mini_batch_size",
    "optim.micro_batch_rows": "ppo_micro_batch_size_per_gpu per_device_train_batch_size "
    "gradient_accumulation_steps micro_train_batch_size train_micro_batch_size",
    "optim.row_tokens": "max_tokens_per_mb use_dynamic_bsz packing_samples",
    "optim.offload": "optimizer_offload adam_offload",
    "model.remat": "enable_gradient_checkpointing gradient_checkpointing remat_policy",
    "model.dtype": "bf16",
    "steps": "total_training_steps total_epochs max_steps num_train_epochs total_train_epochs "
    "total_train_steps num_episodes num_batches",
    "eval.every": "test_freq eval_steps evaluator.freq_steps eval_every_n_steps",
    "eval.k": "val_kwargs.n num_generations_eval eval_n_samples_per_prompt num_eval_passes",
    "eval.temperature": "val_kwargs.temperature eval_temperature greedy",
    "checkpoint.every": "save_freq save_steps saver.freq_steps save_interval_steps",
    "checkpoint.keep": "max_actor_ckpt_to_keep save_total_limit max_ckpt_num max_to_keep",
    "checkpoint.directory": "default_local_dir output_dir fileroot ckpt_path "
    "checkpoint_root_directory",
    "init_from": "resume_mode resume_from_path resume_from_checkpoint load_checkpoint",
    "log.wandb": "project_name report_to use_wandb wandb_project",
    "seed": "data_shuffle_seed",
    "mesh.fsdp": "fsdp_size ici_fsdp_parallelism zero_stage",
    "mesh.tensor": "tensor_model_parallel_size vllm_tensor_parallel_size ds_tensor_parallel_size "
    "ici_tensor_parallelism",
}
_OF_PEERS = {peer: ours for ours, peers in PEERS.items() for peer in peers.split()}


def unknown(name: str) -> str:
    """What to say of a field that is none."""
    return f"config.{name}: no such field{nearest(name)}"


def nearest(name: str) -> str:
    """', did you mean a, b?' for a mistyped field name, or for a peer's; '' when nothing is
    close."""
    *parents, leaf = name.split(".")
    for theirs in (".".join([*parents[-1:], leaf]), leaf):
        if theirs in _OF_PEERS:
            return f"; did you mean {_OF_PEERS[theirs]}?"
    short: dict[str, list[str]] = {}
    for known in SCHEMA:
        short.setdefault(known.rsplit(".", 1)[-1], []).append(known)
    close = difflib.get_close_matches(name, SCHEMA, n=3, cutoff=0.5)
    for near in difflib.get_close_matches(leaf, short, n=3, cutoff=0.6):
        close += [k for k in short[near] if k not in close]
    for near in difflib.get_close_matches(leaf, _OF_PEERS, n=1, cutoff=0.8):
        close = [_OF_PEERS[near], *(k for k in close if k != _OF_PEERS[near])]
    return f"; did you mean {', '.join(close[:3])}?" if close else ""
