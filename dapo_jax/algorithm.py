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
of the ratio is fixed before the first of them. `dapo` is the paper; variants/ has other methods,
each in place of some fields of `Algorithm`. `text` and `machine` are what build.py made of the
config. A result depends on the arguments alone; nothing here writes or looks at a clock.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo import advantage, objective, update
from dapo_jax.dapo.dynamic_sampling import Collected, Group, collect, fingerprint, needed, teaches
from dapo_jax.dapo.minibatches import make_minibatches, pack_minibatches, update_policy
from dapo_jax.dapo.state import State
from dapo_jax.model import learner
from dapo_jax.reward import grading
from dapo_jax.rollout import engine
from dapo_jax.rollout.draw import Draw


class Algorithm(NamedTuple):
    """The parts of a step that a method may replace."""

    config: Any
    positions: Callable  # (text, stream, state) -> `ahead` of `collect`: which problems to draw
    teaches: Callable  # (group) -> whether it may enter the batch (Eq. 11)
    sample: Callable  # lines 2-8: (algorithm, text, machine, stream, state) -> (Collected, Stats)
    credit: Callable  # line 9: (reward_NxG, counted_NxG) -> advantage_NxG
    learn: Callable  # 10-11: (algorithm, machine, state, minibatches, knobs) -> (State, logs, dict)
    learning_rate: Callable  # (rollout step) -> the policy's
    temperature: Callable  # (rollout step) -> of sampling, and of the log-probs of what it drew
    # Added to the loss of Eq. 8, each with its weights: (groups, trained tokens [M, G]) -> float64
    # [M, G], of a token of each response
    terms: tuple[tuple[update.LossTerm, Callable], ...] = ()
    remember: tuple[Callable, ...] = ()  # each: (text, stream, state, batch) -> (State, metrics)


def dapo(config) -> Algorithm:
    """The paper's algorithm with the numbers of a config."""
    return Algorithm(
        config,
        positions=lambda text, stream, state: lambda start, size: range(start, start + size),
        teaches=lambda group: teaches(group, config.loss.overlong_filter),
        sample=sample_batch,
        credit=lambda reward_NxG, counted_NxG: advantage.group_normalize(
            reward_NxG, config.advantage, counted_NxG
        ),
        learn=learn,
        learning_rate=lambda step: learner.learning_rate(config.optim, step),
        temperature=lambda step: config.rollout.temperature,
    )  # fmt: skip


class StepRecord(NamedTuple):
    """What happened in one rollout step."""

    batch: Collected
    stats: engine.Stats  # of the sampler
    updates: list[dict[str, float]]  # metrics of each update, on the host
    knobs: update.Knobs  # of these updates
    metrics: Mapping[str, Any]  # from `learn` and `remember`, by their tags


def step(
    algorithm: Algorithm, text, machine, stream: Sequence[int], state: State,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> tuple[State, StepRecord]:  # fmt: skip
    """One rollout step: sample a batch of groups that teach, then update on it. stream: position ->
    row of the training set. on_phase: called with 'rollout' and with 'update' as each begins."""
    on_phase("rollout")
    batch, stats = algorithm.sample(algorithm, text, machine, stream, state)  # lines 2-8
    machine.engine.release()  # the update needs the cache's memory
    on_phase("update")
    minibatches = make_minibatches(algorithm, batch.groups, state.counters.step)  # line 9
    knobs = update_knobs(algorithm, state.counters.step)  # of lines 10-11
    state, updates, metrics = algorithm.learn(algorithm, machine, state, minibatches, knobs)

    counters = state.counters
    state = state._replace(carried=batch.carried).count(
        step=counters.step + 1,
        rounds=counters.rounds + batch.rounds,
        position=batch.next_position,
        accept_rate=batch.accept_rate,
        empty_steps=0 if batch.groups else counters.empty_steps + 1,
        tokens=counters.tokens + stats.tokens,
        samples=counters.samples + sum(len(g.responses) for g in batch.drawn),
    )
    for remember in algorithm.remember:
        state, more = remember(text, stream, state, batch)
        metrics = metrics | more
    return state, StepRecord(batch, stats, updates, knobs, metrics)


def sample_batch(algorithm, text, machine, stream, state: State) -> tuple[Collected, engine.Stats]:
    """Dynamic Sampling with the policy as it is at the start of the step."""
    rollout, settings = algorithm.config.rollout, algorithm.config.dynamic_sampling
    missing = rollout.groups - len(state.carried)
    ends = settings.enabled and settings.surplus == "end"
    decode_params = machine.decode_params(state.params)
    draw, totals = training_draw(algorithm, state.counters.step), []

    def grade(groups: list[Group]) -> list[Group]:
        problems = [text.train.problems[stream[g.position]] for g in groups]
        return grading.grade_groups(text.tokenizer, text.judge, groups, problems)

    def sample(positions: Sequence[int]) -> list[Group]:
        nonlocal missing
        prompts = [(i, text.train.ids[stream[i]]) for i in positions]
        asked = decode_params, prompts, rollout.group_size, draw
        none = [Group(*prompt, ()) for prompt in prompts]
        how = missing, grade, algorithm.teaches, text.judge.together
        calls = {"wanted": needed(none, *how)} if ends else {}
        groups, stats = machine.sample_groups(*asked, **calls)
        totals.append(stats)
        groups = grade(groups)
        missing -= sum(map(algorithm.teaches, groups))
        parallel.same_everywhere(f"the round from problem {positions[0]} on", fingerprint(groups))
        return groups

    begun = dict(start=state.counters.position, accept_rate=state.counters.accept_rate)
    begun |= dict(carried=state.carried, ahead=algorithm.positions(text, stream, state))
    batch = collect(sample, settings, need=rollout.groups, accept=algorithm.teaches, **begun)
    return batch, engine.total(totals)


def learn(algorithm, machine, state: State, minibatches, knobs) -> tuple[State, list[dict], dict]:
    """One update of the policy per mini-batch; no metrics beside the updates' own."""
    batches = pack_minibatches(machine, minibatches)
    return *update_policy(algorithm.config.loss, machine, state, batches, knobs), {}


def training_draw(algorithm, step: int = 0) -> Draw:
    """How rollouts of rollout step `step` are drawn."""
    c, temperature = algorithm.config, algorithm.temperature(step)
    return Draw(c.seed, temperature, c.rollout.top_p, c.rollout.max_response_tokens)


def update_knobs(algorithm, step: int) -> update.Knobs:
    """The numbers of the updates of rollout step `step`."""
    return update.Knobs(
        lr=np.float32(algorithm.learning_rate(step)),
        temperature=np.float32(algorithm.temperature(step)),
        loss=objective.coefficients(algorithm.config.loss),
    )
