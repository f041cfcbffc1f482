"""DAPO from nothing on two CPU cores: a tiny Qwen2.5 learns chained arithmetic.

    bash launch/quickstart.sh
    python -m dapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

A supervised warm-up makes a base model of 101,952 parameters that can work a problem out but
mostly guesses; 100 rollout steps of full DAPO then raise its held-out accuracy (T=1, one sample)
from about 0.1 to about 0.9. Hardware: two cores, about two minutes (README has the five seeds).
"""

from dapo_jax import config


def get_config():
    c = config.base()  # full DAPO on the embedded task: 100 steps of 32 x 8 responses, 8 updates
    c.warmup.skill_steps, c.warmup.habit_steps = 900, 160
    return c
