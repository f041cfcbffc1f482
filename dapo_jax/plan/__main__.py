"""`python -m dapo_jax.plan`: the command of planner.py."""

from dapo_jax.config import cli
from dapo_jax.plan import planner

__doc__ = planner.__doc__  # what --help prints

if __name__ == "__main__":
    planner.define_flags()
    cli.run(planner.main)
