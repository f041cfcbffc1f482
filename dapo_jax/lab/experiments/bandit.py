"""Clip-Higher, and the loss on right responses, where they must show, if anywhere: one rare right
token that all prompts share.

A contextual bandit. A prompt is two tokens (8 x 8 of them), a response is one. The base answers
with the same RARE token at probability .01 whatever the prompt, and it is right; the rest goes
evenly to `WRONG` answers, which differ by prompt. The steps are those of training (algorithm.py).
The move has to be shared: a prompt is in one mini-batch per rollout, so by itself its ratio is 1
when it is trained on, and no clip binds.
"""

import pathlib
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dapo_jax import algorithm, build, parallel
from dapo_jax.config import presets
from dapo_jax.dapo import packing, update
from dapo_jax.dapo.state import State
from dapo_jax.data.problems import Encoded, Problem
from dapo_jax.lab.experiments import bases
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.lab.experiments.study import Contrast, Panel, Runs, Study
from dapo_jax.model import learner, qwen2
from dapo_jax.reward import grading
from dapo_jax.run import warmup
from dapo_jax.variants import choose

SIDE, ANSWERS, WRONG = 8, 30, 12
STOP = 0  # a token id that nothing uses
RARE = 1 + 2 * SIDE  # the first of the answers
RARE_START = 0.01
IMITATION_STEPS, IMITATION_LR = 300, 5e-3
ROLLOUTS = 20
# Arm -> loss.clip_high, loss.positive_coef. The bound 10 never binds.
ARMS = {
    "eps_high 0.2": (0.2, 0.0),
    "eps_high 0.28": (0.28, 0.0),
    "eps_high 0.4": (0.4, 0.0),
    "no upper bound": (10.0, 0.0),
    "mu .1": (0.2, 0.1),
}
LOW, HIGHER, HIGHEST, UNBOUND, POSITIVE = ARMS


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


def exact(machine: build.Machine):
    """A function: params -> probabilities, float32 [prompts, vocabulary]."""
    asked_PxT = np.array(prompts(), np.int32)
    return jax.jit(lambda p: jax.nn.softmax(qwen2.bind(machine.shape, p)(asked_PxT)[:, -1]))


def taught(seed: int) -> list[packing.Item]:
    """Every answer of the base once, weighing its probability: the loss is the cross-entropy of the
    exact distributions, with its minimum there."""
    rng, out = np.random.default_rng(seed), []
    for prompt in prompts():
        wrong = rng.choice(np.arange(RARE + 1, RARE + ANSWERS), WRONG, replace=False)
        worth = {RARE: RARE_START} | dict.fromkeys(sorted(wrong.tolist()), (1 - RARE_START) / WRONG)
        for answer, p in worth.items():
            out.append(packing.Item(prompt, [answer], np.zeros(1), 0.0, p / SIDE**2))
    return out


def make(where: pathlib.Path, seed: int) -> dict:
    """A task of the pool: the base of a seed, as a checkpoint."""
    started, config = time.process_time(), settings(seed)
    machine = build.build_machine(config, config.model.vocab_size, {STOP}, None)
    params = build.initial_params(config, machine)
    rules, optimizer = config.sharding.train.to_dict(), learner.optimizer(**warmup.OPTIMIZER)
    setup = learner.Setup(machine.mesh, rules, optimizer, config.model.dtype)
    trainer = update.Trainer(machine.shape, setup)
    items = taught(seed)
    layout = packing.Layout(config.optim.row_tokens, micro_rows=16, max_items=len(items))
    rows, used, _ = packing.pack(items, layout)
    rows = parallel.to_device(rows, trainer.row_sharding)
    opt_state = trainer.init_opt_state(params)
    for step in range(IMITATION_STEPS):
        lr = np.float32(IMITATION_LR * warmup.schedule(step / IMITATION_STEPS))
        params, opt_state, _ = trainer.supervise(params, opt_state, rows, np.int32(used), lr)
    bases.save(where, config, machine, params)
    return {"cpu_s": time.process_time() - started}


class Ids:
    """The tokenizer of a task without words: a text is its token ids, written out."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def is_rare(problem: Problem, response: str) -> grading.Grade:
    """The reward of Eq. 7: +1 for the RARE token, -1 for any other."""
    rare = response == str(RARE)
    return grading.Grade(1.0 if rare else -1.0, rare)


def play(
    where: pathlib.Path, base_seed: int, clip_high: float, positive_coef: float,
    seeds: Sequence[int],
) -> dict:  # fmt: skip
    """A task of the pool: the curves of each seed, all with one machine, which compiles once."""
    started, config = time.process_time(), settings(0, clip_high, positive_coef)
    machine = build.build_machine(config, config.model.vocab_size, {STOP}, None)
    start = bases.restore(where.parent / folder("base", base_seed), machine)
    curves = {}
    for seed in seeds:
        config.seed = seed
        params = jax.tree.map(lambda w: w.copy(), start)  # the updates donate theirs
        curves[str(seed)] = learn(config, machine, params)
    return {"curves": curves, "cpu_s": time.process_time() - started}


def learn(config, machine: build.Machine, params, rollouts: int = ROLLOUTS) -> list[float]:
    """The mean probability of the RARE token before each rollout and after the last."""
    asked = [Problem(str(i), (), "", "") for i in range(SIDE * SIDE)]
    text = build.Text(Ids(), Encoded(prompts(), asked, 0), {}, [], grading.Judge(is_rare))
    stream = [i % len(asked) for i in range(rollouts * len(asked))]
    state, method = State(params, machine.trainer.init_opt_state(params)), choose.of(config)
    probabilities = exact(machine)
    tables = [np.asarray(probabilities(params))]
    for _ in range(rollouts):
        state, _ = algorithm.step(method, text, machine, stream, state)
        tables.append(np.asarray(probabilities(state.params)))
    return [float(p_PxV[:, RARE].mean()) for p_PxV in tables]


def crossing(p: Sequence[float], level: float = 0.5) -> float:
    """Rollouts until `p` is at `level`, on straight lines between rollouts; where it never gets
    there, the number of rollouts played (a lower bound)."""
    i = next((i for i, x in enumerate(p) if x >= level), len(p) - 1)
    return float(np.interp(level, p[i - 1 : i + 1], [i - 1, i])) if i else 0.0


def folder(arm: str, base_seed: int) -> str:
    return f"bandit_{arm.replace(' ', '_')}_{base_seed}"


def tasks(base_of: Mapping[int, int], arms: Sequence[str]) -> list[Task]:
    """The bases, and from each the bandit with each of `arms`."""
    seeds = sorted(set(base_of.values()))
    out = [Task(folder("base", b), make, (b,)) for b in seeds]
    for b in seeds:
        mine = [s for s in base_of if base_of[s] == b]
        mine += [s + len(base_of) for s in mine]
        after = (folder("base", b),)
        out += [Task(folder(arm, b), play, (b, *ARMS[arm], mine), after) for arm in arms]
    return out


def read(runs: Runs, arm: str) -> list[Sequence[float]]:
    """The curves of an arm by seed."""
    found: dict[str, Sequence[float]] = {}
    for base in set(runs.base_of.values()):
        found |= runs.results[folder(arm, base)]["curves"]
    return [found[seed] for seed in sorted(found, key=int)]


HALF, _X = "rollouts to p = .5", "rollout (16 updates each)"
_PANELS = [Panel(_X, "probability of the rare answer", lambda p: dict(enumerate(p)))]

CLIP_HIGHER = Study(  # Eq. 8
    "Clip-Higher",
    "Where the clip binds, a higher upper bound alone speeds up a rare right move that prompts"
    " share, and more so the higher it is.",
    [
        Contrast(HALF, HIGHER, LOW, crossing, -1),
        Contrast(HALF, HIGHEST, HIGHER, crossing, -1),
        Contrast(HALF, UNBOUND, HIGHEST, crossing, -1),
        Contrast(HALF, HIGHEST, LOW, crossing),
        Contrast(HALF, UNBOUND, LOW, crossing),
    ],
    _PANELS,
    tasks=lambda base_of: tasks(base_of, (LOW, HIGHER, HIGHEST, UNBOUND)),
    read=read,
)

POSITIVE_LM = Study(  # VAPO's loss on right responses, arXiv 2504.05118, Eq. 9-10
    "Positive-example loss",
    "Where success is rare, the log-likelihood loss on right responses speeds up its growth.",
    [Contrast(HALF, POSITIVE, LOW, crossing, -1)],
    _PANELS,
    tasks=lambda base_of: tasks(base_of, (LOW, POSITIVE)),
    read=read,
)
