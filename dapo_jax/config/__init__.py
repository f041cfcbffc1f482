"""What a config file imports: the presets, the table of fields, and the checks.

    from dapo_jax import config
    def get_config():
        c = config.paper()
        c.optim.lr = 2e-6
        return c

The sections stand in the `settings.py` of the rooms that read them and in sections.py; schema.py
assembles them. Presets: paper.py, presets.py, ladder.py. Checks: validation.py. Flags: cli.py.
"""

from dapo_jax.config.paper import grpo, paper, vapo, verl
from dapo_jax.config.schema import SCHEMA, Config, ConfigError, Field, base, leaves, nearest
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
    "Config",
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
