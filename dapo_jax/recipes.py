"""The old name of presets.py, for config files that import it."""

from dapo_jax.presets import *  # noqa: F403
from dapo_jax.presets import Slice as Place  # noqa: F401
