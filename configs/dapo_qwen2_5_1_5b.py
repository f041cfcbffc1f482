"""Another name of configs/dapo_qwen2_5.py:1.5B, where all is said."""

from dapo_jax.config import presets


def get_config():
    return presets.dapo_math("1.5B")
