"""From token ids to text, and from text to grades. Every process decodes and judges its own share
of the groups, and only the grades are gathered."""

import bisect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax import parallel
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grade, Grades
from dapo_jax.data import references, tokenizer
from dapo_jax.data.problems import Problem
from dapo_jax.reward import asking, forms, functions as rewards, workers
from dapo_jax.reward.functions import Failed, Response, Score
from dapo_jax.reward.settings import Reward
from dapo_jax.rollout import engine

LONGEST_WAIT_S = 60.0  # between two attempts


class Judge(NamedTuple):
    """What grades responses."""

    score: Score
    shadow: Score | None = None  # a second verifier, whose verdicts are logged and never trained on
    source: str = ""  # hash of the files of the user's functions, which resume compares
    pool: workers.Pool | None = None  # worker processes that judge; None = this process judges
    miss: float | None = None  # score of a response that `score` fails on; None = the run ends
    takes: Callable[[object, str], str] = references.integer  # reads a reference answer, or refuses
    own: bool = False  # the user's functions are in use: problems keep their whole rows
    memory: Any = None  # keeps grades for a resumed run (checkpoint.remembered.Grades)
    causes: set[str] | None = None  # with `miss`: why responses were missed, as far as printed
    settings: Reward = Reward()  # how many wait together, how long, and how often
    reply: Callable | None = None  # answers turns

    # Whether a grade depends on all responses to the problem
    together = property(lambda self: forms.of(self.score).by_group)


def judge(settings: Reward, score: Score | Judge | None = None) -> Judge:
    """A judge by `score` or what `settings` name. ValueError: a function or library is missing."""
    if isinstance(score, Judge):
        return score
    miss = float(settings.wrong) if settings.on_error == "miss" else None
    if score is not None:
        how = dict(causes=set(), settings=settings, takes=references.any_answer, own=True)
        reply = rewards.read(settings).reply if settings.reply else None
        return Judge(forms.of(score), miss=miss, reply=reply, **how)
    named = rewards.read(settings)
    if "math" in named.shipped and not settings.workers:
        why = "verifier 'math' may take any time and needs processes that can be ended"
        raise ValueError(f"config.reward.workers: {why}; set reward.workers=1 or more")
    shadow = pool = None
    if not settings.function:
        other = "dapo" if settings.verifier == "integer" else "integer"
        shadow = forms.of(rewards.by_verifier(settings, other))
    if settings.workers:
        pool = workers.Pool(settings.to_dict(), settings.workers, settings.timeout_s)
    own = bool(named.source)
    integers = not own and named.shipped <= {"dapo", "integer"}
    takes = references.integer if integers else references.any_answer
    how = dict(causes=set(), settings=settings, reply=named.reply)
    return Judge(named.score, shadow, named.source, pool, miss, takes, own, **how)


def grade(
    tok: tokenizer.Tokenizer, judge: Judge, responses: Sequence[engine.Response], problem: Problem
) -> Grades:
    """Decode and judge the responses to one problem. ValueError: their grades differ in kind (some
    without `right`, or with other parts); the judge fails on one and `judge.miss` is None."""
    (grades,) = _grade(tok, judge, [(responses, problem)])
    return grades


def _grade(
    tok, judge: Judge, asked: Sequence[tuple[Sequence[engine.Response], Problem]]
) -> Iterable[Grades]:
    """`grade` for several problems, whose responses the pool judges all at the same time."""
    texts = [tuple(tok.decode(r.last_turn.tolist()) for r in rows) for rows, _ in asked]
    given = [r.grade for rows, _ in asked for r in rows]  # by replies
    left = lambda rows, of: tuple(t for r, t in zip(rows, of, strict=True) if r.grade is None)
    groups = [(p, left(rows, of)) for (rows, p), of in zip(asked, texts, strict=True)]
    rest = iter(said(judge, groups))
    grades = [next(rest) if g is None else g for g in given]
    asking.bear(judge, grades)
    found = iter(grades)
    for (rows, problem), of in zip(asked, texts, strict=True):
        mine = [*itertools.islice(found, len(rows))]
        yield _grades(judge, problem, mine, of)


def said(judge: Judge, groups: Sequence[tuple[Problem, tuple[str, ...]]]) -> list[Grade | Failed]:
    """The grade of each response of each group, in order, from `judge.memory` where it is there."""
    units: list[tuple[range, tuple[Problem, Response]]] = []  # places in the result, what to ask
    keys: list[tuple[Problem, str]] = []
    together = judge.together  # looks at the function's parameters
    for problem, texts in groups:
        places = range(len(keys), len(keys) + len(texts))
        if together and texts:
            units.append((places, (problem, texts)))
            keys += [(problem, repr((i, texts))) for i in range(len(texts))]
        else:
            units += [(places[i : i + 1], (problem, text)) for i, text in enumerate(texts)]
            keys += [(problem, text) for text in texts]
    grades = judge.memory.get(keys) if judge.memory else [None] * len(keys)
    units = [unit for unit in units if any(grades[i] is None for i in unit[0])]
    found = _asked(judge, [job for _, job in units])
    for (places, _), said in zip(units, found, strict=True):
        for i in places:
            grades[i] = said[i - places[0]] if isinstance(said, list) else said
            if judge.memory and isinstance(grades[i], Grade):
                judge.memory.put(keys[i], grades[i])
    return grades


def _asked(judge: Judge, jobs: Sequence[tuple[Problem, Response]]) -> list:
    """What the reward says of each job. Those that failed for a while are asked again."""
    limits = judge.settings.concurrency, judge.settings.timeout_s
    here = lambda some: rewards.attempts(judge.score, some, *limits)
    ask = judge.pool.grade if judge.pool else here
    found = ask(jobs)
    for attempt in range(judge.settings.retries):
        bad = {i: x for i, x in enumerate(found) if isinstance(x, Failed)}
        again = [i for i, failed in bad.items() if failed.temporary]
        if not again or (judge.miss is None and len(again) < len(bad)):  # the run ends anyway
            break
        wait_s = min(2.0**attempt, LONGEST_WAIT_S)
        told = f"{bad[again[0]].why}; {len(again)} are asked again in {wait_s:g} s"
        print(f"warning: {told}", file=sys.stderr, flush=True)
        time.sleep(wait_s)
        for i, said in zip(again, ask([jobs[i] for i in again]), strict=True):
            found[i] = said
    return found


def _grades(
    judge: Judge, problem: Problem, said: Sequence[Grade | Failed], texts: Sequence[str]
) -> Grades:
    whole = [g for g in said if isinstance(g, Grade)]
    kinds = {(g.right is None, frozenset(g.parts)) for g in whole}
    if len(kinds) > 1:
        same = "each needs the same parts, and `right` has to be given for all or for none"
        raise ValueError(f"reward: the grades of problem {problem.id} differ in kind: {same}")
    right = None if whole and whole[0].right is None else False
    parts = dict.fromkeys(whole[0].parts if whole else (), np.nan)
    said = [g if isinstance(g, Grade) else Grade(judge.miss, right, None, parts) for g in said]
    shadow = None
    if judge.shadow:
        shadow = [rewards.graded(judge.shadow, problem, text).right for text in texts]
    return Grades(
        score_G=np.array([g.score for g in said], np.float64),
        right_G=None if right is None else np.array([g.right for g in said], bool),
        answers=[g.answer for g in said],
        shadow_G=np.array(shadow, bool) if shadow else None,
        parts_G={k: np.array([g.parts[k] for g in said], np.float64) for k in parts},
        source=problem.source,
        missed=None if judge.miss is None else len(said) - len(whole),
    )


def grade_groups(
    tok: tokenizer.Tokenizer, judge: Judge, groups: Sequence[Group], asked: Sequence[Problem]
) -> list[Group]:
    """The groups with their grades; `asked` are their problems. Every process has the token ids of
    all groups, since any of them may have to pack any row."""
    if not groups:
        return []
    mine = _share(len(groups), jax.process_index(), jax.process_count())
    graded, error = [], None
    try:
        graded += _grade(tok, judge, [(groups[i].responses, asked[i]) for i in mine])
    except ValueError as e:
        if jax.process_count() == 1:
            raise
        error = str(e)
    if jax.process_count() > 1:  # an error has to reach all processes, or the others would wait
        shares = parallel.gather_json([error, [_plain(g) for g in graded]])
        if errors := [e for e, _ in shares if e]:
            raise ValueError(errors[0])
        graded = [_from_plain(g) for _, share in shares for g in share]
    return [g._replace(grades=x) for g, x in zip(groups, _alike(graded), strict=True)]


def _share(n: int, process: int, processes: int) -> range:
    """The indices of 0..n-1 that a process takes, in order; sizes differ by one at most."""
    return range(n * process // processes, n * (process + 1) // processes)


def _alike(graded: list[Grades]) -> list[Grades]:
    """The grades, all of one kind: a problem whose responses all failed takes the kind of the
    others. ValueError: only some of the problems have right and wrong."""
    empty = [g.missed == len(g.score_G) for g in graded]
    scored = {g.right_G is None for g, none in zip(graded, empty, strict=True) if not none}
    if len(scored) > 1:
        mixed = "the grades of some problems say right or wrong and those of others do not"
        remedy = "give `right` for all or for none (config.reward.by_source mixes the two?)"
        raise ValueError(f"reward: {mixed}; {remedy}")
    alone = {"right_G": None} if scored == {True} else {}
    return [g._replace(**alone) if none else g for g, none in zip(graded, empty, strict=True)]


def _plain(g: Grades) -> dict:
    """Grades as JSON values; floats keep all bits."""
    fields = g._asdict() | {"parts_G": dict(g.parts_G)}
    return jax.tree.map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, fields)


def _from_plain(plain: dict) -> Grades:
    fields = ("score_G", "right_G", "shadow_G")
    arrays = {name: np.array(plain[name]) for name in fields if plain[name] is not None}
    parts = {name: np.array(x) for name, x in plain["parts_G"].items()}
    return Grades(**plain | arrays | {"parts_G": parts})


def cut_at(tok: tokenizer.Tokenizer, texts: Sequence[str]) -> Callable[[np.ndarray], int] | None:
    """`cut` of `Engine.generate`: ends a response as it completes one of `texts`; None without."""
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
