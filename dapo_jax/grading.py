"""Where token ids become text and text becomes a verdict.

`dapo/` knows no text and `data/` no JAX; this is the room between them. Every process decodes and
verifies its own share of the groups, and only what was found is gathered.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import problems, tokenizer, verifier
from dapo_jax.rollout import engine


class Grades(NamedTuple):
    """Verdicts on the G responses of one problem."""

    correct: np.ndarray  # bool [G], by reward.verifier
    shadow: np.ndarray  # bool [G], by the other mode; logged, never trained on
    answers: list[str | None]  # what reward.verifier extracted; None = no answer line
    source: str = ""  # the problem's data_source, where the caller wants it


def grade(
    tok: tokenizer.Tokenizer,
    responses: Sequence[engine.Response],
    answer: str,
    mode: str,
) -> Grades:
    """Decode and verify the responses to one problem."""
    texts = [tok.decode(r.tokens.tolist()) for r in responses]
    other = "integer" if mode == "dapo" else "dapo"
    verdicts = [verifier.verify(t, answer, mode) for t in texts]
    return Grades(
        np.array([v.correct for v in verdicts], bool),
        np.array([verifier.verify(t, answer, other).correct for t in texts], bool),
        [v.extracted for v in verdicts],
    )


def grade_groups(
    tok: tokenizer.Tokenizer, groups: Sequence[Group], answers: Sequence[str], mode: str
) -> list[Grades]:
    """`grade` of each group. Every process decodes and verifies its own share of the groups, and
    only verdicts and extracted answers are gathered (the token ids come out of the sampler whole on
    every process: any of them may have to pack any row)."""
    if not groups:
        return []
    mine = problems.host_slice(0, len(groups), jax.process_index(), jax.process_count())
    graded = [grade(tok, groups[i].responses, answers[i], mode) for i in mine]
    if jax.process_count() == 1:
        return graded
    plain = [(g.correct.tolist(), g.shadow.tolist(), g.answers) for g in graded]
    return [
        Grades(np.array(correct, bool), np.array(shadow, bool), extracted)
        for share in parallel.gather_json(plain)
        for correct, shadow, extracted in share
    ]


def cut_at(tok: tokenizer.Tokenizer, texts: Sequence[str]) -> Callable[[np.ndarray], int] | None:
    """The `cut` of `Engine.generate` that ends a response with the token that completes one of
    `texts`; None for none."""
    if not texts:
        return None

    def holds(ids: np.ndarray) -> bool:
        text = tok.decode(ids.tolist())
        return any(t in text for t in texts)

    def cut(ids: np.ndarray) -> int:
        if not holds(ids):
            return 0
        return bisect.bisect_left(range(len(ids)), True, key=lambda n: holds(ids[: n + 1])) + 1

    return cut
