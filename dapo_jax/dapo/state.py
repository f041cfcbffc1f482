"""Everything that decides what happens next in a run, and nothing else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Group


class Counters(NamedTuple):
    """How far a run is. Saved flat, under these names."""

    step: int = 0  # rollout steps done
    rounds: int = 0  # generation rounds done
    updates: int = 0  # gradient updates done
    position: int = 0  # next problem of the stream
    accept_rate: float = 1.0  # estimate; decides only how many problems are drawn ahead
    empty_steps: int = 0  # steps in a row without a learnable group
    skipped_in_row: int = 0  # updates in a row that were not finite
    others_skipped_in_row: int = 0  # the same for the models in `State.memory`
    alarms_in_row: int = 0  # steps in a row that broke a bound of config.guard
    tokens: int = 0  # response tokens drawn so far
    samples: int = 0  # responses drawn so far


class State(NamedTuple):
    params: dict
    opt_state: Any
    # Frozen copy of the trainable weights at the start of the run; only if `loss.kl_coef` > 0
    ref_params: dict | None = None
    carried: Sequence[Group] = ()  # groups that the next step begins with
    counters: Counters = Counters()
    # What a method of variants/ carries from step to step: arrays on the devices, by a name of its
    # own, and host arrays with an entry per training problem, which begin anew with other problems
    memory: dict[str, Any] = {}  # noqa: RUF012  (never changed in place)
    by_problem: dict[str, np.ndarray] = {}  # noqa: RUF012

    def count(self, **changes: int | float) -> "State":
        """The same state with some counters set to other values."""
        return self._replace(counters=self.counters._replace(**changes))
