"""Which methods a config asks for, put together: the one place that knows them all."""

import pathlib
from collections.abc import Callable
from typing import Any

from dapo_jax import algorithm
from dapo_jax.algorithm import Algorithm
from dapo_jax.dapo.state import State
from dapo_jax.model import qwen2
from dapo_jax.variants import curriculum, objectives, over_batch, positive_lm, staleness, turns
from dapo_jax.variants.vapo import critic, update as vapo

METHODS = (curriculum, staleness, positive_lm, vapo, turns, over_batch)

# Tables of log/tags.py: metrics and when there are any, bounds of histograms
TAGS = pathlib.Path(__file__).with_name("tags.md")
EDGES = {"curriculum/by_pass_rate": curriculum.RATE_EDGES}
# Config fields that a resumed run may change without --allow_config_change
FREE_FIELDS = ("critic.init_from",)
# Texts of log/guards.py for a batch that stayed short
NONE_LEFT, wants, ran_out = curriculum.NONE_LEFT, curriculum.wants, curriculum.ran_out


def of(config) -> Algorithm:
    """DAPO, with what each method that is on replaces."""
    out = algorithm.dapo(config)
    for method in METHODS:
        out = method.apply(config, out)
    return out


def objective(config):
    """The static choice of a token's loss and importance weight (objectives.py)."""
    return objectives.choice(config.loss)._replace(aged=config.rollout.staleness > 0)


def files(config) -> dict[str, str]:
    """Hash of the user's file that `loss.objective` names, if it names one."""
    found = objectives.own_objective.source(config.loss.objective)
    return {"objective": found} if found else {}


def others(config, policy: qwen2.Shape, make: Callable[..., Any]) -> dict[str, Any]:
    """Trainers of the models beside the policy, by name. make: (class, shape) -> trainer."""
    if not config.critic.enabled:
        return {}
    return {vapo.NAME: make(critic.Critic, critic.critic_shape(config, policy))}


def new_memory(config, machine, params: qwen2.Params) -> dict[str, Any]:
    """`State.memory` at the start of a run. params: the policy's, without adapters."""
    memory = {}
    for name, trainer in machine.others.items():
        of = critic.initial_params(config, trainer, params)
        memory[name] = {"params": of, "opt_state": trainer.init_opt_state(of)}
    return memory


def memory_like(machine) -> dict[str, Any]:
    """`State.memory` as jax.ShapeDtypeStructs with their shardings."""
    states = {name: trainer.abstract_state() for name, trainer in machine.others.items()}
    return {name: {"params": params, "opt_state": opt} for name, (params, opt) in states.items()}


def resumed(config, text, stream, state: State) -> State:
    """A state without what no method of the config keeps. ConfigError: this must not be lost, or
    groups that wait in it do not fit."""
    staleness.check(config, text, stream, state)
    return state if curriculum.is_on(config.curriculum) else state._replace(by_problem={})


def older_responses(config) -> bool:
    """Whether a batch may hold responses of an older policy."""
    return config.dynamic_sampling.surplus == "carry" or config.rollout.staleness > 0


def bounds(config, log: dict) -> list[tuple]:
    """Rows of `log.guards.Bound` for one step."""
    return staleness.bounds(config, log) + vapo.bounds(config, log)


def fixed_fields(saved: dict) -> tuple[str, ...]:
    """Fields that a resumed run may otherwise change, and not under this config (name -> value)."""
    return ("rollout.slots", "rollout.chunk") if saved.get("rollout.staleness") else ()
