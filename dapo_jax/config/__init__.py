"""What a config file imports: the presets, the table of fields, and the checks.

    from dapo_jax import config
    def get_config():
        c = config.paper()
        c.optim.lr = 2e-6
        return c

Fields: schema.py. Presets: presets.py. Checks: validation.py.
"""

from dapo_jax.config.presets import base, grpo, paper, vapo, verl
from dapo_jax.config.schema import SCHEMA, ConfigError, Field, leaves, nearest
from dapo_jax.config.validation import (
    check_shape,
    resolve_mesh,
    row_tokens,
    stop_strings,
    validate,
    warnings,
)

__all__ = [
    "SCHEMA",
    "ConfigError",
    "Field",
    "base",
    "check_shape",
    "grpo",
    "leaves",
    "nearest",
    "paper",
    "resolve_mesh",
    "row_tokens",
    "stop_strings",
    "validate",
    "vapo",
    "verl",
    "warnings",
]
