"""VAPO, DAPO's successor (arXiv 2504.05118): PPO with a value model; docs/vapo.md.

    python -m dapo_jax.train --config=configs/vapo.py --workdir=runs/vapo

The quickstart's task, base model and size of a step (configs/quickstart.py), on two CPU cores in
about two minutes: 10 rollout steps of value pre-training, in which the policy stays as it is, and
60 of both models. Responses have about 15 tokens, where the paper's alpha of .05 would leave GAE
one-step differences of values; length_alpha 1.5 makes lambda .95. The value model's rate is a small
model's. Of the returns it explains a few percent (seed 0: at most 4%), and the alarm for that is
off: that a step of the work was left out shows when the answer begins, three tokens before the end,
and a model of 100,000 parameters is slow to see it. Advantages are then little more than the reward
less its mean. Held-out accuracy (T=1) of that run: .14 -> .95.

`configs/vapo.py:32B`, or another size of configs/dapo_qwen2_5.py, is the paper's setting on
DAPO-Math-17k and the slice that DAPO has there; it holds two models. Of 32B that is a v5p-256, of
whose 102.8 GB a chip it takes 56.1 while sampling and 68.2 while updating by the arithmetic of
`python -m dapo_jax.plan`, 3.0 more than DAPO.
"""

from dapo_jax import config
from dapo_jax.config import presets


def get_config(size: str = ""):
    if size:
        c = presets.vapo(presets.dapo_math(size))
        c.steps += c.critic.pretrain_steps  # so that the policy has its 5,120 updates
        return c
    c = presets.vapo(config.base())
    c.steps = 70
    c.supervised_warmup.skill_steps, c.supervised_warmup.habit_steps = 900, 160
    c.critic.pretrain_steps, c.critic.lr, c.critic.length_alpha = 10, 1e-3, 1.5
    c.guard.explained_min = 0.0
    c.checkpoint.every = 20
    return c
