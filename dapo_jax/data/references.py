"""Reference answers: the answer field of a row as text, refused if a float has damaged it."""

import ast
import contextlib
import json
import math
import re
from decimal import Decimal

from dapo_jax.data.rows import BadRow


def integer(value: object, field: str = "answer") -> str:
    """The answer as its shortest decimal digits: ' 1,234' -> '1234', '+7' -> '7', '033' -> '33'.

    verl compares answers as strings and drops the commas of a non-negative integer on both sides,
    so removing them changes no verdict there. It would demand leading zeros, '+' and '-1,234'
    literally, which no reader of the problem can know.

    A float or a decimal, also as text ('27.0'), is accepted if it is integral and below 2**53: up
    to there a float holds every integer. Larger ones are refused as damaged, and so are larger
    integers that fill a float's 53-bit mantissa. Five rows of DAPO-Math-17k look like that: their
    105263157894736848 should end in 42.

    BadRow: the value is not an integer."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRow(field, value, "missing or empty")
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) < 400:
        value = format(value, "f")
    elif isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    if m := re.fullmatch(r"([+-]?[0-9][0-9,]*)\.0*", text):
        digits = m[1].lstrip("+-").replace(",", "")
        text = m[1] if len(digits) < 17 and int(digits) < 2**53 else text
    # Digits stay text: int() refuses more than 4300 of them.
    if m := re.fullmatch(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)", text):
        digits = m[2].replace(",", "").lstrip("0") or "0"
        # One that looks rounded is refused: beyond 2**53, yet exactly a float64, and no shorter
        # than 48 bits without its trailing zeros. (2**64, 10**20 and 20! are shorter.)
        n = int(digits) if len(digits) < 309 else 0
        if not (n > 2**53 and int(float(n)) == n and (n // (n & -n)).bit_length() >= 48):
            return "-" * (m[1] == "-" and digits != "0") + digits
    elif not re.fullmatch(r"[+-]?[0-9][0-9,]*(\.0*|(\.[0-9]+)?[eE]\+?[0-9]+)", text):  # 27.0, 1e5
        raise BadRow(field, value, "not an integer")
    raise BadRow(field, value, "may be a float-damaged integer; write all digits of the original")


_ONE_TEXT = re.compile(r"""\["([^"\\]|\\.)*"\]|\['([^'\\]|\\.)*'\]""")  # a list of one text


def any_answer(value: object, field: str = "answer") -> str:
    """An answer of any type as text. Integers become what `integer` makes of them, except that
    '007' and '+7' stay; other text loses the blanks around it; a list of one value counts as that
    value, also where it is written as text (Skywork-OR1: '["7"]'); other lists, objects, floats and
    bools become JSON, and everything else, such as a date, its text. BadRow: the answer is missing
    or damaged."""
    if isinstance(value, str) and _ONE_TEXT.fullmatch(value.strip()):
        with contextlib.suppress(SyntaxError, ValueError):
            value = ast.literal_eval(value.strip())
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = value.strip() if isinstance(value, str) else ""
    try:
        return text if re.match(r"\+|-?0[0-9]", text) else integer(value, field)
    except BadRow as bad:
        damaged = "damaged" in bad.args[2] and "e" not in text.lower()
        if damaged or bad.args[2] == "missing or empty":
            raise
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(field, value, "not a finite number")
    if isinstance(value, list | dict | float | bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return text or str(value)
