"""Replies to the policy's turns, and the tools that ship: `config.reward.reply` names one of them.

A reply function gets the problem and the transcript: ((role, text), ...) since the prompt, the last
entry being the turn that the policy ("assistant") has just ended. It returns `Reply(text)`, and the
response goes on behind that text; a `Grade`, and the response is over and graded; or None, and it
is over and judged as any other. No JAX: worker processes import this.
"""

import ast
import hashlib
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from dapo_jax.dapo.reward import Grade

ASSISTANT = "assistant"
Transcript = tuple[tuple[str, str], ...]  # ((role, text), ...), as `prompts.Messages`


class Reply(NamedTuple):
    """What a turn is answered."""

    text: str
    role: str = "tool"  # as the chat template knows it; "user" in a game

    def whole(self) -> bool:
        """Whether both are texts that a file can hold."""
        try:
            return all(isinstance(x, str) and x.encode() is not None for x in self)
        except UnicodeEncodeError:  # half a surrogate pair
            return False


# --- Calculator ---

MOST_DIGITS = 1000  # of an expression; results have 3 bits for each, or some 900 digits
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_EXPRESSION = re.compile(r"[-+*/().\d\s]*")
_SIGNS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


def calculator(problem, transcript: Transcript) -> Reply | None:
    """The value of the expression that a turn asks for: the argument `expression` of a <tool_call>
    as Qwen writes it, or a bare `4 + 2` at the turn's end. Other turns are the response's last."""
    turn = transcript[-1][1]
    if (call := last_call(turn)) is not None:
        expression = argument(call, "expression")
    else:
        # Backwards: a search for the end would begin anew at every character.
        expression = _EXPRESSION.match(turn[::-1])[0][::-1].strip()
        if not re.search(r"\d\s*[-+*/]", expression):
            return None
    try:
        return Reply(_written(evaluate(expression)))
    except OverflowError:  # no float is as large
        return Reply("error: too large a number")
    except ValueError as error:
        return Reply(f"error: {error}")


def last_call(turn: str) -> str | None:
    """What the last <tool_call> of a turn holds. Behind the last end each start would be searched
    to the end of the turn."""
    end = turn.rfind("</tool_call>") + len("</tool_call>")
    calls = _CALL.findall(turn[:end])
    return calls[-1] if calls else None


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / and brackets. ValueError: it is none,
    divides by zero, or it or a result on the way is longer than MOST_DIGITS allows."""

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(str(node.value))
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            out = _SIGNS[type(node.op)](value(node.left), value(node.right))
        elif isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
            out = _SIGNS[type(node.op)](value(node.operand))
        else:
            raise ValueError("numbers, + - * / and brackets only")
        if max(out.numerator.bit_length(), out.denominator.bit_length()) > 3 * MOST_DIGITS:
            raise ValueError("too large a number")
        return out

    try:
        if len(expression) > MOST_DIGITS:
            raise ValueError("too long an expression")
        return value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError):
        raise ValueError("no expression") from None


def _written(value: Fraction) -> str:
    """A whole number as such, any other with ten significant digits."""
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def argument(call: str, name: str) -> str:
    """Argument of a tool call; '' where the call is no JSON or has none."""
    try:
        return str(json.loads(call)["arguments"][name])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


# --- A game with a hidden state ---

HIGHEST = 15  # the hidden number is 1 to this
GUESSES = 4  # enough for halving: 2^4 > HIGHEST


def hidden(problem) -> int:
    """The number that a problem hides: of a hash of its id, which no prompt shows."""
    return int(hashlib.sha256(f"guess {problem.id}".encode()).hexdigest(), 16) % HIGHEST + 1


def guess(problem, transcript: Transcript) -> Reply | Grade:
    """Guess a number from 1 to HIGHEST in GUESSES turns, each one number; a wrong guess is answered
    `+` (the hidden one is higher) or `-`. A turn that is no such number, or a wrong last guess,
    loses."""
    turns = [text.strip() for role, text in transcript if role == ASSISTANT]
    number, turn = hidden(problem), turns[-1]
    said = int(turn) if re.fullmatch(r"\d{1,3}", turn) else 0
    if said == number:
        return Grade(1.0, True, turn, {"guesses": float(len(turns))})
    if not 1 <= said <= HIGHEST or len(turns) >= GUESSES:
        return Grade(0.0, False, turn, {"guesses": float(len(turns))})
    return Reply("+" if number > said else "-", role="user")


def python(problem, transcript: Transcript) -> Reply | None:
    """sandbox.py's."""
    from dapo_jax.reward import sandbox  # which imports this module

    return sandbox.python(problem, transcript)


TOOLS: dict[str, Callable] = {"calculator": calculator, "guess": guess, "python": python}
