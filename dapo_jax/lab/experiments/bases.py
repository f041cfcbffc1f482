"""Base models with habits that one technique is about, made by warm-up; and the problems they meet.

All come from one skill phase per seed, nearly clean and half of it in the careful style (`Wait f 4
g 6 Wait g 6 ...`); each habit goes on from there. The skill comes first, because among many slips
it may never appear (warmup.py).

    careful    long careful working, or the answer at once: right mostly, or now and then
    rambling   from `careful`: the long style repeats its steps, and may not end; it still pays
    hasty      plain working that mostly breaks off: the base of the quickstart, from this skill
"""

import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from absl import logging

from dapo_jax import build
from dapo_jax.checkpoint import checkpoint
from dapo_jax.config import schema
from dapo_jax.dapo.state import State
from dapo_jax.data import arithmetic
from dapo_jax.data.arithmetic import Style
from dapo_jax.evaluation import sampling
from dapo_jax.lab.experiments.pool import Task
from dapo_jax.model import qwen2
from dapo_jax.run import warmup

ROOM = 64  # tokens in which every careful answer of levels 2..5 fits with much to spare
TEST_LEVELS = (2, 3, 4, 5)
HARD_LEVELS = (5, 6, 7, 8)  # warm-up shows five operations at most
TRAIN_LEVELS = ((2, 3, 4, 5), (2, 3, 4), HARD_LEVELS)
TEST_PROBLEMS, TEST_SAMPLES = 48, 8  # per level


class Habit(NamedTuple):
    """How a base comes from the one before it ('' = from random weights)."""

    parent: str
    mix: warmup.Mix
    steps: int
    lr: float
    cap: int  # tokens of an example


SKILL = Style(careful=0.5, loop=0.01, slip=0.01, ramble=0.02)
# The careful style nearly always where it will fit, half the time where it will not.
CAREFUL = ((Style(careful=0.85, direct=0.15), (2, 3)), (Style(careful=0.45, direct=0.55), (4, 5)))
RAMBLING = Style(careful=0.4, direct=0.6, ramble=0.86)
HABITS = {
    "skill": Habit("", [(SKILL, arithmetic.WARMUP_LEVELS)], 900, 3e-3, 40),
    "careful": Habit("skill", CAREFUL, 300, 1.5e-3, 40),
    "rambling": Habit("careful", [(RAMBLING, (2, 3, 4))], 200, 1.5e-3, 80),
    "hasty": Habit("skill", [(arithmetic.HABIT, arithmetic.WARMUP_LEVELS)], 160, 1.5e-3, 32),
}


def lineage(name: str) -> list[str]:
    """A base and all that it comes from, parents first."""
    return [*lineage(HABITS[name].parent), name] if name else []


def folder(name: str, seed: int) -> str:
    return f"base_{name}_{seed}"


def tasks(names: Iterable[str], seeds: Sequence[int]) -> list[Task]:
    """The bases `names` of each seed and all that they come from, for the pool."""
    wanted = dict.fromkeys(of for name in names for of in lineage(name))
    parents = lambda name, s: tuple(folder(of, s) for of in lineage(name)[-2:-1])
    return [Task(folder(n, s), make, (n, s), parents(n, s)) for n in wanted for s in seeds]


def write_problems(directory: pathlib.Path) -> None:
    """A train file for each set of levels in use, a held-out file for each level, the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, count, levels, part in (
        *((train_file(directory, of), 4096, of, "train") for of in TRAIN_LEVELS),
        *((directory / f"heldout_k{k}.jsonl", TEST_PROBLEMS, [k], "heldout") for k in TEST_LEVELS),
        (directory / "heldout_hard.jsonl", 128, HARD_LEVELS, "heldout"),
    ):
        arithmetic.write_problems(file, arithmetic.problems(count, levels, 0, part))
    arithmetic.write_tokenizer(directory / "tokenizer.model")


def train_file(directory: pathlib.Path, levels) -> pathlib.Path:
    return directory / f"train_k{''.join(map(str, levels))}.jsonl"


def on_files(config, directory: pathlib.Path, train_levels, test_levels=TEST_LEVELS) -> None:
    """Make `config` train on these levels and test each held-out level alone, with ample room."""
    directory = directory.absolute()
    config.data.train = str(train_file(directory, train_levels))
    config.tokenizer.path = str(directory / "tokenizer.model")
    config.eval.files = ",".join(f"k{k}={directory}/heldout_k{k}.jsonl" for k in test_levels)
    config.eval.k, config.eval.max_problems = TEST_SAMPLES, 0
    config.eval.top_p, config.eval.every = 1.0, 0
    config.eval.max_response_tokens = max(ROOM, config.rollout.max_response_tokens)


def save(where: pathlib.Path, config, machine: build.Machine, params) -> None:
    """Leave `params` in a task's folder, as a checkpoint that `config.init_from` takes."""
    with checkpoint.manager(where / "checkpoints", keep=1, cleanup=True) as saver:
        state = State(params, machine.trainer.init_opt_state(params))
        checkpoint.save(saver, state, schema.leaves(config))


def restore(where: pathlib.Path, machine: build.Machine) -> qwen2.Params:
    """The weights that a task left in its folder, in the training layout."""
    like, shardings = qwen2.abstract(machine.shape), machine.trainer.param_shardings
    return checkpoint.restore_params(where / "checkpoints", like, shardings)


def make(where: pathlib.Path, name: str, seed: int) -> dict:
    """A task of the pool: warm up, save and evaluate. Its result is like a run's of step 0."""
    logging.set_verbosity(logging.WARNING)
    started = time.process_time()
    habit = HABITS[name]
    config = schema.base()
    config.seed = seed
    config.rollout.max_response_tokens = habit.cap
    on_files(config, where.parent / "data", (2, 3, 4, 5))
    text = build.load_text(config, where, None)
    machine = build.build_machine(config, text.tokenizer.vocab_size, text.tokenizer.stop_ids, None)
    parent = where.parent / folder(habit.parent, seed)
    params = restore(parent, machine) if habit.parent else build.initial_params(config, machine)
    own_seed = len(HABITS) * seed + list(HABITS).index(name)
    phase = warmup.Phase(name, habit.steps, habit.lr, habit.mix, own_seed, habit.cap)
    params = warmup.warm_up(config, machine, text.tokenizer, params, [phase])
    save(where, config, machine, params)
    weights, draw = machine.engine.decode_params(params), build.evaluation_draw(config, top_p=1.0)
    evaluator = sampling.Evaluator(machine, weights, text, config.eval.k)
    accuracy = {
        level: float(sampling.evaluate(evaluator, [(problems, draw)])[0].value_PxK.mean())
        for level, problems in text.evals.items()
    }
    return {"evaluations": {"0": accuracy}, "cpu_s": time.process_time() - started}
