r"""More verifiers than the two of `verifier.py`, for answers that need not be integers.

`boxed`  the last `\boxed{}` as a number, or as LaTeX without its spacing and shorthand
`math`   equivalence by the library math-verify (pip install 'dapo_jax[math]'), in a process of its
         own: a symbolic comparison may take any time (reward.workers)
`exact`  the stated answer, character by character: the last <answer></answer>, else the last
         `\boxed{}`, else what follows the last "Answer:", else the last line
`auto`   chooses dapo, integer, boxed or exact by what the prompt asks for, else by the data_source
"""

import importlib.util
import logging
import re

from dapo_jax.data import verifier
from dapo_jax.data.integer_verifier import last_boxed
from dapo_jax.data.verifier import Verdict

MODES = (*verifier.MODES, "boxed", "math", "exact", "auto")
TAIL = 2000  # characters at the end of a response that math-verify reads


def verify(response: str, answer: str, mode: str, prompt: str = "", source: str = "") -> Verdict:
    """Judge `response` by any of MODES. prompt, source: those of the problem, used only by `auto`.
    ValueError: an unknown mode; in mode `math`, no library, or an `answer` that it cannot read."""
    if mode == "auto":
        mode = chosen(answer, prompt, source)
    if mode == "boxed":
        said = last_boxed(response)
        return Verdict(said is not None and _canonical(said) == _canonical(answer), said)
    if mode == "exact":
        said = stated(response)
        return Verdict(said == answer.strip(), said or None)
    return _math(response, answer) if mode == "math" else verifier.verify(response, answer, mode)


# Applied in this order.
_SHORTHAND = (
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:left|right|,|!|;|:|displaystyle)|\\(?=[ %$])", ""),
    (r"\\(?:text|mathrm|textbf|mbox) ?\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|[\s$%~]|\{,\}|\.$", ""),
    (r"^[A-Za-z]=", ""),
    (r"\\(frac|sqrt)(\d)", r"\\\1{\2}"),
    (r"(\\frac\{\d\})(\d)", r"\1{\2}"),
    (r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2"),
)
_NUMBER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+|(?=\.\d))(?:\.(\d*))?")


def _canonical(text: str) -> str:
    """The same text for LaTeX texts that are one number, or differ in spacing and style alone."""
    text = text.strip()
    for pattern, new in _SHORTHAND:
        text = re.sub(pattern, new, text)
    if m := _NUMBER.fullmatch(text):  # digits stay text: int() refuses more than 4300 of them
        whole = m[2].replace(",", "").lstrip("0") or "0"
        part = (m[3] or "").rstrip("0")
        digits = whole + "." * bool(part) + part
        return "-" * (m[1] == "-" and digits != "0") + digits
    return text


def stated(response: str) -> str:
    """The answer that the end of a response states, without blanks around it."""
    _, opened, rest = response.rpartition("<answer>")
    if opened and "</answer>" in rest:
        return rest.partition("</answer>")[0].strip()
    if (boxed := last_boxed(response)) is not None:
        return boxed.strip()
    if lines := verifier.ANSWER_LINE.findall(response):
        return lines[-1].strip()
    return response.rstrip().rpartition("\n")[2].strip()


def _math(response: str, answer: str) -> Verdict:
    require_math()
    import math_verify

    # It warns that its own time limits, process alarms, are off: workers are limited from outside.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    read = lambda text: math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    if not (gold := read(f"\\boxed{{{answer}}}")):
        raise ValueError(f"math-verify cannot read the reference answer {answer!r:.80}")
    said = read(response[-TAIL:])
    correct = math_verify.verify(gold, said, timeout_seconds=None)
    return Verdict(correct, str(said[-1]) if said else None)


def require_math() -> None:
    """ValueError: math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        install = "pip install 'dapo_jax[math]'"
        raise ValueError(f"config.reward: verifier 'math' needs a library: {install}")


# The first of these that the prompt contains; else the first that the data_source contains.
_PROMPTS = (("\\boxed", "boxed"), ("<answer>", "exact"), ("Answer:", "dapo"), ("####", "integer"))
_SOURCES = (("gsm8k", "integer"), ("dapo", "dapo"), ("aime", "integer"), ("math", "boxed"))


def chosen(answer: str, prompt: str, source: str) -> str:
    """The verifier that `auto` chooses for a problem."""
    found = [mode for part, mode in _PROMPTS if part in prompt]
    found += [mode for part, mode in _SOURCES if part in source.lower()]
    return [*found, "integer" if re.fullmatch(r"-?[0-9]+", answer) else "boxed"][0]
