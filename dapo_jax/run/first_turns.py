"""Base models for the test beds of several turns: imitation of made-up conversations.

Replies are marked as in responses that were drawn (a log-prob of inf), and are not imitated. As in
the embedded task's own warm-up a skill comes first, how a call is written and goes on, and then a
habit that makes it rare.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dapo_jax.data import arithmetic
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.reward import tools

Turns = list[tuple[str, str]]  # (what the policy writes, what it is answered; '' = nothing)
SKILL, HABIT = 0.97, 0.1  # share of turns that go on as they should


class Said(NamedTuple):
    """Imitation of conversations, each made when it is asked for; as `warmup.Phase`."""

    name: str
    steps: int
    lr: float  # the peak
    turns: Callable[..., Turns]  # (problem, share, generator)
    share: float
    seed: int
    cap: int  # tokens of the longest response

    def pairs(self, n: int, tokenizer: Tokenizer) -> Iterator[tuple]:
        """n of (prompt ids, response ids, 0 or inf of each)."""
        rng, end = np.random.default_rng([self.seed, 3]), [min(tokenizer.stop_ids)]
        made = arithmetic.problems(4096, arithmetic.WARMUP_LEVELS, self.seed)
        for i in rng.integers(len(made), size=n):
            ids, marks = [], []
            for said, reply in self.turns(made[i], self.share, rng):
                own, others = tokenizer.encode(said) + end, tokenizer.encode(reply)
                ids += own + others
                marks += [0.0] * len(own) + [np.inf] * len(others)
            yield tokenizer.encode(made[i].prompt), ids[: self.cap], np.array(marks[: self.cap])


def phases(config) -> list[Said]:
    """What `config.supervised_warmup` asks for under `reward.reply`."""
    w, seed, cap = config.supervised_warmup, 2 * config.seed, config.rollout.max_response_tokens
    turns = TURNS[config.reward.reply]
    return [
        Said("skill", w.skill_steps, w.skill_lr, turns, SKILL, seed, cap),
        Said("habit", w.habit_steps, w.habit_lr, turns, HABIT, seed + 1, cap),
    ]


def calls(problem: arithmetic.Problem, share: float, rng) -> Turns:
    """`g 4 + 2`, answered 6; `h 6 - 3`, answered 3; `Answer: 3`. A turn that does not go on so
    takes the last reply for the answer; the first, a number at random."""
    words = problem.prompt.split()[:-1]
    value, out = words[1], []
    for name, sign, operand in zip(*(iter(words[2:]),) * 3, strict=True):
        if rng.random() >= share:
            value = value if out else str(rng.integers(arithmetic.MAX_VALUE + 1))
            break
        asked = f"{value} {sign} {operand}"
        value = str(tools.evaluate(asked))
        out.append((f"{name} {asked}", value))
    return [*out, (f"{arithmetic.ANSWER} {value}", "")]


def guesses(problem: arithmetic.Problem, share: float, rng) -> Turns:
    """Numbers that may be the hidden one, evenly drawn; a turn that does not go on so names any."""
    number, low, high, out = int(rng.integers(tools.HIGHEST)) + 1, 1, tools.HIGHEST, []
    for left in range(tools.GUESSES, 0, -1):
        bounds = (low, high) if rng.random() < share else (1, tools.HIGHEST)
        said = int(rng.integers(bounds[0], bounds[1] + 1))
        if said == number or left == 1:
            return [*out, (str(said), "")]
        out.append((str(said), "+" if number > said else "-"))
        low, high = (max(low, said + 1), high) if number > said else (low, min(high, said - 1))
    return out


TURNS = {"calculator": calls, "guess": guesses}
