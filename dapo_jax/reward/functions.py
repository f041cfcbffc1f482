"""The score of a response, as `config.reward` says. No JAX: the worker processes import this."""

import contextlib
import fnmatch
import functools
import hashlib
import importlib.util
import math
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from dapo_jax import gate
from dapo_jax.dapo.reward import Grade
from dapo_jax.data import answers, prompts
from dapo_jax.data.problems import Problem
from dapo_jax.reward.settings import Reward

# A bool means right or wrong, with the score 1 or 0; a number is a score alone.
Score = Callable[[Problem, str], Grade | float | bool]


class Part(NamedTuple):
    """One term of a weighted sum."""

    name: str  # in the logs
    weight: float
    score: Score


class Failed(NamedTuple):
    """Why a response got no grade, in one line. cause: the same without the problem."""

    why: str
    cause: str
    error: BaseException | None = None


class Rewards(NamedTuple):
    """The functions that `config.reward` names, put together."""

    score: Score
    source: str  # hash of the files of the user's functions, which resume compares; '' = none
    shipped: frozenset[str]  # the shipped verifiers in use


def read(settings: Reward) -> Rewards:
    """The functions that `settings` names. ValueError: a file or function is missing, a name is
    used twice, a library is not installed."""
    files: dict[pathlib.Path, object] = {}
    shipped: set[str] = set()

    def scored(field: str, listed: str) -> Score:
        return weighted([_part(settings, field, e, files, shipped) for e in listed.split(",")])

    default = scored("function", settings.function or settings.verifier)
    by_source = []
    for entry in filter(None, (e.strip() for e in settings.by_source.split(";"))):
        pattern, equals, listed = (x.strip() for x in entry.partition("="))
        if not (pattern and equals and listed):
            raise ValueError(f"config.reward.by_source: {entry!r} is not of the form SOURCE=REWARD")
        by_source.append((pattern, scored("by_source", listed)))
    if "math" in shipped:
        answers.require_math()

    def score(problem: Problem, response: str):
        chosen = (s for pattern, s in by_source if fnmatch.fnmatchcase(problem.source, pattern))
        return graded(next(chosen, default), problem, response)

    sha256 = lambda content: hashlib.sha256(content).hexdigest()
    hashes = [sha256(path.read_bytes()) for path in files]
    source = "".join(hashes) if len(hashes) < 2 else sha256("".join(hashes).encode())
    return Rewards(score if by_source else default, source, frozenset(shipped))


_ENTRY = re.compile(r"(?:(\w+)\s*=\s*)?(?:([-+.\deE]+)\s*\*\s*)?(.*)", re.DOTALL)


def _part(settings: Reward, field: str, entry: str, files: dict, shipped: set[str]) -> Part:
    """'[NAME=][WEIGHT*]WHAT': WHAT is a shipped verifier, format, or FILE.py:FUNCTION."""
    name, weight, what = _ENTRY.fullmatch(entry.strip()).groups()
    try:
        weight = float(weight or 1)
    except ValueError:
        raise ValueError(f"config.reward.{field}: {weight!r} is no weight") from None
    if what in answers.MODES:
        shipped.add(what)
        score = by_verifier(settings, what)
    elif what == "format":
        score = tagged(settings.format_tags)
    else:
        score, what = _from_file(field, what, files), what.rpartition(":")[2]
    return Part(name or what, weight, score)


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
    each; otherwise 0. Blanks between the tags are ignored. ValueError: there are no tags."""
    if not (names := [t.strip() for t in tags.split(",") if t.strip()]):
        raise ValueError("config.reward.format_tags: no tags; the reward 'format' needs some")

    def format(problem: Problem, response: str) -> float:
        rest = response.strip()
        for tag in names:
            start, end = f"<{tag}>", f"</{tag}>"
            if not rest.startswith(start) or response.count(start) + response.count(end) != 2:
                return 0.0
            rest = rest.partition(end)[2].lstrip()
        return float(not rest)

    return format


def weighted(parts: Sequence[Part]) -> Score:
    """The weighted sum of several scores, each logged by its name. `right` and `answer` come from
    the first part that gives them. ValueError: two parts have the same name."""
    names = [p.name for p in parts]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ValueError(f"config.reward: the name {min(twice)!r} is used twice; write name=...")
    if len(parts) == 1 and parts[0].weight == 1.0:
        return parts[0].score

    def score(problem: Problem, response: str) -> Grade:
        grades = [graded(p.score, problem, response) for p in parts]
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

    return score


def _from_file(field: str, named: str, files: dict[pathlib.Path, object]) -> Score:
    """The function that 'FILE.py:NAME' names. files: the modules imported so far."""
    file, _, name = named.rpartition(":")
    path = pathlib.Path(file).expanduser()
    if not name.isidentifier() or path.suffix != ".py":
        raise ValueError(
            f"config.reward.{field}: {named!r} is not of the form FILE.py:NAME, and none of"
            f" {', '.join(answers.MODES)}, format"
        )
    if not path.is_file():
        raise ValueError(f"config.reward.{field}: {file}: no such file")
    if path not in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        files[path] = importlib.util.module_from_spec(spec)
        with gate.reading(f"config.reward.{field}:", file):
            spec.loader.exec_module(files[path])
    if not callable(score := getattr(files[path], name, None)):
        raise ValueError(f"config.reward.{field}: {file} has no function {name!r}")
    return score


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


def graded(score: Score, problem: Problem, response: str) -> Grade:
    """The grade that `score` gives a response. NoGrade: it returned something else."""
    given = score(problem, response)
    if (grade := checked(given)) is None:
        name, shown = getattr(score, "__name__", "a function"), " ".join(repr(given).split())
        raise NoGrade(
            f"reward: {name} gave {shown:.80} for a response to problem {problem.id}; it has to be"
            " a Grade with a finite score, a number or a bool (right: True, False or None; answer:"
            " a text or None; parts: names with numbers)"
        )
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


def attempt(score: Score, problem: Problem, response: str) -> Grade | Failed:
    """The grade, or the error and its place. A process that the function forked ends here."""
    own = os.getpid()
    try:
        with gate.running(), contextlib.redirect_stdout(_Output(sys.stdout)):
            return graded(score, problem, response)
    except NoGrade as error:
        return Failed(str(error), "gave what is no grade", error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # GeneratorExit, SystemExit, and exceptions of the user's own
        ours = gate.__file__, os.execl.__code__.co_filename
        *_, last = (f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours)
        where = f"{pathlib.Path(last.filename).name} line {last.lineno}"
        return failed(problem, f"{gate.describe(error)} ({where})", error)
    finally:
        if os.getpid() != own:
            os._exit(0)


def failed(problem: Problem, cause: str, error: BaseException | None = None) -> Failed:
    source = gate.visible(" ".join(problem.source.split()))
    why = f"reward: failed on a response to problem {problem.id} of {source}: {cause}"
    return Failed(why, cause, error)
