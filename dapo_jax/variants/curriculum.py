"""Which problems are drawn, by how they went when they were last drawn: the field's curricula.

    pass_rate_cap        No-Positive-Resampling (ScaleRL, arXiv 2510.13786): a problem that came to
                         this pass rate is left out of later epochs, and a step draws none twice
    revisit_epochs       and comes back after so many
    band_low, band_high  a group teaches only with a pass rate between them, both excluded (OpenRLHF
                         dynamic_filtering_range)
    temperature_*        the temperature of sampling goes to another, by rollout step

A position of the stream stays an epoch and a problem, and with it the name of a sample's random
numbers: a problem that is left out is a position that is passed over. What a step draws depends on
the state at its beginning alone, so rates that the step itself finds count from the next one on.
Without config.curriculum nothing is kept and nothing asked.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dapo_jax.dapo import update
from dapo_jax.dapo.dynamic_sampling import Collected, Group
from dapo_jax.dapo.state import Rates


def is_on(config) -> bool:
    """Whether pass rates are kept."""
    c = config.curriculum
    return bool(c.pass_rate_cap or has_band(config) or c.temperature_schedule != "constant")


def has_band(config) -> bool:
    return config.curriculum.band_low > 0 or config.curriculum.band_high < 1


def pass_rate(group: Group) -> float:
    """Share of right responses or, where the reward is a score alone, the mean score: raw, and all
    responses count, as ScaleRL's and OpenRLHF's do."""
    grades = group.grades
    return float(np.mean(grades.score_G if grades.right_G is None else grades.right_G))


def in_band(config, group: Group) -> bool:
    """Whether a group that teaches lies in the band; without one, always."""
    if not has_band(config):
        return True
    return config.curriculum.band_low < pass_rate(group) < config.curriculum.band_high


def unknown(problems: int) -> Rates:
    """Before any is drawn."""
    return Rates(*(np.zeros(problems, kind) for kind in (np.float64, np.int32, np.int32)))


def due(config, rates: Rates, epoch: int) -> np.ndarray:
    """bool [P]: the problems that `epoch` draws. What was last drawn in it was due in it."""
    cap, sits_out = config.curriculum.pass_rate_cap, config.curriculum.revisit_epochs
    left_out_P = (rates.draws_P > 0) & (rates.rate_P >= cap) & (rates.epoch_P < epoch)
    if sits_out:
        left_out_P &= epoch - rates.epoch_P <= sits_out
    return ~left_out_P if cap else np.ones_like(left_out_P)


def ahead(
    config, stream: Sequence[int], problems: int, rates: Rates | None
) -> Callable[[int, int], Sequence[int]]:
    """`collect`'s, for one step: (start, size) -> the next `size` positions from `start` on whose
    problems are due, over the ends of epochs, none of a problem that the step has drawn; fewer
    where no more are. problems: in an epoch."""
    if not config.curriculum.pass_rate_cap:
        return lambda start, size: range(start, start + size)
    rates, drawn_P = rates or unknown(problems), np.zeros(problems, bool)

    def next_due(start: int, size: int) -> list[int]:
        first, found = start // problems, []
        last = first + config.curriculum.revisit_epochs + 1  # by then every one that ever is
        for epoch in range(first, last + 1):
            due_P = due(config, rates, epoch) & ~drawn_P
            rest = range(max(start, epoch * problems), (epoch + 1) * problems)
            new = (position for position in rest if due_P[stream[position]])
            found += itertools.islice(new, size - len(found))
            drawn_P[[stream[position] for position in found]] = True
        return found

    return next_due


def record(
    config, stream: Sequence[int], problems: int, rates: Rates | None, batch: Collected
) -> tuple[Rates | None, list[float]]:
    """(rates with what the step drew, what was recorded of its problems before). Groups that do not
    teach count too. What lies behind the cursor does not: it is drawn again, by the next policy."""
    if not is_on(config):
        return None, []
    before = rates or unknown(problems)
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


def temperature(config, step: int) -> float:
    """Of sampling in rollout step `step` (from 0), and of the log-probs of what it drew."""
    name, steps = config.curriculum.temperature_schedule, config.curriculum.temperature_steps
    start = config.rollout.temperature
    return update.scheduled(name, start, config.curriculum.temperature_end / start, steps, step)
