"""What a config file imports: the presets, the table of fields, and the checks.

    from dapo_jax import config
    def get_config():
        c = config.paper()
        c.optim.lr = 2e-6
        return c

The sections stand in the `settings.py` of the rooms that read them and in sections.py; schema.py
assembles them. Presets: paper.py, presets.py, ladder.py. Checks: validation.py, rules.py.
"""

# ruff: noqa: F401
from dapo_jax.config.paper import grpo, paper, vapo, verl
from dapo_jax.config.schema import SCHEMA, Config, ConfigError, base, leaves, nearest
from dapo_jax.config.validation import resolve_mesh, row_tokens, stop_strings, validate
