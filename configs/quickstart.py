"""DAPO from nothing on two CPU cores: a tiny Qwen2.5 learns chained arithmetic.

    bash launch/quickstart.sh
    python -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

from dapo_jax import config


def get_config():
    c = config.base()
    c.warmup.skill_steps, c.warmup.habit_steps = 700, 160
    return c
