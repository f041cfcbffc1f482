"""Another name of configs/dapo_qwen2_5.py:32B,verl, where all is said."""

from dapo_jax import config
from dapo_jax.config import presets


def get_config():
    return config.verl(presets.dapo_math("32B"))
