"""Settings of the algorithm: dynamic sampling, advantages, the loss and the optimizer."""
# fmt: off

from dataclasses import dataclass

from dapo_jax.gate import ROWS, TOKENS, Section, setting, wrong


@dataclass
class DynamicSampling(Section, place="dynamic_sampling"):
    """Which groups enter the batch (paper Eq. 11)."""

    enabled: bool = setting(True, "keep only groups with 0 < correct < G, and draw others for the rest")
    max_rounds: int = setting(10, "generation rounds per step before `on_exhausted` applies (verl: 10)", 1)
    refill: bool = setting(True, "False: one round of `rollout.groups` problems; groups without signal leave the batch and are not replaced (AReaL dynamic_bs, ScaleRL)")
    on_exhausted: str = setting("train", "after max_rounds: train on the groups found so far, or stop with a checkpoint", choices=("train", "stop"))
    max_empty_steps: int = setting(3, "steps in a row without one learnable group before the run stops with a checkpoint", 1)
    surplus: str = setting("drop", "accepted groups beyond N: 'drop' samples their problems again in the next step, 'carry' carries the groups over; 'end' is 'drop' that ends responses which no batch can use, and logs nothing of what lies behind the batch's last problem", choices=("drop", "carry", "end"))

    def mistakes(self) -> list[str]:
        return wrong(
            (not self.refill and self.on_exhausted == "stop", "config.dynamic_sampling.on_exhausted: 'stop' would end the run at its first short batch, and with refill=False most are; set 'train'"),
            (self.surplus == "carry" and not self.enabled, "config.dynamic_sampling.surplus: 'carry' needs dynamic_sampling.enabled=True"),
        )


@dataclass
class Advantage(Section, place="advantage"):
    """Normalisation of rewards within a group (paper Eq. 9)."""

    ddof: int = setting(1, "1: sample std of a group, as in verl; 0: population std", 0, 1)
    epsilon: float = setting(1e-6, "added to the std (verl: 1e-6; AReaL 1e-5; TRL 1e-4)", 1e-12, 1e6)
    scale: str = setting("group", "divisor of the centred reward: the group's std, one std of the batch, or 1", choices=("group", "batch", "none"))
    leave_one_out: bool = setting(False, "subtract the mean of the group's other responses instead of the group's mean (RLOO)")
    whiten: bool = setting(False, "normalise a second time, over the trained tokens of the batch (AReaL's adv_norm)")


@dataclass
class Loss(Section, place="loss"):
    """The objective (paper Eq. 8)."""

    objective: str = setting("ppo", "a token's loss, by its name in dapo_jax/variants/objectives.py: ppo (the paper's), cispo, gspo, gspo_token, rloo, sapo, dppo_tv, dppo_kl, clip_cov, kl_cov, high_entropy, ess; or FILE.py:FUNCTION (docs/own_loss.md)")
    clip_low: float = setting(0.2, "ratio is clipped below at 1 - clip_low", 0.0, 1.0)
    clip_high: float = setting(0.28, "ratio is clipped above at 1 + clip_high (Clip-Higher; GRPO: = clip_low)", 0.0, 1e6)
    dual_clip: float = setting(0.0, "bound c > 1 on the loss where the advantage is negative (verl: 10); 0 = off (paper)", 0.0, 1e6)
    log_ratio_max: float = setting(20.0, "log-ratios are clamped to +- this before exp, so that one token cannot overflow", 1.0, 80.0)
    normalizer: str = setting("batch_tokens", "divisor of the token losses; see dapo/objective.py", choices=("batch_tokens", "group_tokens", "chunk_tokens", "sequence", "constant"))
    chunk_sequences: int = setting(32, "responses per chunk of normalizer='chunk_tokens'", 1, ROWS)
    overlong_filter: str = setting("off", "truncated responses: off = train on them; loss = leave the loss; group = leave loss and group statistics", choices=("off", "loss", "group"))
    old_logprobs: str = setting("recompute", "denominator of the ratio: recompute with the trainer, or reuse the sampler's log-probs (one pass less, but with the sampler's rounding)", choices=("recompute", "reuse"))
    importance_cap: float = setting(0.0, "upper bound of the importance weight pi_trainer/pi_sampler on recomputed log-probs; 0 = no weight", 0.0, 1e6)
    importance: str = setting("token", "the weight, by its name in dapo_jax/variants/objectives.py: of a token, or of a whole response (sequence: product, mean: geometric mean); truncated at the cap, or with _mask set to zero beyond it")
    importance_floor: float = setting(0.0, "masks also set weights below this to zero (IcePop: .5)", 0.0, 1.0)
    kl_coef: float = setting(0.0, "weight of the k3 estimate of KL(policy || start of the run); 0 = no reference model", 0.0, 1e6)
    positive_coef: float = setting(0.0, "mu: weight of the log-likelihood loss on correct responses (VAPO: .1), with or without a value model; 0 = none", 0.0, 1e6)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", 0.0, 1e6)
    entropy_enough: float = setting(0.0, "nats per token above which the bonus stops: it then guards against collapse only; 0 = no limit", 0.0)

    def mistakes(self) -> list[str]:
        return wrong(
            (0 < self.dual_clip <= 1, f"config.loss.dual_clip: {self.dual_clip} must exceed 1 (or be 0: off)"),
            (self.importance_cap and self.old_logprobs == "reuse", "config.loss.importance_cap: needs loss.old_logprobs='recompute'; with 'reuse' the sampler's log-probs already are the denominator"),
            (self.importance != "token" and not self.importance_cap, f"config.loss.importance: {self.importance!r} needs loss.importance_cap > 0, the largest weight"),
            (self.entropy_enough and not self.entropy_coef, "config.loss.entropy_enough: there is no bonus to stop; set loss.entropy_coef, or entropy_enough=0"),
            (self.importance_floor and not self.importance.endswith("_mask"), f"config.loss.importance_floor: only a mask has one, and loss.importance is {self.importance!r}"),
        )


@dataclass
class Optim(Section, place="optim"):
    """AdamW and the layout of an update."""

    lr: float = setting(3e-4, "AdamW learning rate after warm-up (paper: 1e-6)", 0.0, 10.0)
    warmup_steps: int = setting(2, "ROLLOUT steps of linear warm-up (paper: 20; verl: 10)", 0)
    schedule: str = setting("constant", "the learning rate after warm-up", choices=("constant", "linear", "cosine"))
    decay_steps: int = setting(0, "ROLLOUT steps after warm-up in which `schedule` falls to lr_end", 0)
    lr_end: float = setting(0.0, "final learning rate of `schedule`, as a share of lr", 0.0, 1.0)
    warmup_from_zero: bool = setting(False, "the first rollout step trains at lr 0, as verl's schedule does")
    b1: float = setting(0.9, "Adam's first decay", 0.0, 0.999999)
    b2: float = setting(0.95, "Adam's second decay (verl: 0.999)", 0.0, 0.999999)
    eps: float = setting(1e-8, "Adam's epsilon", 1e-20, 1.0)
    weight_decay: float = setting(0.0, "decoupled weight decay (verl: 0.1)", 0.0, 1e6)
    clip_norm: float = setting(1.0, "global gradient norm is clipped to this", 0.0, 1e9)
    minibatches: int = setting(8, "gradient updates per rollout step (paper: 16)", 1, ROWS)
    micro_batch_rows: int = setting(8, "packed rows per pass over the devices, rounded up to a multiple of mesh data x fsdp; gradients accumulate over passes in float32", 1, ROWS)
    row_tokens: int = setting(0, "length of a packed row; 0 = longest prompt + longest response, rounded up to 8", 0, TOKENS)
    last_row_tokens: int = setting(0, "length of the rows of a mini-batch's last pass where what is left for it fits so; that pass is compiled too; 0 = row_tokens", 0, TOKENS)
    share_prompts: bool = setting(False, "responses to one prompt in one packed row share its tokens, which are then computed once; not with splash attention, nor with a value model")
    offload: bool = setting(False, "keep Adam's moments in the hosts' memory between updates")
    max_skipped: int = setting(8, "consecutive updates skipped because they are not finite, before the run stops with a checkpoint", 1)

    def mistakes(self) -> list[str]:
        falls = self.schedule != "constant"
        return wrong(
            (falls and not self.decay_steps, f"config.optim.decay_steps: schedule {self.schedule!r} needs the rollout steps after warm-up in which the rate falls"),
            ((self.decay_steps or self.lr_end) and not falls, "config.optim.schedule: 'constant' takes no decay_steps or lr_end; set 'linear' or 'cosine'"),
        )
