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
from dapo_jax.dapo import minibatches as minibatches_lib
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


def in_pretraining(c: Critic, step: int) -> bool:
    """Whether the policy stays as it is in rollout step `step` (from 0)."""
    return c.enabled and step < c.pretrain_steps


def policy_rate(c: Critic, optim, step: int) -> float:
    """The policy's learning rate in rollout step `step`: 0 during value pre-training; the policy's
    warm-up starts after it."""
    if in_pretraining(c, step):
        return 0.0
    return learner.learning_rate(optim, step - c.pretrain_steps * c.enabled)


def horizon(c: Critic, minibatches: Sequence[Sequence[Item]]) -> critic.Horizon:
    """The numbers of GAE, and where the thirds by length of this step's responses part."""
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


# ------------------------------------------------------------------------------------------------
# What a run tells of it
# ------------------------------------------------------------------------------------------------

WHEN = {
    "critic": "with config.critic, steps with an update of the value model",
    "differ": "with config.critic, steps whose returns are not all alike",
    "thirds": "as the last two; <third> is short, middle or long, by the lengths of the step's"
    " responses, and one may be empty",
}
# fmt: off
TAGS = {  # columns: `log.tags.Tag`
    "critic/explained_variance": ("share", "variance of the returns that the values explain, which the step's advantages were made of", "1 - Var(G - V) / Var(G) over trained tokens", "above 0.5 when pre-training ends; falls as accuracy nears 1, where little is left to tell", "below guard.explained_min: advantages are noise; pre-train longer (critic.pretrain_steps), or raise critic.lr; below 0: worse than a constant", "VAPO, arXiv 2504.05118 section 4.1", "differ"),
    "critic/value_loss": ("reward^2", "the value model's loss", "mean over trained tokens of (V - G)^2 / 2, of the step's updates", "falls, fastest in pre-training", "rises: critic.lr is too high, or the policy moves too fast for it", "arXiv 2503.01491", "critic"),
    "critic/clipped_frac": ("share", "trained tokens whose value has moved beyond critic.clip and no longer learns", "mean[clipped loss > loss]", "below 0.2; 0 without critic.clip", "higher: raise critic.clip, or lower critic.lr", "vapo/value_loss.py", "critic"),
    "critic/grad_norm": ("1", "global gradient norm of the value model before clipping", "mean over updates of ||g||", "steady", "grows tenfold: instability; nan: see critic/skipped", "code", "critic"),
    "critic/skipped": ("updates", "updates of the value model left out because a gradient or its result is not finite", "count", "0", "above 0 in a row: lower critic.lr", "code", "critic"),
    "critic/lambda_mean": ("1", "lambda of the policy's advantages", "mean over trained tokens of 1 - 1 / (alpha l), or critic.lambda_policy", "near 1 for long responses", "0: responses are shorter than 1 / critic.length_alpha tokens, and advantages are one-step differences of values", "arXiv 2504.05118 Eq. 5", "critic"),
    "critic/return_mean": ("reward", "target of a token's value", "mean over trained tokens", "rises with the reward", "as reward/mean", "vapo/gae.py", "critic"),
    "critic/return_std": ("reward", "spread of the targets", "std over trained tokens", "falls as accuracy nears 1", "0: all rewards are alike", "vapo/gae.py", "critic"),
    "critic/advantage_mean": ("reward", "advantage of trained tokens", "mean of GAE with the policy's lambda", "near 0", "far from 0: values are biased; pre-train longer", "vapo/gae.py", "critic"),
    "critic/advantage_std": ("reward", "spread of the advantages", "std over trained tokens", "below critic/return_std", "falls to 0: the policy gets no signal", "vapo/gae.py", "critic"),
    "critic/<third>/explained_variance": ("share", "as critic/explained_variance, of the third of responses by length", "1 - Var(G - V) / Var(G)", "alike", "long far below short: values of long responses are poor", "log/metrics.py", "thirds"),
    "critic/<third>/return_mean": ("reward", "as critic/return_mean, of the third", "mean", "long below short where long responses fail", "-", "log/metrics.py", "thirds"),
    "critic/<third>/return_std": ("reward", "as critic/return_std, of the third", "std", "alike", "0 of long: all long responses are alike, cut off perhaps", "log/metrics.py", "thirds"),
    "critic/<third>/advantage_mean": ("reward", "as critic/advantage_mean, of the third", "mean", "near 0", "apart: values are biased by length", "log/metrics.py", "thirds"),
    "critic/<third>/advantage_std": ("reward", "as critic/advantage_std, of the third", "std", "alike", "long far below short: lambda lets too little through; raise critic.length_alpha", "log/metrics.py", "thirds"),
}
# fmt: on

_LEARNED = 0.9  # accuracy above which there is little left for values to explain


def bounds(config, log: dict) -> list[tuple]:
    """Rows of `log.guards.Bound`; none during value pre-training."""
    explains = "policy/loss" in log and log.get("reward/accuracy", 0.0) < _LEARNED
    low = config.guard.explained_min if explains else 0.0
    advice = (
        "pre-train the value model longer (critic.pretrain_steps), raise critic.lr, or start it"
        " from a reward model (critic.init_from); GAE of values that explain nothing is noise"
    )
    return [
        ("critic/explained_variance", "explained variance of the returns", low, 0.0, advice, "")
    ]
