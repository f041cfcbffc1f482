"""The papers' own settings: DAPO, the released script, the naive baseline, and VAPO."""

from dapo_jax.config.schema import Config, base


def paper() -> Config:
    """The paper's section 4.1: 512 x 16 responses of 20,480 tokens, 16 updates, AdamW 1e-6.

    From verl: Adam's betas, gradient clip 1.0. No overlong filtering, as in the authors' best run.
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
    c.eval.k, c.eval.every, c.eval.max_problems = 32, 5, 0
    c.checkpoint.every = 1  # a step takes minutes, and a save runs beside the next one
    c.tokenizer.chat = True
    c.model.dtype = "bfloat16"
    c.model.scan_layers, c.model.remat = True, "full"
    return c


def verl() -> Config:
    """What verl's released script does where it differs from the paper: warm-up over 10 rollout
    steps with the first at lr 0, decay 0.1, dual clip 10, and a mean over chunks of 32 responses
    (the size its data-parallel ranks saw) of token means."""
    c = paper()
    c.optim.warmup_steps, c.optim.warmup_from_zero = 10, True
    c.optim.weight_decay = 0.1
    c.loss.dual_clip = 10.0
    c.loss.normalizer = "chunk_tokens"
    return c


def grpo(c: Config | None = None) -> Config:
    """Naive GRPO, the paper's starting point: symmetric clip, sample-level mean, every group
    trained on, no length shaping. (Set loss.kl_coef for GRPO with its KL term.)"""
    c = base() if c is None else c
    c.loss.clip_high = c.loss.clip_low
    c.loss.normalizer = "sequence"
    c.loss.overlong_filter = "off"
    c.reward.overlong_penalty = 0.0
    c.dynamic_sampling.enabled = False
    return c


def vapo(c: Config | None = None) -> Config:
    """VAPO (arXiv 2504.05118, section 5.1): PPO with a value model, 16 updates of 512 responses a
    rollout, Clip-Higher and the token mean. What the paper leaves open: docs/vapo.md."""
    c = paper() if c is None else c
    c.critic.enabled = True  # 50 steps for it alone, lr 2e-6, lambda 1 and 1 - 1 / (.05 l)
    c.loss.positive_coef = 0.1
    c.dynamic_sampling.enabled = False  # an all-right group still has A = R - V
    c.reward.overlong_penalty = 0.0
    return c
