r"""Which integer does a response state? Mode `integer` of `verifier.py`, as a careful human reads.

`final_statement` finds the words that state the answer, `read_integer` the one integer in them:
`**Answer:** 42`, `\boxed{1{,}234}`, `042` and `42.0 seconds` are read; a list, a range, a fraction,
a formula or a hedge (`41 or 42`) is not. Neither sees the reference answer.

No string raises, and time is linear in the length of the strings: wherever a regular expression
meets text of any length, its repeats are bounded or cannot match what follows them.
"""

import re

TAIL = 500  # characters: what is further from the end of a response is not a final statement


# "Answer: 42", "**Answer**: 42", '"answer": "42"', "<answer>42" and "the answer (in cm) is 42".
_MARK = re.compile(
    r"(?<!/)(?<!to )answers?\b[^\n.:：=>]{0,60}?(?:=>|[:：=>]|\b(?:is|are|was|be|equals)\b)",
    re.IGNORECASE,
)
_BOX = "\\boxed{"
_CLOSERS = " \t\r\n$*_`.。\"'\\])}>"  # what may follow the last word of a response
_WORD = re.compile(r"[^\W_]")
_MATH = re.compile(r"[0-9\\]")
_TWO_WORDS = re.compile(r"\W*[^\W\d_]{2,}\W+[^\W\d_]{2,}")
_NEGATION = re.compile(r"n't\b|\b(?:not|never|cannot|no|than|at (?:least|most))\b", re.IGNORECASE)
_NEWLINE = re.compile(r"\n")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_QUOTED = re.compile(r'\s*"([^"\n]*)"')
_BRACE = re.compile(r"[{}]")
_OPERATOR = re.compile(r"\s*(?:[+/0-9]|\^(?!\{?\\circ)|_[0-9{]|\\(?:cdot|times|frac|sqrt|pi))")
_BOX_LIST = re.compile(r"\}[ $\\()\[\],;]*(?:(?:and|or) ?[ $\\(\[]*)?$")
_CONCLUSION = re.compile(r"\b(?:so|thus|hence|therefore)\b", re.IGNORECASE)


def final_statement(response: str) -> tuple[str, bool]:
    r"""The words that state the answer, and whether they are marked as such.

    The last marked statement counts; without any, the last sentence. Marks are `answer:`, `the
    answer is`, `\boxed{}` and, on the last line only, `#### 42` and `A: 42`."""
    tail = _tail(response)
    line = tail.rfind("\n", 0, len(tail.rstrip(_CLOSERS))) + 1
    box, hashes = tail.rfind(_BOX), tail.rfind("####", line)
    label = line if tail.startswith("A:", line) else -1
    last = max(box, hashes, label)
    limit = len(tail)
    for mark in reversed(list(_MARK.finditer(tail, max(last, 0)))):
        phrase = _phrase_after(tail, mark.end(), limit)
        is_label = mark[0][-1] in ":：=>"
        if phrase and not _NEGATION.search(mark[0]) and (is_label or not _is_remark(phrase)):
            return phrase, True
        limit = mark.start()
    if last < 0:
        return _last_sentence(tail[line:]), False
    return _boxed(tail, box) if last == box else tail[last:].lstrip("#A:"), True


def _tail(response: str) -> str:
    """The last TAIL characters; as many more before a number that this would cut."""
    response, digits = response.rstrip(), "0123456789,"
    cut = max(len(response) - TAIL, 0)
    if response[cut : cut + 1] in digits:
        start = len(response[:cut].rstrip(digits))
        cut = cut if start == cut else max(start - TAIL, 0)
    return response[cut:]


def _phrase_after(tail: str, start: int, limit: int) -> str:
    """What follows a mark: the rest of its line, or the next paragraph if that has no word."""
    word = _WORD.search(tail, start, limit)
    if word is None:
        return ""
    last = _BLANK_LINE if "\n" in tail[start : word.start()] else _NEWLINE
    end = last.search(tail, word.start(), limit)
    phrase = tail[start : end.start() if end else limit]
    quoted = _QUOTED.match(phrase)
    return quoted[1] if quoted else phrase


def _is_remark(phrase: str) -> bool:
    """Text about the answer ("the answer is the same for all 3") rather than the answer itself."""
    math = _MATH.search(phrase)
    return math is None or _TWO_WORDS.match(phrase, 0, math.start()) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` up to its matching brace; None if there is none."""
    _, found, rest = text.rpartition(_BOX)
    depth = 1
    for brace in _BRACE.finditer(rest if found else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return rest[: brace.start()]
    return None


def _boxed(tail: str, box: int) -> str:
    r"""The content of the last \boxed{}, at `box`; the box itself if it is only an operand."""
    content = last_boxed(tail)
    if content is None:
        return tail[box:]
    end = box + len(_BOX) + len(content) + 1
    before = tail[max(box - 20, 0) : box]
    minus = before[-1:] in ("-", "−")
    if (
        _OPERATOR.match(tail, end)
        or before[-1:].isdigit()
        or (minus and before[-2:-1].isalnum())
        or (_BOX in tail[max(box - 60, 0) : box] and _BOX_LIST.search(before))
    ):
        return tail[box:end]
    return "-" * minus + content


def _last_sentence(line: str) -> str:
    """The line's last sentence, from its "so" or "thus" on; '' if it is prose that breaks off."""
    end = len(line.rstrip(_CLOSERS))
    sentence = _CONCLUSION.split(line[line.rfind(". ", 0, end) + 1 :])[-1]
    finished = not {".", "。"}.isdisjoint(line[end:])
    return sentence if finished or "=" in sentence or not _TWO_WORDS.match(sentence) else ""


# Which integer do the words state? statement = [words | ... =] [sign] NUMBER [unit] [explanation]

# Digits with all that may group them: one search takes a list like "1, 2" whole, to refuse it.
_NUMBER = re.compile(r"[0-9][0-9,. ]*")
_WHOLE = re.compile(r"[0-9]+|[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)")
_DIGIT = re.compile(r"[0-9]")
_LETTERS = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"[.;]\s")
_EXPLANATION = re.compile(
    r"\s(?:\((?=[a-z]{2})|-\s+[a-z]{2}|(?:because|since|as|which|where|that is|i\.e)\b)",
    re.IGNORECASE,
)
# Right before the number ("half of 42", "up to 42", "sin(42)"), so that it is another one or none.
_ALTERS = re.compile(
    r"(?:[^\W\d_]\(|\b(?:minus|negative|plus|times|point|half|third|quarter|twice"
    r"|thrice|double|triple|reciprocal|inverse|opposite|negation|factorial|square|cube|roots?|squared|log|ln|exp|sin|cos"
    r"|tan|sqrt|over|under|above|below|beyond|within|up|but|except|excluding|besides|exceeds|exceeding)"
    r"(?: (?:of|to|the|for|by|from))?[ (]{0,9})$",
    re.IGNORECASE,
)
# Behind it ("42 is wrong", "42 or more").
_DENIES = re.compile(
    r"n't\b|\b(?:not|never|cannot|wrong|incorrect|false|impossible|at (?:least|most))\b"
    r"|\bor (?:so|more|less|fewer|greater|higher|lower|above|below|even|another|maybe|perhaps|zero"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,6}teen|\w{3,6}ty)\b",
    re.IGNORECASE,
)
# And at the beginning of what comes behind its sentence ("42. No, it is 43", "42; 43").
_TAKES_BACK = re.compile(
    r"\W{0,9}(?:(?:or|no|nope|not|wait|actually|sorry|correction|rather|alternatively)\b.*?[0-9]"
    r"|[0-9][0-9,. ]*$)",
    re.IGNORECASE | re.DOTALL,
)
_AFTER_TAG = re.compile(r"[a-z]{1,20}>\W{0,9}[0-9]")
_QUOTE = re.compile(r"\n[ \t]*> ")
_CHOICE = re.compile(r"\b(?:or|maybe|perhaps|possibly)\b", re.IGNORECASE)
_LIST = re.compile(r",(?![0-9]{3})|\band\b", re.IGNORECASE)

_BEFORE_NUMBER = frozenset(" ([\"'*-+:=,#€£¥₹")  # what may touch a number from the left
_OPERATORS = frozenset("+*/^_<>≤≥≠\\|×·÷√±?!")  # none may stand among the words before it,
_OPERATORS_FIRST = frozenset("*/:-_<>≤≥≠×·÷&@")  # none may follow it next,
_OPERATORS_LATER = frozenset("+^\\=?!|√±")  # and none anywhere after it
_UNIT_LETTERS = frozenset("mgslhLCFKNJWV")
_NOT_UNITS = frozenset({
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "squared", "cubed",
    "factorial", "plus", "minus", "times", "point", "and", "to", "pi", "sqrt", "root",
    "half", "halves", "thirds", "quarters", "fifths", "tenths", "hundredths",
})  # fmt: skip

# LaTeX: text and spacing commands vanish; what is not listed is symbolic and becomes a lone "\".
_TEX = re.compile(r"\\+([A-Za-z]+|.?)")
_TEX_BLANK = (
    "text", "textbf", "textit", "textrm", "mathrm", "mathbf", "mathit", "mathsf", "mbox", "bf",
    "boldsymbol", "rm", "left", "right", "displaystyle", "quad", "qquad", "degree", "",
    ",", ";", ":", " ", "$", "(", ")", "[", "]", "&",
)  # fmt: skip
_TEX_PLAIN = {**dict.fromkeys(_TEX_BLANK, " "), "!": "", "%": "%", "#": "#", "approx": "="}
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\}?\^(?:[23]|\{[23]\})")
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("−–‐‑－", "-"),
        **dict.fromkeys(filter(str.isspace, map(chr, range(0x3001))), " "),
        **dict.fromkeys('{}`~$"“”', " "),
        **{chr(ord("０") + digit): str(digit) for digit in range(10)},
        **{"\n": "  ", "—": " ; ", "≈": "=", "：": ":", "，": ", ", "。": ". ", "＝": "="},
    }
)


def read_integer(statement: str) -> str | None:
    """The one integer that `statement` states, in canonical form ('-1234'), else None."""
    text = _plain(statement)
    if end := _SENTENCE_END.search(text):
        if _TWO_WORDS.match(text, 0, end.start()) and _DIGIT.search(text, end.end()):
            return None  # prose that goes on to calculate
        if _TAKES_BACK.match(text, end.end()):
            return None
        text = text[: end.start()]
    first = _NUMBER.search(text)
    if first is None:
        return None
    first_end = first.start() + len(first[0].rstrip(" ,."))
    choice = _CHOICE.search(text, first_end)
    if choice and _DIGIT.search(text, choice.end()):
        return None
    if explanation := _EXPLANATION.search(text, first_end):
        text = text[: explanation.start()]
    left, equals, text = text.rpartition("=")
    if equals and (left.endswith(("<", ">", "!")) or _LIST.search(left, first_end)):
        return None

    number = _NUMBER.search(text)
    if number is None or _NUMBER.search(text, number.end()):
        return None
    digits = number[0].rstrip(" ,.")
    magnitude = _magnitude(digits)
    sign = _sign(text[: number.start()])
    if magnitude is None or sign is None or not _is_unit(text[number.start() + len(digits) :]):
        return None
    return "0" if magnitude == "0" else sign + magnitude


def _plain(text: str) -> str:
    """`text` without markup: LaTeX spacing and text commands, Markdown, Unicode look-alikes."""
    text = text.replace("{,}", ",")
    if "\\" in text or "^" in text:
        text = text.replace("^\\circ", " ").replace("^{\\circ}", " ")
        text = _UNIT_POWER.sub(" ", text)
        text = _TEX.sub(lambda command: _TEX_PLAIN.get(command[1], "\\"), text)
    text, _, closed = text.partition("</")
    text = text.partition("<|")[0]
    if _AFTER_TAG.match(closed):  # "42</answer>43"
        text += " ; " + closed.partition(">")[2]
    text = _QUOTE.sub("\n", text).translate(_PLAIN).replace("**", "  ")
    return text.strip(" '*_:=|").removeprefix(". ")


def _magnitude(digits: str) -> str | None:
    """'1,234.00' -> '1234', '042' -> '42'; None for '1.5', '1,2' and '12 3'."""
    whole, _, fraction = digits.partition(".")
    if fraction.strip("0") or not _WHOLE.fullmatch(whole):
        return None
    return re.sub("[, ]", "", whole).lstrip("0") or "0"


def _sign(before: str) -> str | None:
    """'' or '-': the sign of the number after `before`; None where `before` alters the number."""
    if before and before[-1] not in _BEFORE_NUMBER and before[-1] < "\u2e80":  # CJK has no blanks
        return None
    words = before.rstrip(" €£¥₹")
    sign = words[-1:] if words[-1:] in ("-", "+") else ""
    if sign:
        words = words[:-1]
        # "x - 42" and "7-42" are differences; "is -42" and "- 42" are not.
        glued = before.endswith(sign) and words[-1:] in ("", *" ([:")
        if words.strip(" ([") and not glued:
            return None
    words = words.lstrip("*- ")
    if not _OPERATORS.isdisjoint(words) or _DIGIT.search(words) or _NEGATION.search(words):
        return None
    if _ALTERS.search(before[-40:]):
        return None
    return "-" if sign == "-" else ""


def _is_unit(after: str) -> bool:
    """Is `after` at most a unit or plain words, with nothing that changes the number before it?"""
    word = after.lstrip()
    if not word:
        return True
    if _DENIES.search(word):
        return False
    if word[0] in _OPERATORS_FIRST or word[0].isnumeric() or not _OPERATORS_LATER.isdisjoint(word):
        return False
    letters = _LETTERS.match(word)
    if letters is None:
        return True
    unit = letters[0]
    if len(unit) == 1 and unit < "\u0400":  # Latin and Greek: 42x and 42 π are products
        return unit in _UNIT_LETTERS and word != after
    return unit.lower() not in _NOT_UNITS
