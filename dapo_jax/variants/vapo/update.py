"""VAPO (arXiv 2504.05118): a value model gives each token its own advantage.

All values are those before the step's first update, as the old log-probs are. Neither model's
updates depend on the other's of the same step, so the value model's come first.

In value pre-training (sections 4.1 and 5.1), the first `critic.pretrain_steps` rollout steps, only
the value model is updated, on responses of the policy as it began. The paper does not say whether
its 50 "steps" are rollouts or updates; here they are rollouts.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax import parallel
from dapo_jax.algorithm import Algorithm, update_knobs
from dapo_jax.dapo import minibatches as minibatches_lib, update
from dapo_jax.dapo.packing import Item
from dapo_jax.dapo.state import State
from dapo_jax.variants.vapo import critic

NAME = "critic"  # of the value model in `build.Machine.others` and `State.memory`


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm with a value model, where `critic.enabled`."""
    c = config.critic
    if not c.enabled:
        return algorithm
    return algorithm._replace(
        credit=lambda reward_NxG, counted_NxG: reward_NxG,  # `learn` makes advantages of them
        learn=learn,
        learning_rate=lambda step: policy_rate(c, config.optim, step),
    )


def learn(
    algorithm: Algorithm, machine, state: State, minibatches: Sequence[Sequence[Item]]
) -> tuple[State, list[dict], dict]:
    """One update of the value model per mini-batch, then of the policy with advantages by GAE:
    (state, metrics of the policy's updates, metrics of values). In pre-training no policy updates.
    An item's advantage is its response's reward here."""
    config, step, values_of = algorithm.config, state.counters.step, machine.others[NAME]
    knobs = update_knobs(algorithm, step)
    batches = list(
        minibatches_lib.pack_minibatches(machine, minibatches, config.critic.bootstrap_truncated)
    )
    params, opt_state = state.memory[NAME]["params"], state.memory[NAME]["opt_state"]
    values = [values_of.values(params, b.rows, b.micro_batches) for b in batches]
    numbers = horizon(config.critic, minibatches)
    estimates = [
        values_of.estimate(batch.rows, old, numbers)
        for batch, old in zip(batches, values, strict=True)
    ]
    rate, logs = value_knobs(config.critic, step), []
    for batch, old, of in zip(batches, values, estimates, strict=True):
        task = critic.Batch(batch.rows, old, of.returns_AxRxT, batch.micro_batches)
        machine.watch.between(logs[-1:])
        params, opt_state, log = values_of.update(params, opt_state, task, rate)
        logs.append(log | {"estimates": of.sums})
    logs = parallel.to_host(logs)
    skipped = minibatches_lib.skipped_in_row(state.counters.others_skipped_in_row, logs)
    memory = {**state.memory, NAME: {"params": params, "opt_state": opt_state}}
    state = state._replace(memory=memory).count(others_skipped_in_row=skipped)
    if in_pretraining(config.critic, step):
        return state, [], metrics(logs)
    for_policy = [
        batch._replace(rows=batch.rows._replace(advantage_AxRxT=of.advantage_AxRxT))
        for batch, of in zip(batches, estimates, strict=True)
    ]
    done = minibatches_lib.update_policy(config.loss, machine, state, for_policy, knobs)
    return *done, metrics(logs)


def in_pretraining(c, step: int) -> bool:
    """Whether the policy stays as it is in rollout step `step` (from 0). c: config.critic."""
    return c.enabled and step < c.pretrain_steps


def policy_rate(c, optim, step: int) -> float:
    """The policy's learning rate in rollout step `step`: 0 during value pre-training; the policy's
    warm-up starts after it. c: config.critic."""
    if in_pretraining(c, step):
        return 0.0
    return update.learning_rate(optim, step - c.pretrain_steps * c.enabled)


def horizon(c, minibatches: Sequence[Sequence[Item]]) -> critic.Horizon:
    """The numbers of GAE, and where the thirds by length of this step's responses part.
    c: config.critic."""
    lengths = [len(item.response) for items in minibatches for item in items if item.weight]
    thirds = np.quantile(lengths, [1 / 3, 2 / 3], method="lower") if lengths else (0, 0)
    numbers = critic.Horizon(
        gamma=c.gamma,
        lambda_value=c.lambda_value,
        lambda_policy=c.lambda_policy,
        alpha=c.length_alpha,
        short=thirds[0],
        long=thirds[1],
    )
    return critic.Horizon(*map(np.float32, numbers))


def value_knobs(c, step: int) -> critic.Knobs:
    """Numbers of the value model's updates in rollout step `step` (from 0). c: config.critic."""
    risen = min(1.0, (step + 1) / max(c.warmup_steps, 1))
    return critic.Knobs(np.float32(c.lr * risen), np.float32(c.clip or np.inf))


def metrics(logs: Sequence[dict]) -> dict[str, float]:
    """Loss and gradient are of the value model's updates. Explained variance is of the values used
    for the advantages, before the first update."""
    if not logs:
        return {}
    tokens = sum(x["tokens"] for x in logs)
    log = {
        "critic/value_loss": sum(x["value_loss"] for x in logs) / tokens,
        "critic/clipped_frac": sum(x["clipped"] for x in logs) / tokens,
        "critic/grad_norm": np.mean([x["grad_norm"] for x in logs]),
        "critic/skipped": sum(bool(x["skipped"]) for x in logs),
    }
    names = logs[0]["estimates"]
    sums = {n: np.sum([x["estimates"][n] for x in logs], axis=0, dtype=float) for n in names}
    for i, part in enumerate(("", "short/", "middle/", "long/")):
        if count := sums["tokens"][i]:
            mean = {name: total[i] / count for name, total in sums.items()}
            log |= {f"critic/{part}{name}": x for name, x in _of_part(mean).items()}
            if not part:
                log["critic/lambda_mean"] = mean["lam"]
    return log


def _of_part(mean: dict[str, float]) -> dict[str, float]:
    """From means over the tokens of a part of the responses."""
    variance = {
        name: max(mean[f"{name}_square"] - mean[name] ** 2, 0.0)
        for name in ("return", "advantage", "error")
    }
    log = {}
    if variance["return"] > 1e-9:
        log["explained_variance"] = 1 - variance["error"] / variance["return"]
    for name in ("return", "advantage"):
        log[f"{name}_mean"] = mean[name]
        log[f"{name}_std"] = variance[name] ** 0.5
    return log
