"""Algorithm 1 of the paper (arXiv 2503.14476), and nothing of the run around it (train.py).

    1   for step = 1, ..., M do                                            train.run
    2       sample a batch D_b from D                                      sample_batch
    3       update the old policy: pi_old <- pi                            sample_batch
    4       sample G outputs o_i ~ pi_old(. | q) for each q in D_b         sample_batch
    5       compute rewards r_i for each output by running R               sample_batch
    6       keep the groups that teach in the buffer (Eq. 11)              sample_batch
    7-8     if the buffer has fewer than N: continue                       sample_batch
    9       compute the advantage of each token (Eq. 9)                    make_minibatches
    10      for iteration = 1, ..., mu do                                  update_policy
    11          update pi by maximizing the DAPO objective (Eq. 8)         update_policy

What the paper leaves to the reader is decided so: the batch is the first N groups that teach in
problem order; `optim.minibatches` updates take a share of the batch each (mu = 1); the denominator
of the ratio is fixed before the first of them. `text` and `machine` are what build.py made of the
`config`. A result depends on the arguments alone; nothing here writes or looks at a clock.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax import build, parallel
from dapo_jax.dapo import advantage, objective, packing, reward, update
from dapo_jax.dapo.dynamic_sampling import Collected, Group, collect, fingerprint
from dapo_jax.dapo.overlong_filter import masks, teaches
from dapo_jax.dapo.state import State
from dapo_jax.reward import grading
from dapo_jax.rollout import engine
from dapo_jax.variants import curriculum, positive_lm, staleness as carried
from dapo_jax.variants.vapo import pretraining, update as vapo


class StepRecord(NamedTuple):
    """What happened in one rollout step."""

    batch: Collected
    stats: engine.Stats  # of the sampler
    updates: list[dict[str, float]]  # metrics of each update, on the host
    knobs: update.Knobs  # of these updates
    known: Sequence[float]  # pass rates that drawn problems had before, under config.curriculum
    value_updates: Sequence[dict] = ()  # as `updates`, of the value model, where there is one


def step(
    config,
    text: build.Text,
    machine: build.Machine,
    stream: Sequence[int],
    state: State,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> tuple[State, StepRecord]:
    """One rollout step: sample a batch of groups that teach, then update on it. stream: position ->
    row of the training set. on_phase: is told 'rollout' and 'update' as each begins."""
    on_phase("rollout")
    batch, stats = sample_batch(config, text, machine, stream, state)  # lines 2-8
    on_phase("update")
    minibatches = make_minibatches(config, batch.groups, state.counters.step)  # line 9
    knobs = update_knobs(config, state)
    batches = pack_minibatches(config, machine, state, minibatches)
    state, batches, valued = vapo.learn_values(config, machine, state, minibatches, batches)
    state, updates = update_policy(machine, state, batches, knobs)  # lines 10-11

    counters, problems = state.counters, len(text.train.ids)
    rates, known = curriculum.record(config, stream, problems, state.rates, batch)
    state = state._replace(carried=batch.carried, rates=rates).count(
        step=counters.step + 1,
        rounds=counters.rounds + batch.rounds,
        position=batch.next_position,
        accept_rate=batch.accept_rate,
        empty_steps=0 if batch.groups else counters.empty_steps + 1,
        tokens=counters.tokens + stats.tokens,
        samples=counters.samples + sum(len(g.responses) for g in batch.drawn),
    )
    return state, StepRecord(batch, stats, updates, knobs, known, valued)


def sample_batch(config, text, machine, stream, state: State) -> tuple[Collected, engine.Stats]:
    """Dynamic sampling with the policy as it is at the start of the step."""
    if carried.wanted(config, state):
        return carried.sample_batch(config, text, machine, stream, state)
    decode_params = machine.decode_params(state.params)
    draw, totals = build.training_draw(config, state.counters.step), []

    def sample(positions: Sequence[int]) -> list[Group]:
        rows = [stream[i] for i in positions]
        prompts = list(zip(positions, [text.train.ids[r] for r in rows], strict=True))
        groups, stats = build.sample_groups(
            machine, decode_params, prompts, config.rollout.group_size, draw
        )
        totals.append(stats)
        problems = [text.train.problems[r] for r in rows]
        groups = grading.grade_groups(text.tokenizer, text.judge, groups, problems)
        parallel.same_everywhere(f"the round from problem {positions[0]} on", fingerprint(groups))
        return groups

    batch = collect(
        sample,
        start=state.counters.position,
        need=config.rollout.groups,
        accept_rate=state.counters.accept_rate,
        max_rounds=config.dynamic_sampling.max_rounds,
        dynamic=config.dynamic_sampling.enabled,
        refill=config.dynamic_sampling.refill,
        surplus=config.dynamic_sampling.surplus,
        carried=state.carried,
        accept=lambda g: teaches(g, config.loss.overlong_filter) and curriculum.in_band(config, g),
        ahead=curriculum.ahead(config, stream, len(text.train.ids), state.rates),
    )
    return batch, engine.total(totals)


def make_minibatches(config, groups: list[Group], step: int) -> list[list[packing.Item]]:
    """Groups -> advantages and loss weights -> U mini-batches of whole groups, shuffled."""
    if not groups:
        return []
    length_NxG = np.array([[len(r.tokens) for r in g.responses] for g in groups])
    truncated_NxG = np.array([[r.truncated for r in g.responses] for g in groups])
    trained_NxG, counted_NxG = masks(truncated_NxG, config.loss.overlong_filter)
    advantage_NxG = shaped_rewards(config, np.stack([g.grades.score_G for g in groups]), length_NxG)
    if not config.critic.enabled:  # else `vapo.learn_values` makes them of these rewards
        advantage_NxG = advantage.group_normalize(  # Eq. 9
            advantage_NxG,
            ddof=config.advantage.ddof,
            epsilon=config.advantage.epsilon,
            counted_NxG=counted_NxG,
            scale=config.advantage.scale,
            leave_one_out=config.advantage.leave_one_out,
        )
    right_NxG = [positive_lm.right(g.grades, config.loss.positive_coef) for g in groups]
    tokens_NxG = np.where(trained_NxG, length_NxG, 0)
    if config.advantage.whiten:
        advantage_NxG = advantage.whiten(
            advantage_NxG, tokens_NxG, ddof=config.advantage.ddof, epsilon=config.advantage.epsilon
        )

    order = np.random.default_rng([config.seed, step]).permutation(len(groups))
    size = config.rollout.groups // config.optim.minibatches  # groups; a short batch has fewer
    minibatches = []
    for part in np.split(order, range(size, len(order), size)):
        weight_Q = objective.token_weights(  # the normaliser of Eq. 8
            tokens_NxG[part].ravel(),
            np.repeat(part, config.rollout.group_size),
            config.loss.normalizer,
            config.loss.chunk_sequences,
            config.rollout.max_response_tokens,
        )
        minibatches.append(
            [
                packing.Item(groups[n].prompt, r.tokens, r.logps, float(A), w, right, r.truncated)
                for n, weight_G in zip(part, weight_Q.reshape(len(part), -1), strict=True)
                for r, A, w, right in zip(
                    groups[n].responses, advantage_NxG[n], weight_G, right_NxG[n], strict=True
                )
            ]
        )
    return minibatches


def shaped_rewards(config, score: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Scores with the length penalty of Eq. 13. length: response tokens; same shape."""
    return reward.shaped(
        score,
        length,
        max_tokens=config.rollout.max_response_tokens,
        buffer_tokens=config.reward.overlong_buffer_tokens,
        factor=config.reward.overlong_penalty,
    )


def update_policy(machine, state: State, batches, knobs: update.Knobs) -> tuple[State, list[dict]]:
    """One gradient update per mini-batch. Returns (state, metrics of each update)."""
    params, opt_state, logs = state.params, state.opt_state, []
    for batch in batches:
        machine.watch.between((batch, logs[-1:]))
        params, opt_state, log = machine.trainer.update(params, opt_state, batch, knobs)
        logs.append(log)
    logs = parallel.to_host(logs)
    in_row = state.counters.skipped_in_row
    for log in logs:
        in_row = in_row + 1 if log["skipped"] else 0
    state = state._replace(params=params, opt_state=opt_state)
    return state.count(updates=state.counters.updates + len(logs), skipped_in_row=in_row), logs


def update_knobs(config, state: State) -> update.Knobs:
    """The numbers of this step's updates."""
    return update.Knobs(
        lr=np.float32(pretraining.policy_rate(config, state.counters.step)),
        temperature=np.float32(curriculum.temperature(config, state.counters.step)),
        loss=objective.coefficients(config.loss),
    )


def pack_minibatches(config, machine, state: State, minibatches) -> Iterable[update.Batch]:
    """What each update trains on, on the devices; nothing for a mini-batch without a response to
    train on. Old log-probs are of `state`, before the first update; pre-training makes none. Where
    no model is asked first, each is packed while the update before it runs."""
    waits = pretraining.on(config, state.counters.step)
    trainer, temperature = machine.trainer, update_knobs(config, state).temperature
    mu, over = config.loss.positive_coef, trainer.row_sharding
    running = None

    def log_probs(params, rows, used):
        nonlocal running
        machine.watch.between(running)
        running = trainer.log_probs(params, rows, used, temperature)
        return running

    def pack(items: list[packing.Item]) -> update.Batch | None:
        rows, used, places = packing.pack(items, **build.row_layout(config, machine.mesh))
        if not used:
            return None
        terms = positive_lm.cells(rows, items, places, mu)
        rows, terms, used = *parallel.to_device((rows, terms), over), np.int32(used)
        old = rows.sampled_logp_AxRxT
        if config.loss.old_logprobs == "recompute" and not waits:
            old = log_probs(state.params, rows, used)
        ref = old
        if state.ref_params is not None and not waits:
            ref = log_probs(state.reference, rows, used)
        return update.Batch(rows, old, ref, used, terms)

    packed = filter(None, map(pack, minibatches))
    asked = state.critic or state.ref_params or config.loss.old_logprobs == "recompute"
    return list(packed) if asked else packed
