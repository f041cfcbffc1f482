"""What a response is worth: its grade (paper Eq. 7), Soft Overlong Punishment (Eq. 13), and what a
truncated response counts for (Overlong Filtering, section 3.4)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Grade(NamedTuple):
    """What a judge says of one response."""

    score: float  # the reward, before the length penalty; any finite number
    right: bool | None = None  # right or wrong, where there is such a thing
    answer: str | None = None  # what was read as the answer, for the log and for maj@k
    parts: Mapping[str, float] = MappingProxyType({})  # what the score is made of, logged by name


class Grades(NamedTuple):
    """Grades of the G responses to one problem."""

    score_G: np.ndarray  # float64
    right_G: np.ndarray | None = None  # bool; None = the judge only scores
    answers: Sequence[str | None] | None = None  # None = not kept over a restart
    shadow_G: np.ndarray | None = None  # bool, a second judge's verdicts; logged, never trained on
    parts_G: Mapping[str, np.ndarray] = MappingProxyType({})  # name -> float64
    source: str = ""  # the problem's data_source
    missed: int | None = None  # responses that the judge failed on; None = that would end the run


def reads_answers(answers: Iterable[str | None], right: Iterable[bool]) -> bool:
    """Whether the judge of these responses reads answers: it may say that one is right, and not
    what it read. True where none is right."""
    return {*itertools.compress(answers, right)} != {None}


def overlong_penalty(
    length: np.ndarray, max_tokens: int, buffer_tokens: int, factor: float
) -> np.ndarray:
    """Eq. 13, as verl computes it: 0 up to L_max - L_cache tokens, then a ramp down to -factor at
    L_max. `length` counts response tokens, the stop token included; without a buffer none that is
    within L_max is punished. float64, shape of `length`."""
    over = np.asarray(length, np.float64) - (max_tokens - buffer_tokens)
    return np.minimum(-over / max(buffer_tokens, 1) * factor, 0.0)


def shaped(score: np.ndarray, length: np.ndarray, max_tokens: int, reward) -> np.ndarray:
    """Reward of each response: the judge's score plus the length penalty. The filter of dynamic
    sampling never sees it, only the grade: shaped rewards differ within all-wrong groups.
    length: response TOKENS, of the scores' shape. reward: config.reward."""
    buffer_tokens, factor = reward.overlong_buffer_tokens, reward.overlong_penalty
    return score + overlong_penalty(length, max_tokens, buffer_tokens, factor)


def masks(truncated_NxG: np.ndarray, overlong_filter: str) -> tuple[np.ndarray, np.ndarray]:
    """bool [N, G] each: (responses whose tokens are trained on, responses that count in the mean
    and std of their group). overlong_filter: a truncated response is left out of nothing ('off'),
    of the 'loss', or of both ('group'). The paper "masks the loss of truncated samples"."""
    everything = np.ones_like(truncated_NxG, bool)
    trained_NxG = everything if overlong_filter == "off" else ~truncated_NxG
    counted_NxG = ~truncated_NxG if overlong_filter == "group" else everything
    return trained_NxG, counted_NxG
