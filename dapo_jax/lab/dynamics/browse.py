"""Samples of a run, to be read: by problem across steps, each token colored by the policy's entropy
there; and how often the policy reflects.

What a model writes is hostile text: it is escaped, nothing in it can become markup or a formula,
and characters that would not show (or would reverse a line) appear as their codes.
"""

import html
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dapo_jax.lab.dynamics import logs

KINDS = ("right", "wrong", "truncated")


class Sample(NamedTuple):
    """A row of rollouts/step_NNNNNN.jsonl. Runs of older versions lack what has a default here.

    pieces, entropies (nats), logps: one per response token, or none at all.
    """

    step: int
    problem: str
    prompt: str
    response: str
    answer: str
    correct: bool
    tokens: int
    truncated: bool
    mean_entropy: float  # nats per token
    source: str = ""
    extracted: str | None = None
    reward: float = math.nan  # with the length penalty
    pieces: tuple[str, ...] = ()
    entropies: tuple[float, ...] = ()
    logps: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        return "truncated" if self.truncated else "right" if self.correct else "wrong"


# ------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------

_TYPES = {"problem": str, "prompt": str, "response": str, "answer": str, "correct": bool}
_TYPES |= {"truncated": bool, "tokens": int, "mean_entropy": float}
_LISTS = {"pieces": str, "entropies": float, "logps": float}


def steps(path: str) -> list[int]:
    """The steps of a workdir (local or gs://) that have a file of samples, ascending."""
    return sorted(_files(path))


def read(path: str, of: Collection[int] | None = None) -> list[Sample]:
    """Samples of a workdir (local or gs://) in order of their steps; `of`: of these steps only.

    Raises ValueError naming file and line for a row that is not a sample.
    """
    out = []
    for step, file in sorted(_files(path).items()):
        if of is None or step in of:
            where = f"{path}/rollouts/{file.name}"
            for line, text in enumerate(logs.text_of(file, where).split("\n"), 1):
                if text.strip():
                    out.append(_sample(step, text, f"{where}:{line}"))
    return out


def _files(path: str) -> dict[int, epath.Path]:
    folder = logs.place(path) / "rollouts"
    if not logs.attempt(path, folder.is_dir):
        raise ValueError(f"{path}: no rollouts/ in it; give a run's directory")
    files = logs.attempt(path, lambda: list(folder.iterdir()))
    named = ((re.fullmatch(r"step_(\d{1,15})\.jsonl", f.name), f) for f in files)
    return {int(match[1]): file for match, file in named if match}


def _sample(step: int, text: str, where: str) -> Sample:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON object") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: no JSON object")
    fields: dict[str, Any] = {"step": step}
    for name, kind in _TYPES.items():
        if name not in row:
            raise ValueError(f"{where}: no {name!r}; rows of a run's rollouts/ have it")
        fields[name] = _cast(row[name], kind, f"{where}: {name}")
    for name, kind in _LISTS.items():
        if row.get(name) is not None:
            if not isinstance(row[name], list):
                raise ValueError(f"{where}: {name} is no list")
            fields[name] = tuple(_cast(x, kind, f"{where}: {name}") for x in row[name])
    if len({len(fields.get(n, ())) for n in _LISTS} - {0}) > 1:
        raise ValueError(f"{where}: {', '.join(_LISTS)} have different lengths")
    for name, kind in (("source", str), ("extracted", str), ("reward", float)):
        if row.get(name) is not None:
            fields[name] = _cast(row[name], kind, f"{where}: {name}")
    return Sample(**fields)


def _cast(value, kind: type, where: str):
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**53 else math.nan
    if kind is float and value is None:
        return math.nan
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {str(value)[:40]!r}, no {kind.__name__}")
    return value


def by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Problem -> its samples by step; those seen at the most steps first."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.problem, []).append(sample)
    order = sorted(found.items(), key=lambda item: -len({s.step for s in item[1]}))
    return {name: sorted(rows, key=lambda s: s.step) for name, rows in order}


def choose(
    samples: Iterable[Sample], most: int = 12, kinds: Collection[str] = KINDS
) -> list[Sample]:
    """The samples of these kinds of at most `most` problems: half of them problems seen at several
    steps, if there are so many, the others spread evenly over the run."""
    problems = by_problem(s for s in samples if s.kind in kinds)
    again = [name for name, rows in problems.items() if rows[0].step != rows[-1].step]
    names = again[: most // 2]
    rest = sorted(problems.keys() - set(names), key=lambda n: (problems[n][0].step, n))
    room = min(most - len(names), len(rest))
    names += [rest[i] for i in np.linspace(0, len(rest) - 1, room).round().astype(int)]
    return [s for name in names for s in problems[name]]


# ------------------------------------------------------------------------------------------------
# Text
# ------------------------------------------------------------------------------------------------


def distinct(answers: Iterable[Any]) -> list[tuple[Any, int]]:
    """Answers (`tokens.Answer`) of different tokens, each with how often it was drawn."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for answer in answers:
        found.setdefault(tuple(t.piece for t in answer.tokens), []).append(answer)
    return [(same[0], len(same)) for same in found.values()]


def visible(text: str) -> str:
    """Characters that do not show or that steer what does (controls, escapes, turns of the writing
    direction, odd blanks, halves of surrogate pairs) as codes; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(x if x in "\n\t" or x.isprintable() else f"\\u{{{ord(x):x}}}" for x in text)


def text(samples: Iterable[Sample], title: str = "") -> str:
    """For a terminal: one block per problem, one paragraph per sample, under the title's line."""
    problems = by_problem(samples)
    out = [f"##### {visible(title)}" + ("" if problems else ": none")] if title else []
    for problem, rows in problems.items():
        out += [f"=== problem {visible(problem)}, answer {visible(rows[0].answer)}"]
        out += [visible(rows[0].prompt)]
        for s in rows:
            out += [f"--- {s.kind}: {_about(s)}", visible(s.response)]
    return "\n".join(out)


def _about(s: Sample) -> str:
    words = [f"step {s.step}", f"{s.tokens} tokens", f"{s.mean_entropy:.3f} nats per token"]
    if not math.isnan(s.reward):
        words.append(f"reward {s.reward:+.2f}")
    if s.extracted is not None:
        words.append(f"answered {visible(s.extracted[:80])}")
    return ", ".join(words)


# ------------------------------------------------------------------------------------------------
# HTML
# ------------------------------------------------------------------------------------------------

HOT = 2.0  # nats from which on the color is full: a choice among e^2 = 7 equal tokens
_COLORS = {"right": "#009E73", "wrong": "#D55E00", "truncated": "#CC79A7"}
# No formula: $...$ in a response must not be typeset where it changes what is shown.
_PLAIN = (
    'class="tex2jax_ignore mathjax_ignore" style="font-family:sans-serif;font-size:13px;'
    'background:#fff;color:#000;padding:6px"'  # also where the notebook is dark
)
_BOX = (
    "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;"
    "background:#fff;color:#000;border-left:4px solid {};padding:4px 8px;margin:2px 0 10px 0"
)


def escape(text: str) -> str:
    """Text that is text wherever it stands in HTML, also inside a quoted attribute."""
    return html.escape(visible(text), quote=True)


def _shade(nats: float) -> str:
    """Background of a token: white at 0, orange from `HOT` on."""
    part = min(max(nats, 0.0), HOT) / HOT if math.isfinite(nats) else 0.0
    return f"rgba(230,110,0,{0.85 * part:.3f})"


def legend() -> str:
    """The scale of the colors."""
    marks = [HOT * i / 4 for i in range(5)]
    cells = "".join(
        f'<span style="background:{_shade(m)};color:#000;padding:1px 8px">{m:g}</span>'
        for m in marks
    )
    return (
        '<div style="margin:4px 0">entropy of the policy before each token, nats (orange = unsure;'
        f' point at a token for its numbers): <span style="background:#fff">{cells}</span>'
        " or more</div>"
    )


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


def colored(s: Sample) -> str:
    """One span per token, its background by entropy; its numbers are in the title, which shows when
    the pointer is on the token. Without entropies: the response as it is."""
    if not s.entropies:
        return escape(s.response)
    pieces, logps = aligned(s.pieces, s.response), s.logps
    out = []
    for i, (piece, nats) in enumerate(zip(pieces, s.entropies, strict=True)):
        title = f"{nats:.3f} nats"
        title += f", probability {math.exp(min(logps[i], 0.0)):.4f}" if len(logps) else ""
        shown = escape(piece) or "&#8709;"  # a token without text, as a stop token is
        out.append(f'<span style="background:{_shade(nats)}" title="{title}">{shown}</span>')
    return "".join(out)


def page(samples: Iterable[Sample], title: str = "") -> str:
    """HTML of samples by problem across steps, to be shown in a notebook or written to a file."""
    out = [f"<div {_PLAIN}>", f"<h3>{escape(title)}</h3>" if title else "", legend()]
    for problem, rows in by_problem(samples).items():
        source = f" ({escape(rows[0].source)})" if rows[0].source else ""
        steps = sorted({s.step for s in rows})
        seen = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        out.append(
            f"<details open><summary><b>problem {escape(problem)}</b>{source}, answer"
            f" {escape(rows[0].answer)}, {seen}</summary>"
            f'<div style="{_BOX.format("#999")}">{escape(rows[0].prompt)}</div>'
        )
        for s in rows:
            out.append(
                f'<div><b style="color:{_COLORS[s.kind]}">{s.kind}</b>: {escape(_about(s))}</div>'
                f'<div style="{_BOX.format(_COLORS[s.kind])}">{colored(s)}</div>'
            )
        out.append("</details>")
    out.append("</div>")
    return "\n".join(out)


def answers(prompt: str, samples: Sequence[tuple[Sample, int]], judged: bool) -> str:
    """HTML of several answers to one prompt, each with how often it was drawn; judged: there was a
    right answer to compare with."""
    out = [
        f"<div {_PLAIN}>",
        legend(),
        f'<div style="{_BOX.format("#999")}">{escape(prompt)}</div>',
    ]
    for i, (s, times) in enumerate(samples, 1):
        kind = s.kind if judged or s.truncated else ""
        color = _COLORS.get(kind, "#999")
        said = "" if s.extracted is None else f", answered {escape(s.extracted[:80])}"
        out.append(
            f'<div>{i}. <b style="color:{color}">{kind}</b> {times} x {s.tokens} tokens,'
            f" {s.mean_entropy:.3f} nats per token{said}</div>"
            f'<div style="{_BOX.format(color)}">{colored(s)}</div>'
        )
    return "\n".join([*out, "</div>"])


def rows(names: Sequence[str], cells: Sequence[Sequence[str]], entropies: Sequence[float]) -> str:
    """HTML table with escaped `cells` [n][columns]; a row's background by its entropy (nats)."""
    head = "".join(f'<th style="text-align:left;padding:2px 10px">{escape(n)}</th>' for n in names)
    out = [f'<div {_PLAIN}><table style="border-collapse:collapse"><tr>{head}</tr>']
    for row, nats in zip(cells, entropies, strict=True):
        shade = f"background:{_shade(nats)};color:#000"
        line = "".join(
            '<td style="text-align:left;font-family:monospace;white-space:pre;padding:1px 10px">'
            f"{cell}</td>"
            for cell in row
        )
        out.append(f'<tr style="{shade}">{line}</tr>')
    return "".join([*out, "</table></div>"])


# ------------------------------------------------------------------------------------------------
# Reflection (section 4.4 of the paper)
# ------------------------------------------------------------------------------------------------

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
    samples: Iterable[Sample],
    phrases: Mapping[str, str] = PHRASES,
    kinds: Collection[str] = ("right", "wrong"),
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Phrase -> (steps int [n], share of the step's samples that have it, times per 1,000 response
    tokens); phrases that never occur are left out, 'any of these' stands before several.

    Of the LOGGED samples: a step logs one right and one wrong response of a group, so the level is
    not that of all that was drawn; how it moves over the steps is what to read. Truncated ones,
    which are logged beyond their share and often repeat a word without end, are left out.
    """
    found = {name: re.compile(rf"\b{p}\b", re.IGNORECASE) for name, p in phrases.items()}
    times: dict[int, list[list[int]]] = {}
    tokens: dict[int, int] = {}
    for s in samples:
        if s.kind not in kinds:
            continue
        row = [len(p.findall(s.response)) for p in found.values()]
        times.setdefault(s.step, []).append(row)
        tokens[s.step] = tokens.get(s.step, 0) + s.tokens
    steps = np.array(sorted(times), np.int64)
    out = {}
    columns = {"any of these": slice(None)} | {n: slice(i, i + 1) for i, n in enumerate(found)}
    for name, part in columns.items():
        counts = [np.array(times[s], int).reshape(-1, len(found))[:, part].sum(1) for s in steps]
        share = np.array([(c > 0).mean() for c in counts])
        rate = np.array(
            [
                1000 * c.sum() / max(tokens[s], 1)
                for s, c in zip(steps.tolist(), counts, strict=True)
            ]
        )
        if rate.any():
            out[name] = steps, share, rate
    if len(out) == 2:  # one phrase alone is all of them
        del out["any of these"]
    return out
