"""Clip-Higher, and the loss on right responses, where they must show, if anywhere: one rare right
token that all prompts share.

A contextual bandit. A prompt is two tokens (8 x 8 of them), a response is one. The base answers
with the same RARE token at probability .01 whatever the prompt, and it is right; the rest goes
evenly to `WRONG` answers, which differ by prompt. The steps are those of training (algorithm.py);
only the reward is this task's. Every probability is exact: a policy over single tokens can be
written out.

The move has to be shared: a prompt is in one mini-batch per rollout, so by itself its ratio is 1
when it is trained on, and no clip binds.
"""

import itertools
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from dapo_jax import algorithm, build, parallel
from dapo_jax.config import presets
from dapo_jax.dapo import packing, update
from dapo_jax.dapo.state import State
from dapo_jax.data.problems import Encoded, Problem
from dapo_jax.lab.experiments import bases
from dapo_jax.model import qwen2
from dapo_jax.reward import grading
from dapo_jax.run import warmup

SIDE, ANSWERS, WRONG = 8, 30, 12
STOP = 0  # a token id that nothing uses
RARE = 1 + 2 * SIDE  # the first of the answers
RARE_START = 0.01
IMITATION_STEPS, IMITATION_LR = 300, 5e-3
CLIP_HIGH = (0.2, 0.28, 0.4, 10.0)  # the last never binds
ROLLOUTS = 20

# What `measures` returns.
HALF, AT_10, GROWTH = "rollouts to p = .5", "p at rollout 10", "growth of p per rollout"
CLIPPED = "clipped share of tokens with positive advantage, until p = .5"
ENTROPY_HALF, ENTROPY_10 = "entropy at p = .5 (nats)", "entropy at rollout 10 (nats)"
MEASURES = (HALF, AT_10, GROWTH, CLIPPED, ENTROPY_HALF, ENTROPY_10)


def folder(clip_high: float, base_seed: int, positive_coef: float = 0.0) -> str:
    positive = f"_positive_{positive_coef:g}" if positive_coef else ""
    return f"bandit_{clip_high:g}{positive}_{base_seed}"


def base_folder(seed: int) -> str:
    return f"base_bandit_{seed}"


def label(clip_high: float) -> str:
    return f"eps_high {clip_high:g}" if clip_high < 10 else "no upper bound"


def settings(seed: int = 0, clip_high: float = 0.2, positive_coef: float = 0.0):
    """64 prompts x 16 responses per rollout, 16 updates of 4 prompts each."""
    config = presets.grpo()
    config.seed = seed
    config.loss.clip_high, config.loss.positive_coef = clip_high, positive_coef
    m = config.model
    m.vocab_size, m.hidden_size, m.intermediate_size = 1 + 2 * SIDE + ANSWERS + 1, 32, 96
    m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim = 1, 2, 1, 16
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 2, 1
    config.rollout.groups, config.rollout.group_size, config.optim.minibatches = SIDE * SIDE, 16, 16
    config.rollout.slots, config.rollout.chunk, config.rollout.prefill_prompts = 1024, 1, 64
    config.optim.row_tokens, config.optim.micro_batch_rows, config.optim.warmup_steps = 32, 4, 0
    config.supervised_warmup.batch = SIDE * SIDE * (WRONG + 1)
    return config


def prompts() -> list[list[int]]:
    return [[1 + a, 1 + SIDE + b] for a in range(SIDE) for b in range(SIDE)]


def start_policy(seed: int) -> np.ndarray:
    """What the base is taught: probabilities float64 [prompts, vocabulary]."""
    V = settings().model.vocab_size
    rng = np.random.default_rng(seed)
    wanted_PxV = np.zeros((SIDE * SIDE, V))
    wanted_PxV[:, RARE] = RARE_START
    for row in wanted_PxV:
        row[rng.choice(np.arange(RARE + 1, RARE + ANSWERS), WRONG, replace=False)] = (
            1 - RARE_START
        ) / WRONG
    return wanted_PxV


def imitation(wanted_PxV: np.ndarray) -> list[packing.Item]:
    """Every possible answer once, weighing what it should be worth: the loss is the cross-entropy
    of the exact distributions, with its minimum there."""
    return [
        packing.Item(prompt, [int(a)], np.zeros(1), 0.0, row[a] / len(wanted_PxV))
        for prompt, row in zip(prompts(), wanted_PxV, strict=True)
        for a in np.flatnonzero(row)
    ]


def build_machine(config) -> build.Machine:
    return build.build_machine(config, config.model.vocab_size, {STOP}, None)


def exact(machine: build.Machine):
    """A function: params -> probabilities, float32 [prompts, vocabulary]."""
    tokens_PxT = np.array(prompts(), np.int32)

    @jax.jit
    def probabilities(params):
        return jax.nn.softmax(qwen2.bind(machine.shape, params)(tokens_PxT)[:, -1])

    return probabilities


def make(where: pathlib.Path, seed: int) -> dict:
    """A task of the pool: the base of a seed, as a checkpoint."""
    started = time.process_time()
    config = settings(seed)
    machine = build_machine(config)
    params = build.initial_params(config, machine)
    trainer = update.Trainer(
        machine.shape,
        machine.mesh,
        config.sharding.train.to_dict(),
        update.optimizer(**warmup.OPTIMIZER),
        config.model.dtype,
    )
    items = imitation(start_policy(seed))
    rows, used, _ = packing.pack(
        items, row_tokens=config.optim.row_tokens, micro_rows=16, max_items=len(items)
    )
    rows = parallel.to_device(rows, trainer.row_sharding)
    opt_state = trainer.init_opt_state(params)
    for step in range(IMITATION_STEPS):
        lr = np.float32(IMITATION_LR * warmup.schedule(step / IMITATION_STEPS))
        params, opt_state, _ = trainer.supervise(params, opt_state, rows, np.int32(used), lr)
    bases.save(where, config, machine, params)
    p_PxV = np.asarray(exact(machine)(params))
    return {
        "rare": float(p_PxV[:, RARE].mean()),
        "entropy": entropy(p_PxV),
        "parameters": qwen2.param_count(machine.shape),
        "cpu_s": time.process_time() - started,
    }


def entropy(p_PxV: np.ndarray) -> float:
    """Mean over prompts, nats."""
    p = np.asarray(p_PxV, np.float64)
    return float(-(p * np.log(np.maximum(p, 1e-30))).sum(1).mean())


def play(
    where: pathlib.Path, base_seed: int, clip_high: float, seeds: Sequence[int],
    positive_coef: float = 0.0,
) -> dict:  # fmt: skip
    """A task of the pool: the curves of each seed at one upper bound."""
    started = time.process_time()
    config = settings(0, clip_high, positive_coef)
    machine = build_machine(config)
    probabilities = exact(machine)
    start = bases.restore(where.parent / base_folder(base_seed), machine)
    curves = {}
    for seed in seeds:
        config.seed = seed
        params = jax.tree.map(lambda w: w.copy(), start)  # the updates donate theirs
        curves[str(seed)] = learn(config, machine, probabilities, params)
    return {"curves": curves, "cpu_s": time.process_time() - started}


class Ids:
    """The tokenizer of a task without words: a text is its token ids, written out."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def is_rare(problem: Problem, response: str) -> grading.Grade:
    """The reward of Eq. 7: +1 for the RARE token, -1 for any other."""
    rare = response == str(RARE)
    return grading.Grade(1.0 if rare else -1.0, rare)


def learn(
    config, machine: build.Machine, probabilities, params, score: grading.Score = is_rare
) -> dict[str, list[float]]:
    """ROLLOUTS rollouts. `rare` and `entropy` are those before each rollout and after the last;
    `positive` and `clipped` count each rollout's tokens of positive advantage, and those of them
    whose gradient the upper bound cut."""
    asked = [Problem(str(i), (), "", "") for i in range(SIDE * SIDE)]
    text = build.Text(Ids(), Encoded(prompts(), asked, 0), {}, [], grading.Judge(score))
    stream = [i % len(asked) for i in range(ROLLOUTS * len(asked))]
    state = State(params, machine.trainer.init_opt_state(params))
    out = {"rare": [], "entropy": [], "positive": [], "clipped": []}

    def look():
        p_PxV = np.asarray(probabilities(state.params))
        out["rare"].append(float(p_PxV[:, RARE].mean()))
        out["entropy"].append(entropy(p_PxV))

    look()
    for step in range(ROLLOUTS):
        state, record = algorithm.step(config, text, machine, stream, state)
        minibatches = algorithm.make_minibatches(config, record.batch.groups, step)
        out["positive"].append(sum(x.advantage > 0 for items in minibatches for x in items))
        out["clipped"].append(round(sum(float(log["clip_high"]) for log in record.updates)))
        look()
    return out


# ------------------------------------------------------------------------------------------------
# What a curve says
# ------------------------------------------------------------------------------------------------


def crossing(p: Sequence[float], level: float = 0.5) -> float:
    """Rollouts until `p` is at `level`, on straight lines between rollouts; where it never gets
    there, the number of rollouts played (a lower bound)."""
    for i, (a, b) in enumerate(itertools.pairwise(p)):
        if a < level <= b:
            return i + (level - a) / (b - a)
    return 0.0 if p[0] >= level else float(len(p) - 1)


def growth(p: Sequence[float], below: float = 0.3) -> float:
    """By what factor a rollout multiplies `p` until it reaches `below`: a geometric mean."""
    n = next((i for i, x in enumerate(p) if x >= below), len(p) - 1)
    return (p[n] / p[0]) ** (1 / n) if n else float("nan")


def measures(curve: dict[str, list[float]]) -> dict[str, float]:
    rare, half = curve["rare"], crossing(curve["rare"])
    i = min(int(half), len(rare) - 2)
    until = slice(0, i + 1)
    between = half - i
    return {
        HALF: half,
        AT_10: rare[10],
        GROWTH: growth(rare),
        CLIPPED: sum(curve["clipped"][until]) / max(sum(curve["positive"][until]), 1),
        ENTROPY_HALF: (1 - between) * curve["entropy"][i] + between * curve["entropy"][i + 1],
        ENTROPY_10: curve["entropy"][10],
    }
