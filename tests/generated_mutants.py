"""Operator mutants, made by machine: what `mutants.py --generated=N` puts into the sources.

Words are left alone: strings, messages of `raise` and `assert`, annotations.
"""

import ast
import itertools
import pathlib
import random
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
)  # fmt: skip
FLIPS = {ast.FloorDiv: ast.Div} | dict(PAIRS) | {b: a for a, b in PAIRS}
SIMPLE = ast.Name | ast.Attribute | ast.Call  # what `if` asks, and not a comparison
SWAPS = {"min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax", "zeros": "ones"}
SWAPS |= {new: old for old, new in SWAPS.items()}


class Generated(NamedTuple):
    place: str  # FILE or FILE::WORDS: as `of_place` was given it
    file: str
    text: str  # of the whole file with the mistake, as `ast.unparse` writes it
    before: str  # the line with it, and what it becomes
    after: str


def changed(node, **fields) -> ast.AST:
    return type(node)(**dict(ast.iter_fields(node)) | fields)


def is_text(node) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def mistakes(node) -> Iterator[ast.AST]:
    """What may stand in the place of this node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPS:
            yield changed(node, ops=[FLIPS[type(op)]()])
        case ast.BinOp(left=left, right=right) if is_text(left) or is_text(right):
            return
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in FLIPS:
            yield changed(node, op=FLIPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float()):
            yield ast.BinOp(node, ast.Add(), ast.Constant(1))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as func) if name in SWAPS:
            part = "id" if isinstance(func, ast.Name) else "attr"
            yield changed(node, func=changed(func, **{part: SWAPS[name]}))
        case ast.If(test=test) | ast.IfExp(test=test) if isinstance(test, SIMPLE):
            yield changed(node, test=ast.UnaryOp(ast.Not(), test))


def places(node) -> Iterator[tuple[list | dict, int | str]]:
    """(what holds a node below this one, its place there) of all that is no word."""
    for name, inner in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        several = isinstance(inner, list)
        holder = inner if several else vars(node)
        for key in range(len(inner)) if several else [name]:
            match holder[key]:
                case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.keyword(arg="strict"):
                    pass  # `strict` of zip: what it refuses never comes
                case ast.AST() as child:
                    yield holder, key
                    yield from places(child)


def of_place(root: pathlib.Path, place: str) -> list[Generated]:
    """Every one that the operators make of FILE, or, of FILE::WORDS, of its classes and functions
    in whose names this regular expression is."""
    file, _, words = place.partition("::")
    tree = ast.parse((root / "dapo_jax" / file).read_text())
    lines, found = ast.unparse(tree).splitlines(), []
    parts = (node for node in ast.walk(tree) if re.search(words, getattr(node, "name", None) or ""))
    for holder, key in [at for node in (parts if words else [tree]) for at in places(node)]:
        node = holder[key]
        for mistake in mistakes(node):
            holder[key] = mistake
            text = ast.unparse(tree)
            pairs = zip(lines, text.splitlines(), strict=True)
            before, after = next((a.strip(), b.strip()) for a, b in pairs if a != b)
            found.append(Generated(place, file, text, before, after))
        holder[key] = node
    return found


def drawn(root: pathlib.Path, places: Collection[str], number: int, seed: int) -> list[Generated]:
    """So many, in turn from each place."""
    shuffled = [of_place(root, place) for place in places]
    for place, mutants in zip(places, shuffled, strict=True):
        random.Random(f"{seed} {place}").shuffle(mutants)
    turns = itertools.chain(*itertools.zip_longest(*shuffled))
    return [mutant for mutant in turns if mutant][:number]
