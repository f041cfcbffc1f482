"""The naive baseline of the quickstart: GRPO with everything that DAPO adds taken away.

    bash launch/quickstart.sh --config=configs/quickstart_grpo.py --workdir=runs/quickstart_grpo

Symmetric clip, a mean over responses of token means, no length shaping or filtering, and every
group is trained on, also those without a signal. Same base model and number of updates as
quickstart.py: compare the two at equal updates, and at equal tokens by `spent/tokens`.
`python -m benchmarks arms --full` does so over five seeds.
"""

from dapo_jax import config


def get_config():
    c = config.grpo()
    c.steps = 60
    c.supervised_warmup.optimizer = "muon"  # the base of quickstart.py
    c.supervised_warmup.skill_steps, c.supervised_warmup.skill_lr = 350, 1e-2
    c.supervised_warmup.habit_steps, c.supervised_warmup.habit_lr = 60, 3e-3
    c.optim.share_prompts, c.optim.micro_batch_rows = True, 4
    c.rollout.chunk, c.loss.old_logprobs = 16, "reuse"  # as there
    c.checkpoint.journal_gb = 0
    return c
