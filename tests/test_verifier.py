"""The verifier: verl's verdicts in mode `dapo`, a careful reader's in mode `integer`."""

import gzip
import json
import re

import pytest
from hypothesis import example, given, settings, strategies as st
from tables import cases

from dapo_jax.data import verifier
from dapo_jax.data.integer_verifier import TAIL as INTEGER_TAIL
from dapo_jax.data.verifier import MODES, Verdict, verify

# Verdicts of verl's released math_dapo.py, obtained by running it; its invalid parse is null here.
CASES = cases("verifier_cases")


# Kept apart from the verifier's own notion of an answer, so that it cannot excuse itself.
_AN_INTEGER = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d+")
_STATED = re.compile(r"(?:answer[^\n]{0,60}?(?:is|:)|####|\\boxed|^A:)\D*\d", re.I | re.M)


def is_certain(row: dict) -> bool:
    """Has the row a label of its source, an integer reference and an answer at its end?"""
    is_integer = _AN_INTEGER.fullmatch(row["gold"].replace("{,}", ","))
    stated = _STATED.search(row["response"][-300:])
    return row["label"] is not None and is_integer is not None and stated is not None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_dapo_gives_verls_verdict(case):
    expected = Verdict(case["correct"], case["extracted"])
    assert verify(case["response"], case["answer"], "dapo") == expected
    assert verify(case["response"], case["answer"]) == expected  # it is the default mode


TEX_PIECES = ["\\text{", "\\textbf{", "\\overline{", "\\boxed{", "{", "}", "$", "x", "12"]


@given(st.lists(st.sampled_from(TEX_PIECES), max_size=12).map("".join))
def test_dapo_unwraps_like_backtracking_expressions(line):
    slow = re.sub(r"^.*?\$(.*?)\$.*", r"$\1$", line)
    for command in ("text", "textbf", "overline"):
        slow = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", slow)
    assert verifier._unwrap_line(line) == re.sub(r"\\boxed\{(.*)\}", r"\1", slow)


# What a response states: the integer, or null where a careful reader takes none from it.
INTEGER_CASES = cases("integer_cases")
MANY = " ".join(map(str, range(1000)))  # a list states nothing, or its last marked answer
LONG = "7" * 5000  # int() refuses so many digits
INTEGER_CASES += [
    {"reads": LONG, "response": f"Answer: 00{LONG}.0"},
    {"reads": None, "response": MANY},
    {"reads": None, "response": f"Answer: {MANY}"},
    {"reads": "99", "response": "\n".join(f"Answer: {n}" for n in range(100))},
]


@pytest.mark.parametrize("case", INTEGER_CASES, ids=lambda case: repr(case["response"])[:60])
def test_integer_reads_what_is_stated_and_nothing_else(case):
    reads, response = case["reads"], case["response"]
    if reads is not None:
        assert verify(response, reads, "integer") == Verdict(True, reads)
    for answer in {"42", "-42", "41", "12", "123", "1", "-7", LONG + "1"} - {reads}:
        assert not verify(response, answer, "integer").correct


def test_integer_tells_unreadable_from_missing():
    assert verify("Answer: 41 or 42", "42", "integer") == Verdict(False, "41 or 42")
    assert verify("I do not know.", "42", "integer") == Verdict(False, None)
    assert len(verify("Answer: 1, " + "2" * 5000, "42", "integer").extracted) == INTEGER_TAIL


@pytest.mark.parametrize("answer", ["1,234", "01234", "1234.0", " 1234 ", "$1234$", "1{,}234"])
def test_integer_folds_the_reference(answer):
    assert verify("Answer: 1234", answer, "integer").correct
    for none in ("", "x", "1.5", "\\frac{1}{2}", "x = 1234", "1234 or 5"):
        for response in ("Answer: 1234", f"Answer: {none}", none):
            assert not verify(response, none, "integer").correct


def test_integer_looks_at_the_end_only():
    remark = "x" * (INTEGER_TAIL - len("Answer: 42\n"))
    assert verify(f"Answer: 42\n{remark}", "42", "integer").correct
    assert verify(f"Answer: 42\n{remark}x", "42", "integer") == Verdict(False, None)


@given(
    n=st.integers(),
    zeros=st.integers(0, 3),
    commas=st.sampled_from(["", ",", "{,}", "\\,", ",\\!"]),
    around=st.sampled_from(["%s", "%s.", "**%s**", "$%s$", "\\boxed{%s}", "$x = %s$", "%s cm"]),
    mark=st.sampled_from(["Answer: ", "**Answer:**\n", "The answer is ", "#### ", "A: "]),
)
def test_integer_reads_what_was_written(n, zeros, commas, around, mark):
    magnitude = f"{abs(n):,}".replace(",", commas)
    written = "-" * (n < 0) + "0" * zeros * (commas == "") + magnitude
    response = "Let us see.\n" + mark + around % written
    assert verify(response, str(n), "integer") == Verdict(True, str(n))
    assert not verify(response, str(n + 1), "integer").correct


PIECES = [
    "Answer", "answer is ", "Answer: ", "answer:\n", ":", "is", "=", " = ", "####", "A:", "42", "1",
    ",", ", ", ".", ". ", "-", "−", "+", " ", "\n", "\n\n", "\r", "\t", "$", "\\$", "\\boxed{",
    "\\text{", "\\frac", "\\sqrt", "\\", "{", "}", "^\\circ", "^2", "%", "**", "_", "(", ")", '"',
    "or", "and", "so", "because", "not", "cm", "x", "π", "²", "４", "٣", "İ", "ß", "\u2028", "\x00",
    "\ud800", "[INVALID]", "</answer>", "<|im_end|>", "answer, which", "é", "答案是",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)
stated = st.sampled_from([case["response"][-600:] for case in INTEGER_CASES + CASES])


def changed(said: str, at: int, new: str, skipped: int) -> str:
    return said[:at] + new + said[at + skipped :]


responses = st.builds(changed, stated, st.integers(0, 600), pieces, st.integers(0, 9))


@settings(max_examples=2000)
@given(st.text() | pieces | responses, st.text() | pieces)
@example("Answer: " + "9" * 5000, "9" * 5000)
def test_any_two_strings(response, answer):
    """No exception, and the verdict means what it says."""
    dapo, integer = (verify(response, answer, mode) for mode in MODES)
    for verdict in (dapo, integer):
        assert isinstance(verdict.correct, bool)
        assert verdict.extracted is None or isinstance(verdict.extracted, str)
    assert dapo.extracted == verify(response, "another", "dapo").extracted
    if integer.extracted is not None and re.fullmatch("0|-?[1-9][0-9]*", integer.extracted):
        value = integer.extracted
        assert verify(response, value, "integer").correct
        assert verify(f"Answer: {value}", value, "integer") == Verdict(True, value)
        assert not verify(response, value + "1", "integer").correct
    else:
        assert not integer.correct


UNITS = ["7", "1, ", "answer: ", "answer is x", "\\boxed{", "\\text{", "x or ", "\n"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unit", UNITS, ids=repr)
def test_ten_million_characters_are_judged(unit, mode):
    """Work that grows by their square ends beyond the limit of every test, and of every run. Mode
    dapo cuts the response, so only a reference can be long there."""
    text = "Answer: " + unit * (10**7 // len(unit))
    said = (text, "42") if mode == "integer" else ("Answer: 42", text)
    assert not verify(*said, mode).correct


def test_agreement_with_real_labels(assets):
    """Responses of models with `gold` and `label`: true, false or null, as their source says."""
    files = sorted((assets / "verifier").glob("*.jsonl.gz"))
    lines = [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
    rows = [row for row in map(json.loads, lines) if is_certain(row)]
    verdicts = [verify(row["response"], row["gold"], "integer") for row in rows]
    wrong = [(r, v) for r, v in zip(rows, verdicts, strict=True) if v.correct != r["label"]]
    assert len(rows) > 7000
    assert len(wrong) < 0.005 * len(rows)
    # In mode dapo every accepted response but one is labelled right by its source as well.
    dapo = [row["label"] for row in rows if verify(row["response"], row["gold"]).correct]
    assert len(dapo) > 100 and dapo.count(False) <= 1
