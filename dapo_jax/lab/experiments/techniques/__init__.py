"""The paper's techniques and three of VAPO's, one controlled experiment per module: arms, what
decides, claim, figure.

Another experiment is a module with a `TECHNIQUE` (effects.Technique) and its name in this list.
"""

import pathlib

from dapo_jax.lab.experiments import arms
from dapo_jax.lab.experiments.effects import Technique
from dapo_jax.lab.experiments.techniques import (
    clip_higher,
    dynamic_sampling,
    length_adaptive,
    overlong_filter,
    positive_lm,
    soft_punishment,
    token_mean,
    value_pretraining,
)

ALL: dict[str, Technique] = {
    module.__name__.rpartition(".")[2]: module.TECHNIQUE
    for module in (
        token_mean,
        overlong_filter,
        soft_punishment,
        dynamic_sampling,
        clip_higher,
        positive_lm,
        value_pretraining,
        length_adaptive,
    )
}
ARMS = {name: arm for technique in ALL.values() for name, arm in technique.arms.items()}


def run(where: pathlib.Path, arm: str, seed: int, base_seed: int) -> dict:
    """A task of the pool: the arm of this name, `arms.run`."""
    return arms.run(where, ARMS[arm], seed, base_seed)
