"""Operator mutants, made by machine: what `mutants.py --generated=N` puts into the sources.

Words are left alone: strings, messages of `raise` and `assert`, annotations.
"""

import ast
import itertools
import pathlib
import random
import re
from collections.abc import Iterable
from typing import NamedTuple

FLIPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
SWAPS = {"min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax", "zeros": "ones"}
SWAPS |= {new: old for old, new in SWAPS.items()}


class Generated(NamedTuple):
    file: str
    start: int  # the bytes from here
    end: int  # up to here
    new: str  # become this
    line: int
    before: str  # that line, and what it becomes
    after: str


def of_file(root: pathlib.Path, file: str) -> list[Generated]:
    """Every one that the operators make of it, in the file's order."""
    data = (root / "dapo_jax" / file).read_bytes()
    begins = [0, *(m.end() for m in re.finditer(b"\n", data))]
    at = lambda line, column: begins[line - 1] + column
    first = lambda n: at(n.lineno, n.col_offset)
    last = lambda n: at(n.end_lineno, n.end_col_offset)
    found = []

    def add(start: int, end: int, new: str) -> None:
        line = data.count(b"\n", 0, start) + 1
        changed = data[:start] + new.encode() + data[end:]
        shown = [x.splitlines()[line - 1].decode().strip() for x in (data, changed)]
        found.append(Generated(file, start, end, new, line, *shown))

    def between(left, right, op) -> None:
        old, new = FLIPS[type(op)]
        spot = re.compile(rb"\s+".join(map(re.escape, old.encode().split())))
        if hit := spot.search(data, last(left), first(right)):
            add(hit.start(), hit.end(), new)

    def visit(node) -> None:
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in FLIPS:
                between(left, right, op)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in FLIPS:
                if not any(isinstance(x, ast.Constant | ast.JoinedStr) and not isinstance(
                    getattr(x, "value", ""), int | float) for x in (left, right)):  # fmt: skip
                    between(left, right, op)
            case ast.AugAssign(target=left, op=op, value=right) if type(op) in FLIPS:
                between(left, right, op)
            case ast.BoolOp(op=op, values=values):
                between(values[0], values[1], op)
            case ast.UnaryOp(op=ast.Not() | ast.Invert()):
                sign = re.match(rb"not\s+|~", data[first(node) :])
                add(first(node), first(node) + sign.end(), "")
            case ast.Constant(value=bool() as value):
                add(first(node), last(node), str(not value))
            case ast.Constant(value=int() | float()):
                add(first(node), last(node), f"({ast.unparse(node)} + 1)")
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SWAPS:
                add(last(node.func) - len(name), last(node.func), SWAPS[name])
            case ast.keyword(arg="strict"):  # of zip: what it refuses never comes
                return
            case ast.If(test=test) | ast.IfExp(test=test) if isinstance(
                test, ast.Name | ast.Attribute | ast.Call
            ):
                text = data[first(test) : last(test)].decode()
                add(first(test), last(test), f"(not {text})")
        for name, inner in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in inner if isinstance(inner, list) else [inner]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(ast.parse(data))
    return found


def drawn(root: pathlib.Path, files: Iterable[str], number: int, seed: int) -> list[Generated]:
    """So many, in turn from each file."""
    shuffled = [of_file(root, file) for file in files]
    for i, mutants in enumerate(shuffled):
        random.Random(f"{seed} {i}").shuffle(mutants)
    turns = itertools.chain(*itertools.zip_longest(*shuffled))
    return [mutant for mutant in turns if mutant][:number]
