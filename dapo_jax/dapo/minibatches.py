"""Lines 9 to 11 of Algorithm 1: graded groups -> mini-batches -> gradient updates.

Dims: N groups of G responses, M groups of a mini-batch, Q responses of a mini-batch, K extra terms.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo import advantage, objective, packing, reward, update
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.state import State
from dapo_jax.model import adapters


def make_minibatches(algorithm, groups: list[Group], step: int) -> list[list[packing.Item]]:
    """Groups -> advantages and loss weights -> U mini-batches of whole groups, shuffled.
    algorithm: `algorithm.Algorithm`; its config, `credit` and `terms` are used."""
    config, rollout = algorithm.config, algorithm.config.rollout
    if not groups:
        return []
    length_NxG = np.array([[r.length for r in g.responses] for g in groups])
    truncated_NxG = np.array([[r.truncated for r in g.responses] for g in groups])
    trained_NxG, counted_NxG = reward.masks(truncated_NxG, config.loss.overlong_filter)
    score_NxG, L_max = np.stack([g.grades.score_G for g in groups]), rollout.max_response_tokens
    reward_NxG = reward.shaped(score_NxG, length_NxG, L_max, config.reward)
    advantage_NxG = algorithm.credit(reward_NxG, counted_NxG)
    tokens_NxG = np.where(trained_NxG, length_NxG, 0)
    if config.advantage.whiten:
        advantage_NxG = advantage.whiten(advantage_NxG, tokens_NxG, config.advantage)

    order = np.random.default_rng([config.seed, step]).permutation(len(groups))
    size = rollout.groups // config.optim.minibatches  # groups; a short batch has fewer
    minibatches = []
    for part in np.split(order, range(size, len(order), size)):
        group_Q, loss = np.repeat(part, rollout.group_size), config.loss
        weight_Q = objective.token_weights(  # the normaliser of Eq. 8
            tokens_NxG[part].ravel(), group_Q, loss.normalizer, loss.chunk_sequences, L_max
        )
        of_part = [groups[n] for n in part]
        extra_KxQ = [of(of_part, tokens_NxG[part]).ravel() for _, of in algorithm.terms]
        responses = [(g.prompt, r) for g in of_part for r in g.responses]
        numbers = zip(advantage_NxG[part].ravel(), weight_Q, *extra_KxQ, strict=True)
        minibatches.append(
            [
                packing.Item(prompt, r.tokens, r.logps, float(A), weight, r.truncated, extra)
                for (prompt, r), (A, weight, *extra) in zip(responses, numbers, strict=True)
            ]
        )
    return minibatches


def pack_minibatches(
    machine, minibatches: Iterable[Sequence[packing.Item]], open_ends: bool = False
) -> Iterator[update.Batch]:
    """Mini-batches on the devices, each packed when it is asked for. One without a response to
    train on is left out. Old and reference log-probs are the sampler's. machine: `build.Machine`.
    """
    for items in minibatches:
        rows, used, places = packing.pack(items, machine.layout, open_ends=open_ends)
        if used:
            terms = tuple(
                packing.spread(weight_Q, places, rows.tokens_AxRxT.shape)
                for weight_Q in zip(*(item.term_weights for item in items), strict=True)
            )
            rows, terms = parallel.to_device((rows, terms), machine.trainer.row_sharding)
            old = rows.sampled_logp_AxRxT
            yield update.Batch(rows, old, old, np.int32(used), terms)


def update_policy(
    loss, machine, state: State, batches: Iterable[update.Batch], knobs: update.Knobs
) -> tuple[State, list[dict]]:
    """One gradient update per batch: (state, metrics of each update). loss: config.loss. Where no
    model computes log-probs first, each batch is packed while the update before it runs."""
    recompute, running = loss.old_logprobs == "recompute", None
    # With adapters the reference model is the policy but for these
    reference = state.ref_params and adapters.with_trained(state.params, state.ref_params)

    def log_probs(params, b: update.Batch):
        nonlocal running
        machine.watch.between(running)
        running = machine.trainer.log_probs(params, b.rows, b.micro_batches, knobs.temperature)
        return running

    def with_log_probs(b: update.Batch) -> update.Batch:
        """By the models before the first update."""
        old = log_probs(state.params, b) if recompute else b.old_logp_AxRxT
        ref = old if reference is None else log_probs(reference, b)
        return b._replace(old_logp_AxRxT=old, ref_logp_AxRxT=ref)

    if recompute or reference is not None:
        batches = [with_log_probs(b) for b in batches]
    params, opt_state, logs = state.params, state.opt_state, []
    for batch in batches:
        machine.watch.between((batch, logs[-1:]))
        params, opt_state, log = machine.trainer.update(params, opt_state, batch, knobs)
        logs.append(log)
    logs = parallel.to_host(logs)
    in_row = skipped_in_row(state.counters.skipped_in_row, logs)
    state = state._replace(params=params, opt_state=opt_state)
    return state.count(updates=state.counters.updates + len(logs), skipped_in_row=in_row), logs


def skipped_in_row(before: int, logs: Sequence[dict]) -> int:
    """Updates in a row that were not finite: `before`, counted on over the updates of a step."""
    for log in logs:
        before = before + 1 if log["skipped"] else 0
    return before
