"""A step's updates of the value model, and the advantages that it gives the policy.

All values are those before the step's first update, as the old log-probs are. Neither model's
updates depend on the other's of the same step, so the value model's come first.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo.packing import Item
from dapo_jax.dapo.state import CriticState, State
from dapo_jax.dapo.update import Batch
from dapo_jax.variants.vapo import critic, pretraining


def learn_values(
    config,
    machine,
    state: State,
    minibatches: Sequence[Sequence[Item]],
    batches: list[Batch],
) -> tuple[State, list[Batch], list[dict]]:
    """One update of the value model per mini-batch: (state, what the policy trains on, metrics of
    each update). rows.advantage_AxRxT of `batches` is a response's reward, in those for the policy
    its tokens' advantages; in pre-training there are none. `minibatches` are the same, unpacked.
    Without a value model all is as it came."""
    if state.critic is None:
        return state, batches, []
    params, opt_state = state.critic
    values = [machine.critic.values(params, b.rows, b.micro_batches) for b in batches]
    numbers = horizon(config, minibatches)
    estimates = [
        machine.critic.estimate(batch.rows, old, numbers)
        for batch, old in zip(batches, values, strict=True)
    ]
    knobs, logs = update_knobs(config, state.counters.step), []
    for batch, old, of in zip(batches, values, estimates, strict=True):
        task = critic.Batch(batch.rows, old, of.returns_AxRxT, batch.micro_batches)
        machine.watch.between(logs[-1:])
        params, opt_state, log = machine.critic.update(params, opt_state, task, knobs)
        logs.append(log | {"estimates": of.sums})
    logs = parallel.to_host(logs)
    in_row = state.counters.values_skipped_in_row
    for log in logs:
        in_row = in_row + 1 if log["skipped"] else 0
    state = state._replace(critic=CriticState(params, opt_state))
    state = state.count(values_skipped_in_row=in_row)
    if pretraining.on(config, state.counters.step):
        return state, [], logs
    for_policy = [
        batch._replace(rows=batch.rows._replace(advantage_AxRxT=of.advantage_AxRxT))
        for batch, of in zip(batches, estimates, strict=True)
    ]
    return state, for_policy, logs


def horizon(config, minibatches: Sequence[Sequence[Item]]) -> critic.Horizon:
    """The numbers of GAE, and where the thirds by length of this step's responses part."""
    lengths = [len(item.response) for items in minibatches for item in items if item.weight]
    thirds = np.quantile(lengths, [1 / 3, 2 / 3], method="lower") if lengths else (0, 0)
    numbers = critic.Horizon(
        config.critic.gamma,
        config.critic.lambda_value,
        config.critic.lambda_policy,
        config.critic.length_alpha,
        *thirds,
    )
    return critic.Horizon(*map(np.float32, numbers))


def update_knobs(config, step: int) -> critic.Knobs:
    """The numbers of the value model's updates in rollout step `step` (from 0)."""
    risen = min(1.0, (step + 1) / max(config.critic.warmup_steps, 1))
    return critic.Knobs(
        np.float32(config.critic.lr * risen), np.float32(config.critic.clip or np.inf)
    )
