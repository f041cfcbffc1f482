"""`python -m dapo_jax.tags` prints the one table of all metrics; it is log/tags.py."""

from dapo_jax.log.tags import *  # noqa: F403
from dapo_jax.log.tags import markdown

if __name__ == "__main__":
    print(markdown())
