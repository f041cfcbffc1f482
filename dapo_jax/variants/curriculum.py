"""Curricula: which problems are drawn, by how they went when they were last drawn.

    pass_rate_cap        No-Positive-Resampling (ScaleRL, arXiv 2510.13786): a problem that came to
                         this pass rate is left out of later epochs, and a step draws none twice
    revisit_epochs       and comes back after so many
    band_low, band_high  a group teaches only with a pass rate between them, both excluded (OpenRLHF
                         dynamic_filtering_range)
    temperature_*        the temperature of sampling goes to another, by rollout step

A position of the stream stays an epoch and a problem, and with it the name of a sample's random
numbers: a problem that is left out is a position that is passed over. What a step draws depends on
the state at its beginning alone, so rates that the step itself finds count from the next one on.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.algorithm import Algorithm
from dapo_jax.dapo.dynamic_sampling import Collected, Group
from dapo_jax.dapo.state import State
from dapo_jax.model import learner
from dapo_jax.variants.settings import Curriculum


class Rates(NamedTuple):
    """How each of P problems went when it was last drawn (`State.by_problem`)."""

    rate_P: np.ndarray  # float64, `pass_rate`; 0 where it was never drawn
    draws_P: np.ndarray  # int32, how often it was drawn
    epoch_P: np.ndarray  # int32, of the last draw


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm with what `config.curriculum` asks for."""
    c = config.curriculum
    if not is_on(c):
        return algorithm

    def positions(text, stream, state):
        problems = len(text.train.ids)
        return ahead(c, stream, problems, rates_of(state, problems))

    def remember(text, stream, state, batch):
        problems = len(text.train.ids)
        rates, known = record(stream, problems, rates_of(state, problems), batch)
        state = state._replace(by_problem=rates._asdict())
        return state, metrics(c, state, rates, known, temperature(state.counters.step - 1))

    start, teaches = config.rollout.temperature, algorithm.teaches
    change = c.temperature_schedule, start, c.temperature_end / start, c.temperature_steps
    temperature = lambda step: learner.scheduled(*change, step)
    remembered = (*algorithm.remember, remember)
    algorithm = algorithm._replace(temperature=temperature, remember=remembered)
    if c.pass_rate_cap:
        algorithm = algorithm._replace(positions=positions)
    if has_band(c):
        in_band = lambda group: c.band_low < pass_rate(group) < c.band_high
        algorithm = algorithm._replace(teaches=lambda group: teaches(group) and in_band(group))
    return algorithm


def is_on(c: Curriculum) -> bool:
    """Whether pass rates are kept."""
    return bool(c.pass_rate_cap or has_band(c) or c.temperature_schedule != "constant")


def has_band(c: Curriculum) -> bool:
    return c.band_low > 0 or c.band_high < 1


def pass_rate(group: Group) -> float:
    """Share of right responses or, where the reward is a score alone, the mean score: raw, and all
    responses count, as ScaleRL's and OpenRLHF's do."""
    grades = group.grades
    return float(np.mean(grades.score_G if grades.right_G is None else grades.right_G))


def rates_of(state: State, problems: int) -> Rates:
    """What is recorded of the problems; zeros before any is drawn."""
    if state.by_problem:
        return Rates(**state.by_problem)
    return Rates(*(np.zeros(problems, kind) for kind in (np.float64, np.int32, np.int32)))


def due(c: Curriculum, rates: Rates, epoch: int) -> np.ndarray:
    """bool [P]: the problems that `epoch` draws. What was last drawn in it was due in it."""
    left_out_P = (rates.draws_P > 0) & (rates.rate_P >= c.pass_rate_cap) & (rates.epoch_P < epoch)
    if c.revisit_epochs:
        left_out_P &= epoch - rates.epoch_P <= c.revisit_epochs
    return ~left_out_P if c.pass_rate_cap else np.ones_like(left_out_P)


def ahead(
    c: Curriculum, stream: Sequence[int], problems: int, rates: Rates
) -> Callable[[int, int], Sequence[int]]:
    """`collect`'s, for one step: (start, size) -> the next `size` positions from `start` on whose
    problems are due, over the ends of epochs, none of a problem that the step has drawn; fewer
    where no more are. problems: in an epoch."""
    drawn_P = np.zeros(problems, bool)

    def next_due(start: int, size: int) -> list[int]:
        first, found = start // problems, []
        last = first + c.revisit_epochs + 1  # by then every one that ever is
        for epoch in range(first, last + 1):
            due_P = due(c, rates, epoch) & ~drawn_P
            if len(found) == size or not due_P.any():
                continue
            rest = range(max(start, epoch * problems), (epoch + 1) * problems)
            new = (position for position in rest if due_P[stream[position]])
            found += itertools.islice(new, size - len(found))
            drawn_P[[stream[position] for position in found]] = True
        return found

    return next_due


def record(
    stream: Sequence[int], problems: int, before: Rates, batch: Collected
) -> tuple[Rates, list[float]]:
    """(rates with what the step drew, what was recorded of its problems before). Groups that do not
    teach count too. What lies behind the cursor does not: it is drawn again, by the next policy."""
    rates = Rates(*(x.copy() for x in before))  # a checkpoint may be writing the old ones
    known = []
    for group in batch.drawn:  # in the order of the stream: the last draw is the newest
        row = stream[group.position]
        if group.position < batch.next_position:
            known += [before.rate_P[row]] if before.draws_P[row] else []
            rates.rate_P[row] = pass_rate(group)
            rates.draws_P[row] += 1
            rates.epoch_P[row] = group.position // problems
    return rates, known


def metrics(
    c: Curriculum, state: State, rates: Rates, known: Sequence[float], temperature: float
) -> dict:
    """state: after the step. known: rates of its problems before it. temperature: the step's."""
    problems = len(rates.rate_P)
    seen_P = rates.draws_P > 0
    due_P = due(c, rates, state.counters.position // problems)
    bins = np.searchsorted(RATE_EDGES[1:-1], rates.rate_P[seen_P], side="left")
    log = {
        "curriculum/left_out": (~due_P).sum(),
        "curriculum/by_pass_rate": np.bincount(bins, minlength=len(RATE_EDGES) - 1).tolist(),
        "curriculum/temperature": np.float32(temperature),
    }
    log |= {"curriculum/pass_rate": rates.rate_P[seen_P].mean()} if seen_P.any() else {}
    return log | ({"curriculum/known_rate": np.mean(known)} if known else {})


# Bounds of the bins of curriculum/by_pass_rate; a bin holds its upper one
RATE_EDGES = (-0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
NONE_LEFT = (
    "no problem is left to draw: all of them came to config.curriculum.pass_rate_cap when they were"
    " last drawn; give harder ones, or let them come back by config.curriculum.revisit_epochs"
)


def wants(config) -> str:
    """What a group needs besides responses that differ, in words; '' = nothing."""
    c = config.curriculum
    return f" and a pass rate in {c.band_low}..{c.band_high}" if has_band(c) else ""


def ran_out(config, log: dict) -> str:
    """Why no problem was left to draw for a short batch, in words; '' where rounds ran out."""
    of = config.dynamic_sampling
    rounds_left = of.refill and log["sampling/rounds"] < of.max_rounds
    if not (config.curriculum.pass_rate_cap and rounds_left):
        return ""
    left_out = f"{log['curriculum/left_out']:.0f} problems"
    cap = "config.curriculum.pass_rate_cap"
    return f"having drawn once all but the {left_out} that {cap} leaves out"
