"""Dynamic Sampling (paper Eq. 11): keep sampling until the batch is full of groups that teach.

A group teaches when 0 < right < G, or, under a judge that knows no right and wrong, when its raw
scores differ. Accepted groups are taken in PROBLEM ORDER, never in order of finishing: the batch is
the first N mixed groups of the problem stream from the cursor on. It therefore depends on the
policy and the cursor alone: not on timing, on response lengths, or (with surplus='drop') on how
many problems a round asks for. The filter sees the grade, never the shaped reward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.dapo.reward import Grades, masks
from dapo_jax.dapo.settings import DynamicSampling

SPREAD = 1e-6  # scores closer than that are one score: rounding, and no difference to learn from


class Group(NamedTuple):
    """The G responses to one problem, never separated."""

    position: int  # of the problem in the stream
    prompt: Sequence[int]  # token ids
    responses: Sequence[Any]  # G engine Responses
    grades: Grades | None = None  # None = not judged yet

    def mixed(self, counted_G: np.ndarray | slice = slice(None)) -> bool:
        """Whether the responses in `counted_G` (bool [G]) can be told apart: some right and some
        wrong, or, where there is no right and wrong, raw scores that differ."""
        right_G, score_G = self.grades.right_G, self.grades.score_G
        counted = (score_G if right_G is None else right_G.astype(float))[counted_G]
        return bool(counted.size and np.ptp(counted) > SPREAD)


def teaches(group: Group, overlong_filter: str) -> bool:
    """Eq. 11 of the responses that count: whether they can be told apart."""
    truncated_G = np.array([r.truncated for r in group.responses], bool)
    return group.mixed(masks(truncated_G, overlong_filter)[1])


def fingerprint(groups: Sequence[Group]) -> Iterator[bytes]:
    """All that is decided by them, for a comparison of hosts."""
    for group in groups:
        yield np.array([group.position, *group.prompt], np.int64).tobytes()
        yield group.grades.score_G.tobytes() if group.grades else b""
        for r in group.responses:
            yield r.tokens.tobytes() + r.logps.tobytes() + bytes([r.truncated])


class Collected(NamedTuple):
    groups: list[Group]  # at most `need`, in problem order
    carried: list[Group]  # accepted beyond `need` (surplus='carry')
    drawn: list[Group]  # all that were sampled this step, the rejected ones included
    next_position: int  # where the next step's problems start
    rounds: int
    accept_rate: float  # estimate for the next step's first round


MOST_AHEAD = 4  # a round draws at most this many times the batch
MARGIN = 2.5  # a round aims so many standard deviations (of the number accepted) beyond `missing`,
SPARE = 0.1  # but by at most this share of `need`: a small batch's spread is large


def round_size(missing: int, accept_rate: float, need: int) -> int:
    """Problems to draw so that `missing` groups are accepted, nearly always: a second round,
    however small, takes as long as its longest response.

    Bounded by the batch of `need`, not by what is missing, which would starve its last groups;
    where nothing is accepted, rounds stay rounds and do not become one endless search.
    """
    spread = math.sqrt(missing * (1 - accept_rate))
    wanted = missing + min(MARGIN * spread, SPARE * need)
    return min(math.ceil(wanted / accept_rate), MOST_AHEAD * need)


def enough(accepted: Sequence[bool], missing: int) -> int:
    """How many groups there are up to the `missing`-th accepted one; all where there is none."""
    return min(int(np.searchsorted(np.cumsum(accepted), missing)) + 1, len(accepted))


def needed(
    asked: Sequence[Group],
    missing: int,
    grade: Callable,
    accept: Callable[[Group], bool],
    together: bool = False,
) -> Callable[[Sequence[Any]], int]:
    """`wanted` of `Engine.generate` where surplus='end': once `missing` groups are sure to be
    accepted, nothing of the problems behind them can be used. A group is sure as soon as those of
    its responses that have ended can be told apart: the others cannot undo that.
    asked: the problems of a round. grade: (groups) -> the groups with grades. together: a grade
    depends on all responses of its group, which is then judged when all have ended."""
    known = [False] * len(asked)  # whether it is sure
    ended: dict[int, Group] = {}  # by first request: what is judged together, with its grades

    def sure(ones: list[Group]) -> bool:
        parts = ((g.grades.score_G, g.grades.right_G) for g in ones)
        score, right = zip(*parts, strict=True)
        right_G = None if any(x is None for x in right) else np.concatenate(right)
        responses = [r for g in ones for r in g.responses]
        grades = Grades(np.concatenate(score), right_G)
        return accept(ones[0]._replace(responses=responses, grades=grades))

    def wanted(responses: Sequence[Any]) -> int:
        G = len(responses) // len(asked)
        size = G if together else 1
        of = lambda i: responses[i : i + size]
        begun = (i for i in range(0, len(responses), size) if i not in ended)
        new = [i for i in begun if None not in of(i)]
        alone = [asked[i // G]._replace(responses=of(i)) for i in new]
        ended.update(zip(new, grade(alone), strict=True))
        for n in {i // G for i in new}:
            known[n] = sure([ended[i] for i in range(n * G, n * G + G) if i in ended])
        return enough(known, missing) * G

    return wanted


def collect(
    sample: Callable[[Sequence[int]], list[Group]],
    settings: DynamicSampling,
    *,
    start: int,
    need: int,
    accept_rate: float,
    carried: Sequence[Group] = (),
    accept: Callable[[Group], bool] = Group.mixed,
    ahead: Callable[[int, int], Sequence[int]] = lambda start, size: range(start, start + size),
) -> Collected:
    """Draw rounds of problems from stream position `start` on until `need` groups are accepted or
    `max_rounds` are used up; the caller decides what to do with a batch that stayed short.

    surplus='drop': the cursor ends right behind the last group used, so a problem whose accepted
    group was not needed is sampled again, by the newer policy, and no problem is lost.
    surplus='end': likewise; what lies behind the cursor is not in `drawn` nor in `accept_rate`, so
    `sample` may leave it out (`needed`).
    surplus='carry': such groups come first in the next step, with their recorded log-probs.
    accept: whether a group teaches. accept_rate: the share that did in earlier steps; 1 = nobody
    knows, and the first round, which draws just the batch, finds out. ahead(start, size): the next
    `size` stream positions to draw, skipping excluded problems; fewer at the end.
    Without `enabled` every group is accepted and one round of `need` problems is drawn; without
    `refill` one round as well, of which the groups that teach are the batch.
    """
    dynamic, refill = settings.enabled, settings.refill
    accepted, drawn = list(carried), []
    position, rounds, teaching, prior = start, 0, 0, accept_rate
    max_rounds = settings.max_rounds if refill else 1
    while len(accepted) < need and rounds < max_rounds:
        missing = need - len(accepted)
        size = round_size(missing, accept_rate, need) if dynamic and refill else missing
        if not (positions := ahead(position, size)):
            break
        groups = sample(positions)
        if settings.surplus == "end":
            groups = groups[: enough([accept(g) for g in groups], missing)]
        drawn += groups
        taught = [g for g in groups if accept(g)]
        teaching += len(taught)
        accepted += taught if dynamic else groups
        position = groups[-1].position + 1
        rounds += 1
        # The rate of earlier steps counts as `need` problems, so that one small round does not
        # swing the estimate; where nobody knows it, as a single one.
        weight = need if prior < 1 else 1
        accept_rate = max((teaching + prior * weight) / (len(drawn) + weight), 1 / 64)
    used, extra = accepted[:need], accepted[need:] if settings.surplus == "carry" else []
    if settings.surplus != "carry" and len(used) == need and rounds:
        position = used[-1].position + 1
    return Collected(used, extra, drawn, position, rounds, accept_rate)
