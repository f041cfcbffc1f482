"""Where token ids become text and text becomes a grade.

`dapo/` knows no text and `data/` no JAX; this is the room between them. What judges a response is a
value that is passed in: any function `score(problem, response) -> Grade`. Every process decodes and
judges its own share of the groups, and only what was found is gathered.
"""

import bisect
import hashlib
import importlib.util
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grade, Grades
from dapo_jax.data import problems, tokenizer, verifier
from dapo_jax.data.problems import Problem
from dapo_jax.rollout import engine

__all__ = ["Grade", "Grades", "Judge", "Score", "ask", "cut_at", "grade", "grade_groups", "judge"]

# A bool is taken for right or wrong with the score 1 or 0, a number for a score alone.
Score = Callable[[Problem, str], Grade | float | bool]


class Judge(NamedTuple):
    """What decides on responses, and what looks on."""

    score: Score
    shadow: Score | None = None  # its verdicts are logged, never trained on
    source: str = ""  # hash of the file that a user's function comes from: what resume compares


def judge(config, score: Score | Judge | None = None) -> Judge:
    """`score` where it is given, else what `config.reward` names. ValueError: the file of
    `reward.function` has no such function."""
    if score is not None:
        return score if isinstance(score, Judge) else Judge(score)
    if config.reward.function:
        return _from_file(config.reward.function)
    other = "integer" if config.reward.verifier == "dapo" else "dapo"
    return Judge(*(by_verifier(config, mode) for mode in (config.reward.verifier, other)))


def by_verifier(config, mode: str) -> Score:
    """Eq. 7: `reward.correct` where the final answer is right, else `reward.wrong`."""
    right, wrong = float(config.reward.correct), float(config.reward.wrong)

    def score(problem: Problem, response: str) -> Grade:
        verdict = verifier.verify(response, problem.answer, mode)
        return Grade(right if verdict.correct else wrong, verdict.correct, verdict.extracted)

    return score


def _from_file(named: str) -> Judge:
    """The function of 'FILE.py:NAME'."""
    file, _, name = named.rpartition(":")
    path = pathlib.Path(file).expanduser()
    if not name.isidentifier() or path.suffix != ".py":
        raise ValueError(f"config.reward.function: {named!r} is not of the form FILE.py:NAME")
    if not path.is_file():
        raise ValueError(f"config.reward.function: {file}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(score := getattr(module, name, None)):
        raise ValueError(f"config.reward.function: {file} has no function {name!r}")
    return Judge(score, source=hashlib.sha256(path.read_bytes()).hexdigest())


def ask(score: Score, problem: Problem, response: str) -> Grade:
    """What a judge says, as a Grade. ValueError: it says nothing that could be one."""
    said = score(problem, response)
    if isinstance(said, bool | np.bool_):
        said = Grade(float(said), bool(said))
    elif isinstance(said, int | float | np.integer | np.floating):
        said = Grade(float(said))
    if not (isinstance(said, Grade) and math.isfinite(said.score)):
        raise ValueError(
            f"reward: {getattr(score, '__name__', score)} gave {said!r:.80} for a response to"
            f" problem {problem.id}; it has to be a Grade with a finite score, a number or a bool"
        )
    return said


def grade(
    tok: tokenizer.Tokenizer, judge: Judge, responses: Sequence[engine.Response], problem: Problem
) -> Grades:
    """Decode and judge the responses to one problem. ValueError: some of them are right or wrong,
    or have other parts, and some are not."""
    texts = [tok.decode(r.tokens.tolist()) for r in responses]
    said = [ask(judge.score, problem, text) for text in texts]
    kinds = {(g.right is None, tuple(g.parts)) for g in said}
    if len(kinds) > 1:
        raise ValueError(
            f"reward: the grades of problem {problem.id} differ in kind: each needs the same parts,"
            " and `right` has to be given for all responses or for none"
        )
    graded_only = said[0].right is None
    shadow = judge.shadow and [ask(judge.shadow, problem, text).right for text in texts]
    return Grades(
        score_G=np.array([g.score for g in said], np.float64),
        right_G=None if graded_only else np.array([g.right for g in said], bool),
        answers=[g.answer for g in said],
        shadow_G=np.array(shadow, bool) if shadow else None,
        parts_G={k: np.array([g.parts[k] for g in said], np.float64) for k in said[0].parts},
        source=problem.source,
    )


def grade_groups(
    tok: tokenizer.Tokenizer, judge: Judge, groups: Sequence[Group], asked: Sequence[Problem]
) -> list[Group]:
    """The groups with their `grade`; `asked` are their problems. Every process decodes and judges
    its own share of the groups, and only grades are gathered (the token ids come out of the sampler
    whole on every process: any of them may have to pack any row)."""
    if not groups:
        return []
    mine = problems.host_slice(0, len(groups), jax.process_index(), jax.process_count())
    graded = [grade(tok, judge, groups[i].responses, asked[i]) for i in mine]
    if jax.process_count() > 1:
        shares = parallel.gather_json([_plain(g) for g in graded])
        graded = [_from_plain(g) for share in shares for g in share]
    return [g._replace(grades=x) for g, x in zip(groups, graded, strict=True)]


def _plain(g: Grades) -> dict:
    """As JSON, in which floats travel exactly."""
    listed = lambda x: None if x is None else x.tolist()
    return g._asdict() | {
        "score_G": g.score_G.tolist(),
        "right_G": listed(g.right_G),
        "shadow_G": listed(g.shadow_G),
        "parts_G": {k: x.tolist() for k, x in g.parts_G.items()},
    }


def _from_plain(plain: dict) -> Grades:
    bools = lambda x: None if x is None else np.array(x, bool)
    return Grades(**plain)._replace(
        score_G=np.array(plain["score_G"], np.float64),
        right_G=bools(plain["right_G"]),
        shadow_G=bools(plain["shadow_G"]),
        parts_G={k: np.array(x, np.float64) for k, x in plain["parts_G"].items()},
    )


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
