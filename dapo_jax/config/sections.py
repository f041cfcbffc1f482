"""Sections whose readers stand above config/: devices, warm-up, evaluation, checkpoints, logs, alarms."""
# fmt: off

from dataclasses import dataclass, field

from dapo_jax.gate import ROWS, TOKENS, Section, setting, wrong


@dataclass
class SupervisedWarmup(Section, place="supervised_warmup"):
    """Worked examples that the model imitates before its first step: the user's, or those of the
    embedded task, which make a base model that solves a problem now and then."""

    files: str = setting("", "files of worked examples, comma-separated, of data.train's kinds: prompt+response, or messages (docs/warm_start.md); '' = none; skipped if init_from gives the weights", path=True)
    steps: int = setting(0, "steps on them; 0 = one pass over the files", 0)
    lr: float = setting(1e-5, "peak learning rate of those steps (schedule in warmup.py)", 0.0, 10.0)
    skill_steps: int = setting(0, "embedded task: steps on mostly careful worked examples; 0 = none", 0)
    skill_lr: float = setting(3e-3, "peak learning rate of those steps (schedule in warmup.py)", 0.0, 10.0)
    habit_steps: int = setting(0, "embedded task: steps on hasty examples that skip the work, so that care becomes rare", 0)
    habit_lr: float = setting(1.5e-3, "peak learning rate of those steps", 0.0, 10.0)
    optimizer: str = setting("adam", "for all these steps: Adam, or Muon for the matrices of the blocks and Adam for the rest", choices=("adam", "muon"))
    batch: int = setting(64, "examples per step", 1, ROWS)

    def mistakes(self) -> list[str]:
        return wrong((self.steps and not self.files, "config.supervised_warmup.steps: wants supervised_warmup.files, the examples to take them on"))


@dataclass
class Eval(Section, place="eval"):
    """Evaluation during and after training."""

    files: str = setting("", "problem files, comma-separated name=path, as in data.train; '' = the embedded held-out and harder sets", path=True)
    every: int = setting(20, "rollout steps between evaluations (first and last are always evaluated); 0 = those two only", 0)
    k: int = setting(4, "samples per problem (paper: 32)", 1, ROWS)
    max_problems: int = setting(128, "problems per file, the first ones; 0 = all", 0)
    temperature: float = setting(1.0, "sampling temperature of evaluation; 0 = greedy", 0.0, 1e3)
    top_p: float = setting(0.7, "second setting evaluated beside top_p=1 (paper: 0.7); 1 = none", 1e-6, 1.0)
    stop_strings: str = setting("", "texts that end a response in evaluation, separated by |, with \\n for a new line; '' = only stop tokens do")
    max_response_tokens: int = setting(0, "longest response in evaluation; 0 = rollout.max_response_tokens", 0, TOKENS)
    with_rollout: bool = setting(False, "an evaluation's responses are drawn in one call with the next step's first round, so that the longest are waited for once; wants rollout.temperature = eval.temperature")

    def mistakes(self) -> list[str]:
        return wrong(("" in stop_strings(self.stop_strings), f"config.eval.stop_strings: {self.stop_strings!r} has an empty text between its |"))


def stop_strings(text: str) -> list[str]:
    """The texts that `eval.stop_strings` lists."""
    return [t.replace("\\n", "\n") for t in text.split("|")] if text else []


@dataclass
class Checkpoint(Section, place="checkpoint"):
    """What is saved, when, and for how long."""

    every: int = setting(10, "rollout steps between checkpoints (the first and the last are always saved); 0 = those two only", 0)
    keep: int = setting(2, "newest checkpoints kept; if the newest is damaged, the one before is used", 1)
    keep_every: int = setting(0, "also keep the checkpoints of steps divisible by this; 0 = none", 0)
    keep_best: int = setting(0, "also keep this many with the best evaluation (each evaluated step is then saved)", 0)
    best_metric: str = setting("", "metric that ranks them; '' = avg@k of the first evaluation set")
    directory: str = setting("", "where checkpoints go, e.g. gs://bucket/run; '' = WORKDIR/checkpoints", path=True)
    export_every: int = setting(0, "rollout steps between exports to WORKDIR/export/step_N, in the format of Hugging Face and bfloat16 (the last step is exported too); 0 = none", 0)
    export_keep: int = setting(2, "newest exports kept", 1)
    journal_gb: float = setting(16.0, "limit in GB of finished responses kept under WORKDIR/journal for steps that no checkpoint holds yet; 0 = none", 0.0, 1e6)


@dataclass
class Log(Section, place="log"):
    """Samples, dashboards and the alarm command."""

    samples: int = setting(4, "groups per step for which rollouts/ keeps a right and a wrong response, and as many truncated responses", 0)
    tensorboard: bool = setting(True, "write TensorBoard events beside metrics.jsonl")
    wandb: str = setting("", "Weights & Biases project that also gets numbers, samples and alarms (pip install wandb); '' = none")
    mlflow: str = setting("", "MLflow experiment that also gets numbers, samples and alarms (pip install mlflow); '' = none")
    text_every: int = setting(10, "rollout steps between text samples in TensorBoard, W&B and MLflow; 0 = none", 0)
    alarm_command: str = setting("", "command that gets an alarm as JSON on its standard input, such as 'curl -d @- URL'; '' = none")


@dataclass
class Guard(Section, place="guard"):
    """Alarms of a run that goes wrong."""

    entropy_min: float = setting(0.0, "alarm below this mean entropy of a token, nats (collapse); 0 = off", 0.0)
    entropy_max: float = setting(0.0, "alarm above it (noise); 0 = off", 0.0)
    entropy_fall: float = setting(0.1, "alarm if entropy falls below this share of its value in the first steps and accuracy no longer rises; 0 = off", 0.0, 1.0)
    entropy_rise: float = setting(3.0, "alarm if it grows beyond this many times that value and accuracy no longer rises; 0 = off", 0.0)
    length_min: float = setting(0.0, "alarm below this mean response length; 0 = off", 0.0)
    length_max: float = setting(0.0, "alarm above it; 0 = off", 0.0)
    length_rise: float = setting(1.5, "alarm if it grows by this factor in ten steps and accuracy no longer rises; 0 = off", 0.0)
    truncated_max: float = setting(0.5, "alarm above this share of truncated responses; 0 = off", 0.0, 1.0)
    gap_max: float = setting(-1.0, "alarm above this difference between the sampler's and the trainer's log-probs, nats; -1 = 1e-3 for float32 on CPU and GPU, else 1; 0 = off", -1.0)
    ess_min: float = setting(0.5, "with rollout.staleness: alarm below this effective sample size of the batch's importance weights, as a share of its tokens; 0 = off", 0.0, 1.0)
    explained_min: float = setting(0.1, "with critic.enabled: alarm below this share of the returns' variance explained by the value model, after critic.pretrain_steps and while accuracy is below .9; 0 = off", 0.0, 1.0)
    accept_min: float = setting(0.01, "alarm below this share of drawn problems with right and wrong responses; 0 = off", 0.0, 1.0)
    eval_fall: float = setting(0.1, "alarm if avg@k of a set (at top_p=1) lies this far below its best at two evaluations in a row, with training accuracy above its value at that best; 0 = off", 0.0, 1.0)
    stop_after: int = setting(0, "steps in a row with an alarm before the run stops with a checkpoint; 0 = only warn", 0)
    hang_factor: float = setting(10.0, "print all Python stacks when a phase (a chunk, an update, a save) takes this many times its usual time; 0 = off, also the next three", 0.0)
    hang_floor_s: float = setting(120.0, "and at least this many seconds", 0.0)
    hang_end_s: float = setting(1800.0, "and exit with status 75, on which the launchers restart the run, after at least this many; 0 = only print", 0.0)
    hang_first_s: float = setting(7200.0, "the same for the first phase of a kind, which compiles or loads; 0 = only print", 0.0)


@dataclass
class Mesh(Section, place="mesh"):
    """How the devices are arranged."""

    data: int = setting(1, "devices along `data` (replicas of the weights); -1 = all that are left", -1)
    fsdp: int = setting(-1, "devices along `fsdp` (weights and optimizer are split); -1 = all that are left", -1)
    tensor: int = setting(1, "devices along `tensor` (heads, MLP and vocabulary are split); divides num_kv_heads", 1)


# Weights and activations name logical axes only, so another strategy is another table of rules.
@dataclass
class TrainRules(Section, place="sharding.train"):
    """Logical axis -> mesh axes in training, with commas between; '' = replicated."""

    vocab: str = setting("tensor", "mesh axes of the vocabulary")
    embed: str = setting("fsdp", "mesh axes of the weights' side that faces the residual stream")
    mlp: str = setting("tensor", "mesh axes of the SwiGLU hidden layer")
    heads: str = setting("tensor", "mesh axes of the query heads")
    kv_heads: str = setting("tensor", "mesh axes of the key/value heads")
    layers: str = setting("", "mesh axes of stacked layers")
    head_dim: str = setting("", "mesh axes of the width of a head")
    batch: str = setting("data,fsdp", "mesh axes of the rows of a batch")
    token: str = setting("", "mesh axes of the tokens of a row")
    act_embed: str = setting("", "mesh axes of the residual stream's width")
    sequence: str = setting("tensor", "mesh axes of the tokens of the residual stream, between blocks")


@dataclass
class DecodeRules(TrainRules, place="sharding.decode"):
    """The same in decoding, which reads every weight once a token: nothing may be gathered."""

    embed: str = setting("", "mesh axes of the weights' side that faces the residual stream")
    sequence: str = setting("", "mesh axes of the tokens of the residual stream, between blocks")


@dataclass
class Sharding(Section, place="sharding"):
    """Logical axis -> mesh axes, one table for each phase."""

    train: TrainRules = field(default_factory=TrainRules)
    decode: DecodeRules = field(default_factory=DecodeRules)
