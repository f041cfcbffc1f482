"""Supervised warm-up: a base model that can do the embedded task but rarely does.

Reinforcement learning can only reinforce what is sampled now and then. Phases of imitation give
such a model in seconds. The usual two: SKILL shows nearly clean work, with a few slips, ramblings
and endless loops; HABIT then shows work that breaks off, so that careful work stays known and
becomes rare. Other habits make other bases (lab/experiments/bases.py). Real models bring this from
pre-training and need no warm-up, but may be shown worked examples of one's own (`Shown`).
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import numpy as np
import optax

from dapo_jax import bars, parallel
from dapo_jax.config import validation
from dapo_jax.dapo import packing, update
from dapo_jax.data import arithmetic, problems, prompts, worked
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.model import learner, qwen2
from dapo_jax.run import first_turns

# Imitation wants the fewest steps, RL stability: hence an optimizer of its own.
OPTIMIZER = dict(b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.01, clip_norm=1.0)


def optimizer(name: str, shape: qwen2.Shape) -> optax.GradientTransformation:
    """`supervised_warmup.optimizer`. 'muon' is for the matrices of the blocks, each layer by
    itself, Adam for the rest: the embedded task is learned in 350 steps, by Adam in 900 or not."""
    if name == "adam":
        return learner.optimizer(**OPTIMIZER)

    def of_blocks(weight):  # stacked over layers; None: not a matrix
        axes, inputs = (qwen2.metadata(shape, of)["blocks"][weight] for of in ("axes", "in_axes"))
        split = (tuple(range(1, 1 + inputs)), tuple(range(1 + inputs, len(axes))))
        return optax.contrib.MuonDimensionNumbers(*split) if inputs else None

    weights = qwen2.abstract(shape)
    matrices = {"blocks": {weight: of_blocks(weight) for weight in weights["blocks"]}}
    return optax.chain(
        optax.clip_by_global_norm(OPTIMIZER["clip_norm"]),
        optax.contrib.muon(
            -1.0,  # `update.apply` multiplies by the rate, and subtracts
            beta=0.8,  # decay of the momentum
            consistent_rms=0.3,  # root mean square of a matrix's update at rate 1
            muon_weight_dimension_numbers=dict.fromkeys(weights) | matrices,
            adam_b1=OPTIMIZER["b1"],
            adam_b2=OPTIMIZER["b2"],
        ),
    )


Mix = Sequence[tuple[arithmetic.Style, Sequence[int]]]  # styles, and the levels of each


class Phase(NamedTuple):
    """Imitation of examples, every level as often, by an optimizer that starts anew."""

    name: str
    steps: int
    lr: float  # the peak; `schedule` has the shape
    mix: Mix
    seed: int  # of the examples
    cap: int  # tokens; longer examples are cut, and the model learns no end for them

    def pairs(self, n: int, tokenizer: Tokenizer) -> Iterator[worked.Pair]:
        """n examples as token ids, each made when it is asked for."""
        return encode(examples(self, n), tokenizer)


class Shown(NamedTuple):
    """Imitation of worked examples, each as often, in an order that the seed decides."""

    name: str
    steps: int
    lr: float  # the peak
    rows: list[worked.Pair]
    seed: int
    cap: int  # tokens of the longest response

    def pairs(self, n: int, tokenizer: Tokenizer) -> Iterator[worked.Pair]:
        order = problems.stream(range(len(self.rows)), self.seed)
        return (self.rows[order[i]] for i in range(n))


def usual(config) -> list[Phase]:
    """What `config.supervised_warmup` asks for: the skill, then the habit."""
    if config.reward.reply in first_turns.TURNS:
        return first_turns.phases(config)
    settings, seed = config.supervised_warmup, 2 * config.seed
    cap, levels = config.rollout.max_response_tokens, arithmetic.WARMUP_LEVELS
    skill, habit = [(arithmetic.SKILL, levels)], [(arithmetic.HABIT, levels)]
    return [
        Phase("skill", settings.skill_steps, settings.skill_lr, skill, seed, cap),
        Phase("habit", settings.habit_steps, settings.habit_lr, habit, seed + 1, cap),
    ]


def of_files(config, tokenizer: Tokenizer) -> tuple[Shown, str]:
    """The phase of `supervised_warmup.files`, and what became of their rows. ValueError: a row."""
    settings, data = config.supervised_warmup, config.data
    longest = config.rollout.max_response_tokens
    how = problems.Reading(template=prompts.template(data.template), system=data.system)
    rows, note = worked.read(settings.files, tokenizer, config.tokenizer.chat, data, longest, how)
    steps = settings.steps or -(-len(rows) // settings.batch)
    return Shown("rows", steps, settings.lr, rows, config.seed, longest), note


def warm_up(
    config,
    machine,
    tokenizer,
    params,
    phases: Sequence[Phase | Shown],
    beside: Callable[[], AbstractContextManager] = contextlib.nullcontext,
):
    """All phases on `params` (which are donated), one after the other; returns the new params.
    machine: whose mesh and shape are used.
    beside: entered when the first step is traced (Python traces one at a time), left at the end."""
    mesh, shape, rules = machine.mesh, machine.shape, config.sharding.train.to_dict()
    tx = optimizer(config.supervised_warmup.optimizer, shape)
    setup = learner.Setup(mesh, rules, tx, config.model.dtype, config.optim.offload)
    trainer = update.Trainer(shape, setup)
    row_tokens = config.data.max_prompt_tokens + max(phase.cap for phase in phases)
    total = sum(phase.steps for phase in phases)
    bar = bars.bar(total=total, desc="warm-up", unit="step", show=jax.process_index() == 0)
    metrics = None
    with bar, contextlib.ExitStack() as meanwhile:
        for phase in filter(lambda phase: phase.steps, phases):
            opt_state = trainer.init_opt_state(params)
            packed = batches(config, mesh, tokenizer, phase, row_tokens)
            for step, (rows, used) in enumerate(packed):
                rows = parallel.to_program(rows, trainer.row_sharding)
                lr = np.float32(phase.lr * schedule(step / phase.steps))
                arguments = params, opt_state, rows, np.int32(used), lr
                if not metrics:
                    trainer.supervise.lower(*arguments)
                    meanwhile.enter_context(beside())
                params, opt_state, metrics = trainer.supervise(*arguments)
                bar.update()
                if step % 20 == 0 or step == phase.steps - 1:
                    said = f"{phase.name} loss {float(metrics['loss']):.3f}"
                    bar.set_postfix_str(said, refresh=False)
    return params


def batches(
    config, mesh, tokenizer: Tokenizer, phase: Phase | Shown, row_tokens: int
) -> Iterator[tuple[packing.PackedBatch, int]]:
    """(rows, micro-batches in use) of each step of a phase, made while the step before runs."""
    size = config.supervised_warmup.batch
    row_tokens = config.optim.row_tokens or -(-row_tokens // 8) * 8
    layout = packing.Layout(row_tokens, validation.micro_rows(config, mesh.shape), size)
    examples = phase.pairs(phase.steps * size, tokenizer)
    for _ in range(phase.steps):
        batch = list(itertools.islice(examples, size))
        total = sum(len(response) for _, response, *_ in batch)
        items = [
            packing.Item(p, r, *(logps or [np.zeros(len(r))]), 0.0, 1 / total)
            for p, r, *logps in batch
        ]
        yield packing.pack(items, layout)[:2]


def examples(phase: Phase, n: int) -> Iterable[arithmetic.Trace]:
    """n of them in random order."""
    if len(phase.mix) == 1:
        [(style, levels)] = phase.mix
        return arithmetic.traces(n, levels, phase.seed, style, phase.cap)
    out, left = [], sum(len(levels) for _, levels in phase.mix)
    for style, levels in phase.mix:
        share = (n - len(out)) * len(levels) // left
        out += arithmetic.traces(share, levels, phase.seed, style, phase.cap)
        left -= len(levels)
    return [out[i] for i in np.random.default_rng(phase.seed).permutation(n)]


def schedule(done: float) -> float:
    """Share of the peak learning rate: a short ramp, constant, a straight line to 0. The skill
    appears suddenly and at different times; a rate that sinks from the start can miss it."""
    return min(1.0, (done + 1e-3) / 0.07, (1.0 - done) / 0.25)


def encode(traces: Iterable[arithmetic.Trace], tokenizer: Tokenizer) -> Iterator[worked.Pair]:
    """(prompt ids, response ids); the end-of-text token follows only where the trace ends."""
    eos = min(tokenizer.stop_ids)
    encode = functools.cache(tokenizer.encode)  # one token a word, so each word is encoded once
    ids = lambda text: [token for word in text.split() for (token,) in [encode(word)]]
    return ((ids(t.prompt), ids(t.response) + [eos] * t.ends) for t in traces)
