r"""Turn answers into integers, as the paper does with its data set (section 3.5): the new problem
names the form of the original answer and asks for the sum of the integers in it.

    11 - 2\sqrt{6}   "The original answer is in the form k - m\sqrt{n}, ... find k + m + n."   19

The forms are m/n, k\sqrt{m}, k +- m\sqrt{n}, and k\pi, m\pi/n. Fractions have to be in lowest terms
and roots square-free, so that the integers are unique. Other answers stay as they are: no sum of
integers stands for an interval, a matrix or a word.
"""

import math
import re

_N = r"([1-9]\d{0,8})"  # larger ones make no problem worth asking
_ROOT = r"\\sqrt(?:\{" + _N + r"\}|([2-9]))"
_FRACTION = rf"(?:{_N}/{_N}|\\frac\{{{_N}\}}\{{{_N}\}}|\\frac([1-9])([1-9]))"
_LOWEST = "$m$ and $n$ are relatively prime positive integers"
_FREE = "is not divisible by the square of any prime"

# pattern of the answer, its form, what makes the integers unique, the sum asked for
_FORMS = (
    (_FRACTION, r"\frac{m}{n}", _LOWEST, "m + n"),
    (_N + "?" + _ROOT, r"k\sqrt{m}", f"$k$ and $m$ are positive integers and $m$ {_FREE}", "k + m"),
    (_N + r"([+-])" + _N + "?" + _ROOT, r"k SIGN m\sqrt{n}",
     f"$k$, $m$ and $n$ are positive integers and $n$ {_FREE}", "k + m + n"),
    (_N + r"?\\pi", r"k\pi", "$k$ is a positive integer", "k"),
    (rf"\\frac\{{{_N}?\\pi\}}\{{{_N}\}}|{_FRACTION}\\pi", r"\frac{m\pi}{n}", _LOWEST, "m + n"),
)  # fmt: skip


def asked(problem: str, answer: str) -> tuple[str, str] | None:
    """(the problem with an integer answer, that answer); None for other forms. Integers stay."""
    if re.search(r"[0-9][\s$]+[0-9]", answer):  # 1 1/2 is not 11/2
        return None
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"[\s$]|\\[!,;]|\\left|\\right", "", answer))
    if re.fullmatch(r"-?[0-9]+", text):
        return problem, text
    minus, text = text.startswith("-"), text.removeprefix("-")
    for pattern, form, unique, wanted in _FORMS:
        if not (match := re.fullmatch(pattern, text)):
            continue
        found = [g for g in match.groups() if g]
        sign = next((g for g in found if g in "+-"), "")
        numbers = [int(g) for g in found if g not in "+-"]
        letters = len(re.findall("[kmn]", wanted))
        if len(numbers) < letters:  # a missing coefficient (of the root, or of pi) is 1
            numbers.insert(1 if letters == 3 else 0, 1)
        if not _unique(form, numbers) or (minus and sign):
            return None
        form = ("-" * minus) + form.replace("SIGN", sign)
        original = f"The original answer is in the form ${form}$, where {unique}."
        wish = f"Please find the value of ${wanted}$."
        return f"{problem}\n\n{original} {wish}", str(sum(numbers))
    return None


def _unique(form: str, numbers: list[int]) -> bool:
    if "frac" in form:
        return math.gcd(*numbers) == 1 and numbers[1] > 1
    n = numbers[-1]
    return "sqrt" not in form or (n > 1 and all(n % (d * d) for d in range(2, math.isqrt(n) + 1)))
