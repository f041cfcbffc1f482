"""Runs with a value model, looked at token by token, from the base `careful` of bases.py.

There the first token decides: `Wait` opens a working of 16 to 31 tokens that is mostly right, any
other answers at once, in three tokens that are mostly wrong. So the same problem has short and long
responses, and it is far from the reward to the choice that earned it.

A run is one `algorithm.step` after another. All seeds of an arm share a machine, so that they
compile once. Before the policy's first update the values, and the advantages made of them, are
looked at by position in the response.
"""

import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import logging

from dapo_jax import algorithm, build, evaluate, parallel
from dapo_jax.config import presets, schema
from dapo_jax.dapo import packing
from dapo_jax.dapo.state import CriticState, State
from dapo_jax.data import arithmetic, problems
from dapo_jax.lab.experiments import bases
from dapo_jax.lab.experiments.effects import Runs
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.log import metrics
from dapo_jax.model import hf
from dapo_jax.variants.vapo import critic, update

BASE, LEVELS = "careful", (2, 3, 4, 5)
REWARD_MODEL = "reward model"  # as critic.init_from of an arm: that of its base
REWARD_MODEL_ROLLOUTS = 12  # of 256 responses, 8 updates each
REWARD_MODEL_SEED = 1 << 12  # added: it learns from none of the responses that a run draws
# Fields of arms. STEPS rollouts of the policy, at a rate at which they do not suffice.
STEPS, PRETRAINING = 8, 10
FIXED = {"optim.lr": 1e-4, "critic.length_alpha": 0.0, "critic.pretrain_steps": 0, "steps": STEPS}
PRETRAINED = {"critic.pretrain_steps": PRETRAINING, "steps": PRETRAINING + STEPS}
ADAPTIVE = {"critic.length_alpha": 1.5}
THIRDS = ("first", "middle", "last")  # of all tokens, by their position in the response
SERIES = (  # one number per rollout step
    "reward/accuracy",
    "response/length_mean",
    "critic/explained_variance",
    "critic/short/advantage_std",
    "critic/long/advantage_std",
)


def folder(arm: str, base_seed: int) -> str:
    return f"credit_{arm}_{base_seed}"


def reward_model_folder(base_seed: int) -> str:
    return f"reward_model_{base_seed}"


def tasks(base_of: Mapping[int, int], arms: Mapping[str, Mapping]) -> list[Task]:
    """The bases, a reward model of each where an arm starts from one, and each arm (name -> fields
    of the config) from each base, all seeds of that base at once."""
    seeds = sorted(set(base_of.values()))
    out = bases.tasks([BASE], seeds)
    scores = {name for name, of in arms.items() if of.get("critic.init_from") == REWARD_MODEL}
    for b in seeds:
        base, scored = bases.folder(BASE, b), reward_model_folder(b)
        if scores:
            out.append(Task(scored, make_reward_model, (b,), (base,)))
        mine = [s for s in base_of if base_of[s] == b]
        out += [
            Task(
                folder(name, b),
                play,
                (b, dict(changes), mine),
                (base, scored) if name in scores else (base,),
            )
            for name, changes in arms.items()
        ]
    return out


def found(runs: Runs, arm: str) -> list[dict]:
    """What `learn` says of each seed of an arm."""
    seeds: dict[str, dict] = {}
    for b in sorted(set(runs.base_of.values())):
        seeds |= runs.results[folder(arm, b)]["runs"]
    return [seeds[str(s)] for s in runs.base_of]


def held_out(run: Mapping, levels: Sequence[int]) -> float:
    """Accuracy after the last step, mean over held-out levels."""
    return float(np.mean([run["levels"][f"k{k}"]["accuracy"] for k in levels]))


def settings(home: pathlib.Path, base_seed: int, changes: Mapping):
    """VAPO, without the loss on right responses, which needs no advantages to teach. `home` holds
    the problems and the models of the bases."""
    config = presets.vapo(schema.base())
    config.loss.positive_coef, config.critic.lr = 0.0, 1e-3
    config.rollout.max_response_tokens = bases.ROOM
    bases.on_files(config, home / "data", LEVELS, LEVELS)
    config.update_from_flattened_dict(changes)
    if config.critic.init_from == REWARD_MODEL:
        config.critic.init_from = str((home / reward_model_folder(base_seed) / "model").absolute())
    return config


def start(where: pathlib.Path, config, base_seed: int):
    """(text, machine, weights of the base) of a task that works in the folder `where`."""
    logging.set_verbosity(logging.WARNING)
    text = build.load_text(config, where, None)
    tokenizer = text.tokenizer
    machine = build.build_machine(config, tokenizer.vocab_size, tokenizer.stop_ids, None)
    return text, machine, bases.restore(where.parent / bases.folder(BASE, base_seed), machine)


def begun(config, machine: build.Machine, params) -> State:
    """Before the first step. `params` are copied: updates donate theirs."""
    values = critic.initial_params(config, machine.critic, params)
    params = jax.tree.map(lambda w: w.copy(), params)
    state = State(params, machine.trainer.init_opt_state(params))
    return state._replace(critic=CriticState(values, machine.critic.init_opt_state(values)))


def pack(config, machine: build.Machine, items: Sequence[packing.Item]):
    """(rows on the devices, micro-batches in use, places) of a mini-batch."""
    rows, used, places = packing.pack(
        items,
        **build.row_layout(config, machine.mesh),
    )
    return parallel.to_device(rows, machine.critic.row_sharding), np.int32(used), places


# ------------------------------------------------------------------------------------------------
# A reward model
# ------------------------------------------------------------------------------------------------


def at_end(items: Sequence[packing.Item]) -> list[packing.Item]:
    """Of each response one cell, which reads its last token; that the target is this token once
    more makes no difference to a value model."""
    return [
        packing.Item(
            [*item.prompt, *item.response], item.response[-1:], np.zeros(1, np.float32),
            item.advantage, 1 / len(items),
        )
        for item in items
    ]  # fmt: skip


def make_reward_model(where: pathlib.Path, base_seed: int) -> dict:
    """A task of the pool: the base's body and a scalar head, trained to tell the reward of the
    base's responses at their last token and nowhere else, saved as `critic.init_from` reads it.
    `explained`: the share of the variance of rewards it explains there, on the last rollout."""
    started = time.process_time()
    config = settings(where.parent, base_seed, {"seed": base_seed + REWARD_MODEL_SEED})
    text, machine, params = start(where, config, base_seed)
    stream = problems.stream(range(len(text.train.ids)), config.seed)
    state, knobs = begun(config, machine, params), update.update_knobs(config, 0)
    values, opt_state = state.critic
    for rollout in range(REWARD_MODEL_ROLLOUTS):
        got, _ = algorithm.sample_batch(config, text, machine, stream, state)
        minibatches, logs = algorithm.make_minibatches(config, got.groups, rollout), []
        for items in minibatches:
            rows, used, _ = pack(config, machine, at_end(items))
            reward = rows.advantage_AxRxT
            batch = critic.Batch(rows, reward, reward, used)
            values, opt_state, log = machine.critic.update(values, opt_state, batch, knobs)
            logs.append(log)
        state = state.count(step=rollout + 1, position=got.next_position)
    shutil.rmtree(where / "model", ignore_errors=True)  # of a task that was cut off
    hf.save(where / "model", machine.critic.shape, values, "float32")
    rewards = np.array([item.advantage for items in minibatches for item in items])
    square = 2 * sum(float(log["value_loss"]) for log in logs) / len(rewards)
    return {"explained": 1 - square / rewards.var(), "cpu_s": time.process_time() - started}


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------


def play(where: pathlib.Path, base_seed: int, changes: Mapping, seeds: Sequence[int]) -> dict:
    """A task of the pool: {runs: seed -> what `learn` says of it, cpu_s} of one arm."""
    started = time.process_time()
    config = settings(where.parent, base_seed, changes)
    text, machine, params = start(where, config, base_seed)
    runs = {}
    for seed in seeds:
        config.seed = seed
        runs[str(seed)] = learn(config, text, machine, begun(config, machine, params))
    return {"runs": runs, "cpu_s": time.process_time() - started}


def learn(config, text: build.Text, machine: build.Machine, state: State) -> dict:
    """{before: `by_position` before the policy's first update, series: tag -> one value per rollout
    step of the policy, levels: level -> `bases.styles` after the last} of a run of config.steps."""
    stream = problems.stream(range(len(text.train.ids)), config.seed)
    before, series = {}, {tag: [] for tag in SERIES}
    while (step := state.counters.step) < config.steps:
        learns = step >= config.critic.pretrain_steps
        if step == config.critic.pretrain_steps:
            before = by_position(*estimates(config, text, machine, stream, state))
        state, record = algorithm.step(config, text, machine, stream, state)
        tokens = sum(len(r.tokens) for g in record.batch.drawn for r in g.responses)
        log = metrics.rollout_metrics(config, record.batch, tokens)
        log |= metrics.value_metrics(record.value_updates)
        for tag in SERIES if learns else ():
            series[tag].append(float(log[tag]) if tag in log else None)
    draws = [build.evaluation_draw(config, top_p=1.0)] * len(text.evals)
    params, wait = machine.engine.decode_params(state.params), arithmetic.WAIT
    (wait,) = text.tokenizer.encode(wait)
    every = evaluate.evaluate_together(
        machine, params, text, list(text.evals.values()), config.eval.k, draws
    )
    levels = {
        name: bases.styles(scores, wait) for name, scores in zip(text.evals, every, strict=True)
    }
    return {"before": before, "series": series, "levels": levels}


def estimates(config, text, machine, stream, state: State) -> list[list[np.ndarray]]:
    """(values, returns, advantages) of each response that the next step will draw: three lists of
    one array per response, float32 [tokens]."""
    got, _ = algorithm.sample_batch(config, text, machine, stream, state)
    minibatches = algorithm.make_minibatches(config, got.groups, state.counters.step)
    horizon, found = update.horizon(config, minibatches), [[], [], []]
    for items in minibatches:
        rows, used, places = pack(config, machine, items)
        values = machine.critic.values(state.critic.params, rows, used)
        of = machine.critic.estimate(rows, values, horizon)
        for out, cells in zip(found, (values, of.returns_AxRxT, of.advantage_AxRxT), strict=True):
            out += packing.unpack(np.asarray(cells), places)
    return found


def by_position(values, returns, advantages) -> dict:
    """What values V, returns G and advantages A (one array per response) say by position, the
    token's number in its response. If V is what the policy will earn, A has mean 0 at any position.

    slope           of A over position, per 10 tokens, by least squares over tokens
    first, ...      thirds of the tokens by position:
        explained   1 - Var(G - V) / Var(G)
        error       mean of V - G
        advantage   mean of A
    """
    at = np.concatenate([np.arange(len(v)) for v in values])
    V, G, A = (np.concatenate(x).astype(float) for x in (values, returns, advantages))
    third = np.digitize(at, np.quantile(at, [1 / 3, 2 / 3], method="lower"), right=True)
    out = {"slope": 10 * float(np.polyfit(at, A, 1)[0])}
    for i, name in enumerate(THIRDS):
        v, g, a = (x[third == i] for x in (V, G, A))
        told = {"explained": 1 - (g - v).var() / (g.var() or np.nan), "error": (v - g).mean()}
        out[name] = {k: float(x) for k, x in (told | {"advantage": a.mean()}).items()}
    return out
