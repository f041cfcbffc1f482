"""`python -m dapo_jax.plan`: command.py."""

from dapo_jax.config import cli
from dapo_jax.plan import command

__doc__ = command.__doc__  # what --help prints

if __name__ == "__main__":
    command.define_flags()
    cli.run(command.main)
