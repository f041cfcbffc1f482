r"""Rule-based verifier: does the final answer of a response equal the reference answer?

Two modes, both pure functions of two strings:

`dapo`      gives the verdicts of verl's `math_dapo.py` (string equality after a fixed list of
            rewrites), so that rewards and scores compare with the published runs. It rejects
            `Answer: 42.` and accepts `Answer: 1,2` for 12, because the original does.
`integer`   reads the response's final statement as a careful human would and compares integers of
            any size (`integer_verifier.py`).

In `integer` mode the extraction never sees the reference, so listing candidates cannot raise the
reward. Time is linear in the length of the strings. Digits stay text: `int` refuses 4301 of them.
"""

import re
from typing import NamedTuple

from dapo_jax.data import integer_verifier

MODES = ("dapo", "integer")
DAPO_TAIL = 300  # characters at the end of the response that mode dapo looks at, as verl does


class Verdict(NamedTuple):
    """The judgement, and what was compared: None when the response states no answer at all.
    `extracted` is the rewritten text in mode `dapo`; in mode `integer` it is the canonical integer
    ('-1234'), else the start of the statement in which no single integer could be read."""

    correct: bool
    extracted: str | None


def verify(response: str, answer: str, mode: str = "dapo") -> Verdict:
    """Judge `response` (decoded text, special tokens removed) against the reference `answer`.
    Raises ValueError for an unknown mode, and nothing else for any two strings."""
    if mode == "dapo":
        stated = ANSWER_LINE.findall(response[-DAPO_TAIL:])
        prediction = _normalize(stated[-1] if stated else _NO_ANSWER)
        return Verdict(prediction == _normalize(answer), prediction if stated else None)
    if mode == "integer":
        return _verify_integer(response, answer)
    raise ValueError(f"unknown verifier mode {mode!r}: use one of {', '.join(MODES)}")


# Mode dapo: verl's verdicts.

# The blanks after the colon may cross newlines, so an answer on the next line counts; a match takes
# the whole line, so a second "Answer:" on that line belongs to the first one's text.
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"  # verl compares this literal with the reference, so it can even be "right"

# Applied one after the other, in this order: later ones see what the earlier ones left.
_REWRITES = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
    *((removed, "") for removed in (
        "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots",
        "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
        "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}",
        "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
        "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
    )),
)  # fmt: skip
_FRAC = re.compile(r"frac([^{])(.)")
_SQRT = re.compile(r"sqrt([^{])")


def _normalize(text: str) -> str:
    """The text that verl compares: right of the last '=', without units, markup and shorthand."""
    text = text[text.rfind("=") + 1 :]
    for old, new in _REWRITES:
        text = text.replace(old, new)
    if "$" in text or "\\" in text:
        text = "\n".join(map(_unwrap_line, text.split("\n")))
    text = _FRAC.sub(r"frac{\1}{\2}", text)
    text = _SQRT.sub(r"sqrt{\1}", text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def _unwrap_line(line: str) -> str:
    r"""The line without \text{}, \boxed{} and the like; only its first $...$ if it has one."""
    dollars = line.split("$", 2)
    if len(dollars) == 3:
        line = f"${dollars[1]}$"
    for command in ("text", "textbf", "overline"):  # up to the first brace: nesting is not seen
        head, brace, rest = line.rpartition("}")  # behind the last one no search has to fail
        line = re.sub(rf"\\{command}\{{([^}}]*)\}}", r"\1", head + brace) + rest
    start, end = line.find("\\boxed{"), line.rfind("}")
    if 0 <= start < end:
        line = line[:start] + line[start + len("\\boxed{") : end] + line[end + 1 :]
    return line


# Mode integer: a careful reader's.


def _verify_integer(response: str, answer: str) -> Verdict:
    statement, marked = integer_verifier.final_statement(response)
    integer = integer_verifier.read_integer(statement)
    if integer is None:
        text, most = statement.strip(), integer_verifier.TAIL
        text = text if len(text) <= most else text[: most - 1] + "…"
        return Verdict(False, text if marked else None)
    # The reference has to be a number: an equation would have to be solved or read.
    right = "=" not in answer and integer == integer_verifier.read_integer(answer)
    return Verdict(right, integer)
