"""Everything that decides what happens next in a run, and nothing else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.model import qwen2


class Counters(NamedTuple):
    """How far a run is. Saved flat, under these names."""

    step: int = 0  # rollout steps done
    rounds: int = 0  # generation rounds done
    updates: int = 0  # gradient updates done
    position: int = 0  # next problem of the stream
    accept_rate: float = 1.0  # estimate; decides only how many problems are drawn ahead
    empty_steps: int = 0  # steps in a row without a learnable group
    skipped_in_row: int = 0  # updates in a row that were not finite
    values_skipped_in_row: int = 0  # of the value model
    alarms_in_row: int = 0  # steps in a row that broke a bound of config.guard
    tokens: int = 0  # response tokens drawn so far
    samples: int = 0  # responses drawn so far


class Rates(NamedTuple):
    """How each of P problems went when it was last drawn; host arrays, alike on all processes."""

    rate_P: np.ndarray  # float64, pass rate (`curriculum.pass_rate`); 0 where it was never drawn
    draws_P: np.ndarray  # int32, how often it was drawn
    epoch_P: np.ndarray  # int32, of the last draw


class CriticState(NamedTuple):
    """Of the value model (vapo/critic.py)."""

    params: dict
    opt_state: Any


class State(NamedTuple):
    params: dict
    opt_state: Any
    # The start of the run, where loss.kl_coef wants it: of what is trained (`qwen2.trained`)
    ref_params: dict | None = None
    carried: Sequence[Group] = ()  # accepted groups of earlier steps
    counters: Counters = Counters()
    rates: Rates | None = None  # where config.curriculum keeps them
    critic: CriticState | None = None  # where config.critic.enabled

    @property
    def reference(self) -> dict | None:
        """All parameters of the reference model; with adapters the policy's but for these."""
        return self.ref_params and qwen2.with_trained(self.params, self.ref_params)

    def count(self, **changes: int | float) -> "State":
        """With some counters set to other values."""
        return self._replace(counters=self.counters._replace(**changes))
