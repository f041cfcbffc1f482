"""Supervised warm-up: a base model that can do the embedded task but rarely does.

Reinforcement learning can only reinforce what is sampled now and then. Two phases of imitation give
such a model in seconds: SKILL shows nearly clean work, with a few slips, ramblings and endless
loops; HABIT then shows work that breaks off, so that careful work stays known and becomes rare.
Real models bring this from pre-training and need no warm-up.
"""

import functools

import jax
import numpy as np
from tqdm import tqdm

from dapo_jax import config, parallel
from dapo_jax.dapo import packing, update
from dapo_jax.data import arithmetic

# Imitation wants the fewest steps, RL stability: hence an optimizer of its own.
OPTIMIZER = dict(b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.01, clip_norm=1.0)


def warm_up(c, mesh, shape, tokenizer, params):
    """Both phases on `params` (which are donated); returns the new params."""
    rules = c.sharding.train.to_dict()
    programs = update.programs(shape, mesh, rules, update.optimizer(**OPTIMIZER), c.model.dtype)
    phases = (
        ("skill", c.warmup.skill_steps, c.warmup.skill_lr, arithmetic.SKILL),
        ("habit", c.warmup.habit_steps, c.warmup.habit_lr, arithmetic.HABIT),
    )
    eos = min(tokenizer.stop_ids)
    bar = tqdm(
        total=c.warmup.skill_steps + c.warmup.habit_steps,
        desc="warm-up",
        unit="step",
        disable=jax.process_index() > 0,
    )
    for number, (name, steps, peak_lr, style) in enumerate(phases):
        if not steps:
            continue
        opt_state = programs.init_opt_state(params)
        traces = arithmetic.traces(
            steps * c.warmup.batch,
            seed=2 * c.seed + number,
            style=style,
            cap=c.rollout.max_response_tokens,
        )
        items = encode(traces, tokenizer, eos)
        for step in range(steps):
            batch = items[step * c.warmup.batch : (step + 1) * c.warmup.batch]
            total = sum(len(response) for _, response in batch)
            rows, used, _ = packing.pack(
                [packing.Item(p, r, np.zeros(len(r)), 0.0, 1 / total) for p, r in batch],
                row_tokens=config.row_tokens(c),
                micro_rows=c.optim.micro_rows,
                max_items=c.warmup.batch,
            )
            rows = parallel.to_device(rows, programs.row_sharding)
            lr = np.float32(peak_lr * schedule(step / steps))
            params, opt_state, metrics = programs.supervise(
                params, opt_state, rows, np.int32(used), lr
            )
            bar.update()
            if step % 20 == 0 or step == steps - 1:
                bar.set_postfix_str(f"{name} loss {float(metrics['loss']):.3f}")
    bar.close()
    return params


def schedule(done: float) -> float:
    """Share of the peak learning rate: a short ramp, constant, a straight line to 0. The skill
    appears suddenly and at different times; a rate that sinks from the start can miss it."""
    return min(1.0, (done + 1e-3) / 0.07, (1.0 - done) / 0.25)


def encode(traces, tokenizer, eos: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids); the end-of-text token follows only where the trace ends."""

    @functools.cache
    def word_id(word: str) -> int:  # one token a word, so each word is encoded once
        (token,) = tokenizer.encode(word)
        return token

    def ids(text: str) -> list[int]:
        return [word_id(word) for word in text.split()]

    return [(ids(t.prompt), ids(t.response) + [eos] * t.ends) for t in traces]
