"""Samples of a run, to be read: by problem across steps, each token colored by the policy's entropy
there; and how often the policy reflects.

What a model writes is hostile text: it is escaped, nothing in it can become markup or a formula,
and characters that would not show (or would reverse a line) appear as their codes.
"""

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from etils import epath

from dapo_jax.data.prompts import visible
from dapo_jax.lab.dynamics import logs

KINDS = ("right", "wrong", "truncated", "graded")


class Sample(NamedTuple):
    """A row of rollouts/step_NNNNNN.jsonl. Runs of older versions lack what has a default here.
    pieces, entropies (nats), logps, drawn (0: of a reply): one per token, or none at all."""

    step: int
    problem: str
    prompt: str
    response: str
    answer: str
    tokens: int
    truncated: bool
    mean_entropy: float  # nats per token
    correct: bool | None = None  # None: a graded reward, of which nothing is right or wrong
    source: str = ""
    extracted: str | None = None
    reward: float = math.nan  # with the length penalty
    pieces: Sequence[str] = ()
    entropies: Sequence[float] = ()
    logps: Sequence[float] = ()
    drawn: Sequence[int] = ()

    @property
    def kind(self) -> str:
        judged = {True: "right", False: "wrong", None: "graded"}
        return "truncated" if self.truncated else judged[self.correct]


# Of a row's fields; a list of one type is a list of such values. All others are text.
_TYPES = {"correct": bool, "truncated": bool, "tokens": int, "mean_entropy": float, "reward": float}
_LISTS = {"pieces": [str], "entropies": [float], "logps": [float], "drawn": [int]}


def steps(path: str) -> list[int]:
    """The steps of a workdir (local or gs://) that have a file of samples, ascending."""
    return list(_files(path))


def read(path: str, of: Collection[int] | None = None) -> list[Sample]:
    """Samples of a workdir (local or gs://) in order of their steps; `of`: of these steps only.
    ValueError, naming file and line: a row is no sample."""
    return list(_each(path, of))


def _each(path: str, of: Collection[int] | None = None) -> Iterator[Sample]:
    for step, file in _files(path).items():
        if of is None or step in of:
            where = f"{path}/rollouts/{file.name}"
            lines = enumerate(logs.text_of(file, where).split("\n"), 1)
            yield from (_sample(step, x, f"{where}:{n}") for n, x in lines if x.strip())


def _files(path: str) -> dict[int, epath.Path]:
    found = logs.numbered(path, "rollouts")
    if not found and not logs.attempt(path, (logs.place(path) / "rollouts").is_dir):
        raise ValueError(f"{path}: no rollouts/ in it; give a run's directory")
    return found


def _sample(step: int, text: str, where: str) -> Sample:
    row = logs.json_object(text)
    if row is None:
        raise ValueError(f"{where}: no JSON object")
    fields: dict[str, Any] = {"step": step}
    for name in Sample._fields[1:]:
        if row.get(name) is None and name in Sample._field_defaults:
            continue
        if name not in row:
            raise ValueError(f"{where}: no {name!r}; rows of a run's rollouts/ have it")
        kind = (_TYPES | _LISTS).get(name, str)
        fields[name] = _cast(row[name], kind, f"{where}: {name}")
    pieces, entropies, logps, drawn = (len(fields.get(n, ())) for n in _LISTS)
    if entropies not in (0, pieces) or logps not in (0, entropies) or drawn not in (0, pieces):
        raise ValueError(f"{where}: {', '.join(_LISTS)} have different lengths")
    return Sample(**fields)


def _cast(value, kind: type | list[type], where: str):
    if isinstance(kind, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        return tuple(_cast(x, kind[0], where) for x in value)
    if kind is float and (value is None or type(value) is int):
        return math.nan if value is None or abs(value) >= 2**53 else float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {str(value)[:40]!r}, no {kind.__name__}")
    return value


def by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Problem -> its samples by step; those seen at the most steps first."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.problem, []).append(sample)
    order = sorted(found, key=lambda name: -len({s.step for s in found[name]}))
    return {name: sorted(found[name], key=lambda s: s.step) for name in order}


def choose(
    samples: Iterable[Sample], most: int = 12, kinds: Collection[str] = KINDS
) -> list[Sample]:
    """The samples of these kinds of at most `most` problems: half of them problems seen at several
    steps, if there are so many, the others spread evenly over the run."""
    problems = by_problem(s for s in samples if s.kind in kinds)
    names = [name for name, rows in problems.items() if rows[0].step != rows[-1].step][: most // 2]
    rest = sorted(problems.keys() - set(names), key=lambda n: (problems[n][0].step, n))
    room = min(most - len(names), len(rest))
    names += [rest[i] for i in np.linspace(0, len(rest) - 1, room).round().astype(int)]
    return [s for name in names for s in problems[name]]


def few(path: str, most: int = 12) -> list[Sample]:
    """`choose` of all samples of a run, whose tokens need not fit into memory."""
    bare = (s._replace(**dict.fromkeys(_LISTS, ())) for s in _each(path))
    chosen = dict.fromkeys((s.step, s.problem) for s in choose(bare, most))
    found: dict[tuple[int, str], list[Sample]] = {key: [] for key in chosen}
    for sample in _each(path, {step for step, _ in chosen}):
        found.get((sample.step, sample.problem), []).append(sample)
    return [s for rows in found.values() for s in rows]


def about(s: Sample) -> str:
    words = (
        s.step and f"step {s.step}",
        f"{s.tokens} tokens, {s.mean_entropy:.3f} nats per token",
        not math.isnan(s.reward) and f"reward {s.reward:+.2f}",
        s.extracted is not None and f"answered {visible(s.extracted[:80])}",
    )
    return ", ".join(filter(None, words))


REPLY = "a reply to the policy, which did not write it"
HOT = 2.0  # nats from which on the color is full: a choice among e^2 = 7 equal tokens
COLORS = {"right": "#009E73", "wrong": "#D55E00", "truncated": "#CC79A7", "graded": "#999"}


def shade(nats: float) -> str:
    """Background of a token: white at 0, orange from `HOT` on; blue below 0, for a reply."""
    part = min(max(nats, 0.0), HOT) / HOT if math.isfinite(nats) else 0.0
    return "rgba(0,114,178,0.300)" if nats < 0 else f"rgba(230,110,0,{0.85 * part:.3f})"


def aligned(pieces: Sequence[str], text: str) -> list[str]:
    """Pieces with the blanks that `text` has before them, which a token decoded alone may lack
    (SentencePiece). Where several tokens make one character, the last of them gets it."""
    out, at = [], 0
    for piece in pieces:
        found = text.find(piece, at, at + len(piece) + 8) if piece else -1
        gap = text[at:found] if found >= 0 else ""
        broken = bool(out) and "\N{REPLACEMENT CHARACTER}" in out[-1]
        if found < 0 or (gap.strip() and not broken):
            out.append(piece)  # of no text, such as a stop token
            continue
        if gap.strip():
            whole = gap.rstrip()
            out[-1], gap = whole, gap[len(whole) :]
        out.append(gap + piece)
        at = found + len(piece)
    return out


def spans(s: Sample) -> list[tuple[str, float, str]]:
    """(text, nats or -1 for a reply, what shows when the pointer is on it) of each token of a
    sample; none where it has no entropies."""
    titles = [f"{nats:.3f} nats" for nats in s.entropies]
    if s.logps:
        chances = (math.exp(min(logp, 0.0)) for logp in s.logps)
        titles = [f"{t}, probability {p:.4f}" for t, p in zip(titles, chances, strict=True)]
    pieces = aligned(s.pieces, s.response)
    found = zip(pieces, s.entropies, titles, strict=True) if titles else ()
    drawn = s.drawn or [1] * len(titles)
    return [x if own else (x[0], -1.0, REPLY) for x, own in zip(found, drawn, strict=True)]


@functools.cache
def _macros():
    """pages.html, compiled once."""
    loader = jinja2.PackageLoader("dapo_jax.lab.dynamics", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    environment.filters |= {"visible": visible, "shade": shade, "about": about, "spans": spans}
    marks = [HOT * i / 4 for i in range(5)]
    environment.globals |= {"colors": COLORS, "marks": marks, "reply": REPLY}
    return environment.get_template("pages.html").module


def html(macro: str, *arguments) -> str:
    """HTML by a macro of pages.html, to be shown in a notebook or written to a file."""
    return str(getattr(_macros(), macro)(*arguments))


def page(samples: Iterable[Sample], title: str = "") -> str:
    """HTML of samples by problem across steps."""
    return html("samples", title, by_problem(samples))


# Name -> pattern, in any case, at word borders. In the embedded task `Wait` opens a repetition.
PHRASES = {
    "wait": r"wait",
    "however": r"however",
    "alternatively": r"alternatively",
    "let me check": r"let(?: me|'s|’s| us) (?:re-?)?(?:check|verify|examine)",
    "double-check": r"double[- ]check(?:ing|ed)?",
    "reconsider": r"(?:reconsider|re-?think|re-?evaluate|re-?examine|go back)",
    "mistake": r"(?:made (?:a|an) (?:mistake|error)|that(?:'s|’s| is) (?:wrong|incorrect))",
    "hmm": r"h+m+",
}


def reflection(
    samples: Iterable[Sample], phrases: Mapping[str, str] = PHRASES
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Phrase -> (steps int [n], share of the step's samples that have it, times per 1,000 response
    tokens), section 4.4 of the paper; phrases that never occur are left out, 'any of these' stands
    before several.

    Of the LOGGED samples: a step logs one right and one wrong response of a group, so the level is
    not that of all that was drawn; how it moves over the steps is what to read. Truncated ones,
    which are logged beyond their share and often repeat a word without end, are left out.
    """
    rows = [s for s in samples if not s.truncated]
    tokens = np.array([s.tokens for s in rows])
    steps, at = np.unique(np.array([s.step for s in rows], np.int64), return_inverse=True)
    per_step = lambda values: np.bincount(at, values)
    found = {
        name: np.array([len(re.findall(rf"\b{p}\b", s.response, re.IGNORECASE)) for s in rows])
        for name, p in phrases.items()
    }
    found = {name: times for name, times in found.items() if times.any()}
    if len(found) > 1:
        found = {"any of these": sum(found.values()), **found}
    return {
        name: (
            steps,
            per_step(times > 0) / np.bincount(at),
            1000 * per_step(times) / np.maximum(per_step(tokens), 1),
        )
        for name, times in found.items()
    }
