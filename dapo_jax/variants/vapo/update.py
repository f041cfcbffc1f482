"""VAPO (arXiv 2504.05118): a value model gives each token its own advantage.

All values are those before the step's first update, as the old log-probs are. Neither model's
updates depend on the other's of the same step, so the value model's come first.

In value pre-training (sections 4.1 and 5.1), the first `critic.pretrain_steps` rollout steps, only
the value model is updated, on responses of the policy as it began, with Monte-Carlo targets: its
lambda is 1 there, whatever `critic.lambda_value` says.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax import parallel
from dapo_jax.algorithm import Algorithm
from dapo_jax.dapo.minibatches import pack_minibatches, skipped_in_row, update_policy
from dapo_jax.dapo.packing import Item
from dapo_jax.dapo.state import State
from dapo_jax.model import learner
from dapo_jax.variants.settings import Critic
from dapo_jax.variants.vapo import critic

NAME = "critic"  # of the value model in `build.Machine.others` and `State.memory`


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm with a value model, where `critic.enabled`."""
    c = config.critic
    if not c.enabled:
        return algorithm

    def policy_rate(step: int) -> float:
        """0 during value pre-training; the policy's warm-up starts after it."""
        since = step - c.pretrain_steps
        return learner.learning_rate(config.optim, since) if since >= 0 else 0.0

    return algorithm._replace(
        credit=lambda reward_NxG, counted_NxG: reward_NxG,  # `learn` makes advantages of them
        learn=learn,
        learning_rate=policy_rate,
    )


def learn(
    algorithm: Algorithm, machine, state: State, minibatches: Sequence[Sequence[Item]], knobs
) -> tuple[State, list[dict], dict]:
    """One update of the value model per mini-batch, then of the policy with advantages by GAE:
    (state, metrics of the policy's updates, metrics of values). In pre-training no policy updates.
    An item's advantage is its response's reward here."""
    config, step, values_of = algorithm.config, state.counters.step, machine.others[NAME]
    batches = list(pack_minibatches(machine, minibatches, config.critic.bootstrap_truncated))
    params, opt_state = state.memory[NAME]["params"], state.memory[NAME]["opt_state"]
    values = [values_of.values(params, b.rows, b.micro_batches) for b in batches]
    numbers = horizon(config.critic, minibatches, step)
    pairs = zip(batches, values, strict=True)
    estimates = [values_of.estimate(b.rows, v, numbers) for b, v in pairs]
    rate, logs = value_knobs(config.critic, step), []
    for batch, old, of in zip(batches, values, estimates, strict=True):
        task = critic.Batch(batch.rows, old, of.returns_AxRxT, batch.micro_batches)
        machine.watch.between(logs[-1:])
        params, opt_state, log = values_of.update(params, opt_state, task, rate)
        logs.append(log | {"estimates": of.sums})
    logs = parallel.to_host(logs)
    skipped = skipped_in_row(state.counters.others_skipped_in_row, logs)
    memory = {**state.memory, NAME: {"params": params, "opt_state": opt_state}}
    state = state._replace(memory=memory).count(others_skipped_in_row=skipped)
    if step < config.critic.pretrain_steps:
        return state, [], metrics(logs)
    for_policy = [
        batch._replace(rows=batch.rows._replace(advantage_AxRxT=of.advantage_AxRxT))
        for batch, of in zip(batches, estimates, strict=True)
    ]
    return *update_policy(config.loss, machine, state, for_policy, knobs), metrics(logs)


def horizon(c: Critic, minibatches: Sequence[Sequence[Item]], step: int) -> critic.Horizon:
    """Numbers of GAE in rollout step `step` (from 0), and where the thirds by length part."""
    lengths = [len(item.response) for items in minibatches for item in items if item.weight]
    thirds = np.quantile(lengths, [1 / 3, 2 / 3], method="lower") if lengths else (0, 0)
    lambda_value = 1.0 if step < c.pretrain_steps else c.lambda_value
    numbers = critic.Horizon(c.gamma, lambda_value, c.lambda_policy, c.length_alpha, *thirds)
    return critic.Horizon(*map(np.float32, numbers))


def value_knobs(c: Critic, step: int) -> critic.Knobs:
    """Numbers of the value model's updates in rollout step `step` (from 0)."""
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
        if not (count := sums["tokens"][i]):
            continue
        mean = {name: total[i] / count for name, total in sums.items()}
        kinds = ("return", "advantage", "error")
        variance = {kind: max(mean[f"{kind}_square"] - mean[kind] ** 2, 0.0) for kind in kinds}
        if variance["return"] > 1e-6 * mean["return_square"]:  # more than float32 sums round
            explained = 1 - variance["error"] / variance["return"]
            log[f"critic/{part}explained_variance"] = explained
        for name in ("return", "advantage"):
            log[f"critic/{part}{name}_mean"] = mean[name]
            log[f"critic/{part}{name}_std"] = variance[name] ** 0.5
        if not part:
            log["critic/lambda_mean"] = mean["lam"]
    return log


def bounds(config, log: dict) -> list[tuple]:
    """Rows of `log.guards.Bound`; none in pre-training, nor where little is left to explain."""
    explains = "policy/loss" in log and log.get("reward/accuracy", 0.0) < 0.9
    low = config.guard.explained_min if explains else 0.0
    advice = (
        "pre-train the value model longer (critic.pretrain_steps), raise critic.lr, or start it"
        " from a reward model (critic.init_from); GAE of values that explain nothing is noise"
    )
    name = "explained variance of the returns"
    return [("critic/explained_variance", name, low, 0.0, advice, "")]
