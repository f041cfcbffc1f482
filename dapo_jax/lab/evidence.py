"""What a run has left, as the rules of causes.py read it: curves, config, and samples."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.lab.dynamics.browse import Sample
from dapo_jax.lab.dynamics.logs import Series

RISE = 0.05  # of accuracy, or of a score's size: less is no learning
LEARNED = 0.9  # accuracy above which little is left to learn


class Curve(NamedTuple):
    """The finite values of a tag, over rollout steps from 1 on (0 is the evaluation before)."""

    steps: np.ndarray  # int [n]
    values: np.ndarray  # float [n]

    @property
    def window(self) -> int:
        """Steps that a mean is of: a fifth of the run, from 2 to 10."""
        return min(max(len(self.steps) // 5, 2), 10)

    @property
    def start(self) -> float:
        return float(self.values[: self.window].mean()) if len(self.values) else math.nan

    @property
    def late(self) -> float:
        return float(self.values[-self.window :].mean()) if len(self.values) else math.nan

    @property
    def median(self) -> float:
        return float(np.median(self.values)) if len(self.values) else math.nan

    @property
    def noise(self) -> float:
        """Standard error of the difference of two windows' means, from neighbouring steps."""
        if len(self.values) < 3:
            return 0.0
        return float(np.diff(self.values).std()) / math.sqrt(self.window)

    def gained(self, scale: float = 1.0) -> bool:
        """Whether the end lies above the start, by more than RISE and by more than noise."""
        return self.late - self.start > max(RISE * scale, 2 * self.noise)

    def since(self, beyond: np.ndarray) -> int:
        """The first step of `beyond` (bool [n]) from which it holds in more than half of what
        follows; else the first where it holds."""
        rest = np.cumsum(beyond[::-1])[::-1] / np.arange(len(beyond), 0, -1)
        there = np.flatnonzero(beyond & (rest > 0.5))
        there = there if len(there) else np.flatnonzero(beyond)
        return int(self.steps[there[0]]) if len(there) else int(self.steps[-1])


class Answer(NamedTuple):
    """What a response of training or evaluation says, and what became of it. right: by the reward;
    None: it gives a score alone."""

    step: int
    gold: str
    said: str  # what the reward read, or the response
    right: bool | None


class Finding(NamedTuple):
    """A figure out of its bound. step: the first at which it is; value, bound: in its unit."""

    tag: str
    step: int
    value: float
    bound: float
    why: str  # what the figure says, and where the bound comes from


class Evidence(NamedTuple):
    """What a run has left. config: field -> value, empty for a log without one. samples: of
    rollouts/; evaluated: of eval/, those that the limit did not cut off."""

    series: Mapping[str, Series]
    config: Mapping[str, Any]
    samples: Sequence[Sample] = ()
    evaluated: Sequence[Answer] = ()

    def curve(self, tag: str) -> Curve:
        steps, values = self.series.get(tag, (np.zeros(0, int), np.zeros(0)))
        there = np.isfinite(values) & ((steps > 0) | tag.startswith("eval/"))
        return Curve(steps[there], values[there])

    @property
    def score_tag(self) -> str:
        """What is learned: accuracy, else the score, else the reward of drawn responses."""
        tags = ("reward/accuracy", "reward/score", "reward/mean")
        return next((t for t in tags if t in self.series), tags[0])

    @property
    def score(self) -> Curve:
        return self.curve(self.score_tag)

    @property
    def scale(self) -> float:
        """The size of the score: 1 of an accuracy, else the largest of the run, or its range."""
        if self.score_tag == "reward/accuracy" or not len(self.score.values):
            return 1.0
        return float(max(np.abs(self.score.values).max(), np.ptp(self.score.values), 1e-9))

    @property
    def learns(self) -> bool:
        """Whether the score has risen by the end, or is high."""
        high = self.score_tag == "reward/accuracy" and self.score.late >= LEARNED
        return high or self.score.gained(self.scale)

    @property
    def learned(self) -> bool:
        """Whether little is left to learn: by training accuracy, and by an evaluation if there are
        any, as training may sample otherwise."""
        late = self.score.late if self.score_tag == "reward/accuracy" else 0.0
        held = [c.values[-1] > 0.7 * late for c in self.evaluations.values()]
        return late >= LEARNED and (not held or any(held))

    @property
    def fell(self) -> bool:
        """Whether the score ends well below its best window."""
        c = self.score
        if len(c.values) < 2 * c.window:
            return False
        means = np.convolve(c.values, np.ones(c.window) / c.window, "valid")
        return float(means.max()) - c.late > max(2 * RISE * self.scale, 3 * c.noise)

    @property
    def sinks(self) -> bool:
        """Whether all evaluations end below where they began."""
        held = [c.values for c in self.evaluations.values()]
        return bool(held) and all(values[-1] < values[0] - RISE for values in held)

    @property
    def right_rises(self) -> bool:
        """Whether right answers become more, as far as one can tell without the reward's word."""
        for tag in ("reward_part/right", "reward/accuracy"):
            if tag in self.series:
                return self.curve(tag).gained()
        held = [c.values for c in self.evaluations.values()]
        return bool(held) and all(values[-1] > values[0] for values in held)

    @property
    def older(self) -> bool:
        """Whether a batch may hold responses that older weights drew."""
        carried = self.config.get("dynamic_sampling.surplus") == "carry"
        return bool(self.config.get("rollout.staleness") or carried)

    @property
    def mixed(self) -> Curve:
        """The share of groups that differ within; a response alone (VAPO's) says nothing of it."""
        alone = self.config.get("rollout.group_size") == 1
        return self.curve("" if alone else "sampling/accept_frac")

    @property
    def evaluations(self) -> dict[str, Curve]:
        """avg@k of the evaluation sets, at top_p 1."""
        tags = [t for t in self.series if re.fullmatch(r"eval/((?!_top_p).)+/avg@k", t)]
        return {t: c for t in tags if len((c := self.curve(t)).steps)}

    def rows(self, late: bool) -> list[Sample]:
        """Samples of the last steps, or of the first: of as many as a mean is of, at least 3."""
        steps = sorted({s.step for s in self.samples})
        n = max(Curve(np.array(steps), np.zeros(0)).window, 3)
        of = set(steps[-n:] if late else steps[:n])
        return [s for s in self.samples if s.step in of]

    def judged(self, right: bool) -> list[Answer]:
        """Answers of the whole run, samples and evaluations, that the reward calls right or wrong
        and that were not cut off."""
        sampled = [answer(s) for s in self.samples if not s.truncated]
        return [a for a in (*sampled, *self.evaluated) if a.right is right]

    def paid(self, late: bool) -> list[Answer]:
        """Answers of the last steps or the first that are right by the reward or, of a graded one,
        among the better half of the samples."""
        rows = self.rows(late)
        graded = [s.reward for s in rows if s.correct is None and math.isfinite(s.reward)]
        middle = float(np.median(graded)) if graded else math.nan
        sampled = [s for s in rows if s.correct or (s.correct is None and s.reward >= middle)]
        steps = [a.step for a in self.evaluated]
        at = (max(steps) if late else min(steps)) if steps else 0
        return [*map(answer, sampled), *(a for a in self.evaluated if a.right and a.step == at)]


# --- The answer of a response, and the gold answer, as a person reads them ---

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[float]:
    return [float(x.replace(",", "")) for x in _NUMBER.findall(text)]


def answer(s: Sample) -> Answer:
    """A sample's. Of a response in which the reward read no number, all its text."""
    return Answer(
        s.step, s.answer, s.extracted if numbers(s.extracted or "") else s.response, s.correct
    )


def states(a: Answer) -> bool | None:
    """Whether what a response says last is its gold answer, whatever surrounds both; None: the gold
    answer has not one number in it, so that nobody can tell without its verifier."""
    gold, said = numbers(a.gold), numbers(a.said)
    if len(gold) != 1 or len(a.gold) > 40:
        return None
    return bool(said) and said[-1] == gold[0]


def share(found: Sequence[bool | None], fewest: int) -> float:
    """The share of True among those that can be told; NaN of fewer than `fewest`."""
    told = [x for x in found if x is not None]
    return sum(told) / len(told) if len(told) >= fewest else math.nan


class Order(NamedTuple):
    """alike: how often, of two problems that differ in both, the one with the larger gold answer
    has the larger answer, .5 by chance. chance: the share of answers that are another problem's
    gold answer. NaN where fewer than 32 answers are numbers."""

    alike: float
    chance: float


def follows(answers: Sequence[Answer]) -> Order:
    """How far answers follow their gold answers, right or not: of at most 1,000 of them."""
    told = [(g[0], said[-1]) for a in answers[:1000]
            if len(g := numbers(a.gold)) == 1 and (said := numbers(a.said))]  # fmt: skip
    if len(told) < 32:
        return Order(math.nan, math.nan)
    gold, said = np.array(told).T
    order = np.sign(gold[:, None] - gold) * np.sign(said[:, None] - said)
    alike = (order > 0).sum() / max((order != 0).sum(), 1)
    return Order(float(alike), float((said[:, None] == gold).mean()))
