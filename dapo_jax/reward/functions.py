"""The score of a response, as `config.reward` says. No JAX: the worker processes import this."""

import asyncio
import contextlib
import fnmatch
import functools
import hashlib
import math
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from dapo_jax import gate
from dapo_jax.dapo.reward import Grade
from dapo_jax.data import answers, environments, prompts
from dapo_jax.data.problems import Problem
from dapo_jax.reward import forms, tools, waiting
from dapo_jax.reward.environments import score_of
from dapo_jax.reward.settings import Reward

# In any form of forms.py. A bool means right or wrong, score 1 or 0; a number is a score alone.
Score = Callable[..., Any]
Response = str | tuple[str, ...]  # one, or all to a problem where the reward takes them together


class Part(NamedTuple):
    """One term of a weighted sum."""

    name: str  # in the logs
    weight: float
    score: forms.Form


class Failed(NamedTuple):
    """Why a response got no grade, in one line. cause: the same without the problem."""

    why: str
    cause: str
    error: BaseException | None = None
    temporary: bool = False  # asked again, the function may give a grade


class Rewards(NamedTuple):
    """The functions that `config.reward` names, put together."""

    score: forms.Form
    source: str  # hash of the files of the user's functions, which resume compares; '' = none
    shipped: frozenset[str]  # the shipped verifiers in use
    reply: Callable | None = None  # answers turns


def read(settings: Reward) -> Rewards:
    """The functions that `settings` names. ValueError: a file or function is missing, a name is
    used twice, a library is not installed."""
    files: dict[pathlib.Path, object] = {}
    shipped: set[str] = set()

    def parts(field: str, listed: str) -> list[Part]:
        out = [_part(settings, field, e, files, shipped) for e in listed.split(",")]
        names = [p.name for p in out]
        if twice := {n for n in names if names.count(n) > 1}:
            used = f"the name {min(twice)!r} is used twice"
            raise ValueError(f"config.reward: {used}; write name=...")
        return out

    default = parts("function", settings.function or settings.verifier)
    by_source = []
    for pattern, listed, entry in _by_source(settings):
        if not (pattern and listed):
            raise ValueError(f"config.reward.by_source: {entry!r} is not of the form SOURCE=REWARD")
        by_source.append((pattern, parts("by_source", listed)))
    if "math" in shipped:
        answers.require_math()
    reply = tools.TOOLS.get(settings.reply)
    if settings.reply and not reply:
        reply = gate.function("config.reward.reply:", settings.reply, files, tools.TOOLS)

    def chosen(problem: Problem) -> list[Part]:
        own = (x for pattern, x in by_source if fnmatch.fnmatchcase(problem.source, pattern))
        return next(own, default)

    sha256 = lambda content: hashlib.sha256(content).hexdigest()
    hashes = [sha256(path.read_bytes()) for path in files]
    source = "".join(hashes) if len(hashes) < 2 else sha256("".join(hashes).encode())
    every = [part for listed in (default, *(x for _, x in by_source)) for part in listed]
    return Rewards(combined(chosen, every), source, frozenset(shipped), reply)


def _by_source(settings: Reward) -> list[tuple[str, str, str]]:
    """(pattern, rewards, both as they stand) of each entry."""
    entries = filter(None, (e.strip() for e in settings.by_source.split(";")))
    return [(*(x.strip() for x in e.partition("=")[::2]), e) for e in entries]


def unused(settings: Reward, sources: Collection[str]) -> list[str]:
    """A line for each pattern of `by_source` that is none of the problems' sources."""
    idle = [x for x, *_ in _by_source(settings) if not fnmatch.filter(sources, x)]
    there = ", ".join(sorted(sources))[:200]
    return [f"reward.by_source: no problem is of {x}; there are {there}" for x in idle]


_ENTRY = re.compile(r"(?:(\w+)\s*=\s*)?(?:([-+.\deE]+)\s*\*\s*)?(.*)", re.DOTALL)


def _part(settings: Reward, field: str, entry: str, files: dict, shipped: set[str]) -> Part:
    """'[NAME=][WEIGHT*]WHAT', WHAT a shipped verifier, format, FILE.py:FUNCTION, verifiers:ID or
    tinker:MODULE:NAME."""
    name, weight, what = _ENTRY.fullmatch(entry.strip()).groups()
    try:
        weight = float(weight or 1)
    except ValueError:
        weight = math.inf
    if not math.isfinite(weight):
        raise ValueError(f"config.reward.{field}: {entry.partition('*')[0]!r} is no weight")
    if what in answers.MODES:
        shipped.add(what)
        score = by_verifier(settings, what)
    elif what == "format":
        score = tagged(settings.format_tags)
    elif what.startswith(environments.PREFIX):
        score, name = score_of(what), name or what.rpartition(":")[2]
        files[environments.file(what)] = None
    else:
        score = gate.function(f"config.reward.{field}:", what, files, (*answers.MODES, "format"))
        what = what.rpartition(":")[2]
    return Part(name or what, weight, forms.of(score, f"config.reward.{field}:"))


def by_verifier(settings: Reward, mode: str) -> Score:
    """Eq. 7: `reward.correct` where the final answer is right, else `reward.wrong`."""
    right, wrong = float(settings.correct), float(settings.wrong)
    # Responses of a group come one after the other, and short ones are often the same text.
    verify = functools.lru_cache(maxsize=64)(answers.verify)

    def score(problem: Problem, response: str) -> Grade:
        prompt = prompts.plain_text(problem.messages) if mode == "auto" else ""
        verdict = verify(response, problem.answer, mode, prompt, problem.source)
        return Grade(right if verdict.correct else wrong, verdict.correct, verdict.extracted)

    return score


def tagged(tags: str) -> Score:
    """1 for a response that consists of <tag>...</tag> for each of `tags`, in this order and once
    each; otherwise 0. Blanks between the tags are ignored. ValueError: these are no tags."""
    if not (names := [t.strip() for t in tags.split(",") if t.strip()]):
        raise ValueError("config.reward.format_tags: no tags; the reward 'format' needs some")
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[\w-]+", t) for t in names):
        raise ValueError(f"config.reward.format_tags: {tags!r}: wants words that differ: a,b")

    def format(problem: Problem, response: str) -> float:
        rest = response.strip()
        for tag in names:
            start, end = f"<{tag}>", f"</{tag}>"
            if not rest.startswith(start) or response.count(start) + response.count(end) != 2:
                return 0.0
            rest = rest.partition(end)[2].lstrip()
        return float(not rest)

    return format


def combined(choose: Callable[[Problem], Sequence[Part]], every: Sequence[Part]) -> forms.Form:
    """The weighted sum of the parts that `choose` gives for a problem. every: all there are. It
    waits if one of them does, and takes groups if one of them does."""
    if len(every) == 1 and every[0].weight == 1.0:
        return every[0].score
    by_group, waits = any(p.score.by_group for p in every), any(p.score.waits for p in every)

    def score(problem: Problem, response: Response):
        parts = choose(problem)
        return total(parts, response, [graded(p.score, problem, response) for p in parts])

    async def later(problem: Problem, response: Response):
        parts = choose(problem)
        said = [awaited(p.score, problem, response) for p in parts]
        return total(parts, response, await asyncio.gather(*said))

    return forms.Form(later if waits else score, by_group, waits)


def total(parts: Sequence[Part], response: Response, said: Sequence[Any]) -> Grade | list[Grade]:
    """What the parts `said` of a response, or of each of several, put together."""
    if isinstance(response, str):
        return summed(parts, said)
    return [summed(parts, of_one) for of_one in zip(*said, strict=True)]


def summed(parts: Sequence[Part], grades: Sequence[Grade]) -> Grade:
    """The weighted sum, parts logged by name; `right` and `answer` of the first that gives them."""
    if len(parts) == 1 and parts[0].weight == 1.0:
        return grades[0]
    logged: dict[str, float] = {}
    for part, grade in zip(parts, grades, strict=True):
        logged[part.name] = grade.score
        logged |= {f"{part.name}.{k}": v for k, v in grade.parts.items()}
    return Grade(
        sum(p.weight * g.score for p, g in zip(parts, grades, strict=True)),
        next((g.right for g in grades if g.right is not None), None),
        next((g.answer for g in grades if g.answer is not None), None),
        logged,
    )


def checked(said: object) -> Grade | None:
    """What a reward function returned, as a Grade of plain Python values: a finite score; True,
    False or None; a text or None; names with finite numbers. None: it is no such grade."""
    if isinstance(said, bool | np.bool_):
        said = Grade(float(said), bool(said))
    score, right, answer, parts = said if isinstance(said, Grade) else Grade(said)
    plain = isinstance(right, bool | np.bool_ | None) and isinstance(answer, str | None)
    named = isinstance(parts, Mapping) and all(isinstance(name, str) for name in parts)
    try:
        if not (plain and named and all(map(math.isfinite, (score, *parts.values())))):
            return None
        (answer or "").encode()  # half a surrogate is no text that a file can hold
    except (TypeError, ValueError, OverflowError):  # not a number, or larger than any float
        return None
    right = None if right is None else bool(right)
    return Grade(float(score), right, answer, {name: float(x) for name, x in parts.items()})


def graded(score: Score, problem: Problem, response: Response) -> Grade | list[Grade]:
    """The grade that `score` gives a response, or those of several. NoGrade: it gave none."""
    form = forms.of(score)
    if form.by_group or isinstance(response, str):
        return approved(form, problem, response, form(problem, _given(response)))
    return [graded(form, problem, text) for text in response]


async def awaited(score: Score, problem: Problem, response: Response) -> Grade | list[Grade]:
    """`graded`, of a score that may have to wait."""
    form = forms.of(score)
    if not form.waits:
        return graded(form, problem, response)
    if form.by_group or isinstance(response, str):
        return approved(form, problem, response, await form(problem, _given(response)))
    return await asyncio.gather(*(awaited(form, problem, text) for text in response))


def _given(response: Response) -> str | list[str]:
    return response if isinstance(response, str) else list(response)


def _shown(given: object) -> str:
    return " ".join(repr(given).split())[:80]


def approved(form: forms.Form, problem: Problem, response: Response, given):
    """What a function returned, as grades. NoGrade: it is none, or they are too many or few."""
    whose = f"problem {problem.id}"
    if not isinstance(response, str):
        if isinstance(given, str | Mapping) or not hasattr(given, "__len__"):
            other = f"{_shown(given)} for {whose}: no list of grades"
            raise NoGrade(f"reward: {form.name} gave {other}")
        if len(given) != len(response):
            many = f"{len(given)} grades for {len(response)} responses to {whose}"
            raise NoGrade(f"reward: {form.name} gave {many}; it has to be one for each, in order")
        return [approved(form, problem, *x) for x in zip(response, given, strict=True)]
    if (grade := checked(given)) is None:
        gave = f"{form.name} gave {_shown(given)} for a response to {whose}"
        fields = "right: True, False or None; answer: a text or None; parts: names with numbers"
        wanted = f"a Grade with a finite score, a number or a bool ({fields})"
        raise NoGrade(f"reward: {gave}; it has to be {wanted}")
    return grade


class NoGrade(ValueError):
    """A reward function returned no grade. The message needs no context."""


class _Output(NamedTuple):
    """Standard output for a reward function, of which a process shows the first lines."""

    out: TextIO
    left = 100  # lines

    def __getattr__(self, name: str):
        return getattr(self.out, name)

    def write(self, text: str) -> int:
        before, _Output.left = _Output.left, _Output.left - text.count("\n")
        if before > 0:
            self.out.write(text)
            if _Output.left <= 0:
                self.out.write("warning: reward: what else it prints is left out; use a file\n")
        return len(text)


def attempt(score: Score, problem: Problem, response: Response, check=graded):
    """The grade, the grades or what `check` makes of a call, or the error and its place. A process
    that the function forked ends here. check: calls the function and looks at what it gives."""
    own = os.getpid()
    try:
        with gate.running(), contextlib.redirect_stdout(_Output(sys.stdout)):
            return check(score, problem, response)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # GeneratorExit, SystemExit, and exceptions of the user's own
        return raised(problem, error)
    finally:
        if os.getpid() != own:
            os._exit(0)


def attempts(
    score: Score, jobs: Sequence[tuple[Problem, Response]], at_once: int, limit_s: float,
    check: Callable = graded, later: Callable = awaited,
) -> list[Grade | list[Grade] | Failed]:  # fmt: skip
    """`attempt` of each job, in order. If the score waits, up to `at_once` jobs wait together and
    each has `limit_s` seconds. later: `check` of such a score. ValueError: it does not wait but
    blocks."""
    if not forms.waits(score):
        return [attempt(score, *job, check) for job in jobs]

    async def one(job: tuple[Problem, Response]):
        try:
            return await later(score, *job)
        except BaseException as error:
            return raised(job[0], error)

    with contextlib.redirect_stdout(_Output(sys.stdout)):
        said = waiting.all_of(one, jobs, at_once, limit_s)
    late = f"took more than {limit_s:g} s"
    return [
        failed(job[0], late, temporary=True) if x is waiting.LATE else x
        for job, x in zip(jobs, said, strict=True)
    ]


def raised(problem: Problem, error: BaseException) -> Failed:
    """The failure that an exception of the user's code is."""
    if isinstance(error, NoGrade):
        return Failed(str(error), "gave what is no grade", error)
    ours = gate.__file__, os.execl.__code__.co_filename
    *_, last = (f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours)
    where = f"{pathlib.Path(last.filename).name} line {last.lineno}"
    return failed(problem, f"{gate.describe(error)} ({where})", error, waiting.temporary(error))


def failed(
    problem: Problem, cause: str, error: BaseException | None = None, temporary: bool = False
) -> Failed:
    source = gate.visible(" ".join(problem.source.split()))
    why = f"reward: failed on a response to problem {problem.id} of {source}: {cause}"
    return Failed(why, cause, error, temporary)
