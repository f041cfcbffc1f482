"""Reading the text of a compiled program: what runs inside its loops, and what that moves.

    for turns, lines in hlo.in_loops(compiled.as_text()): ...
    hlo.collectives(compiled.as_text())["all-gather"].bytes

What stands in a loop is done again for every token, layer or micro-batch, so one line there weighs
more than all that surrounds the loop.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "c64": 64}  # of the others the name says it
_ARRAY = re.compile(r"\b(pred|bf16|c64|[fsu]\d+)\w*\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(-start)?"
)
_CALLEE = r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"


class Moved(NamedTuple):
    """Collectives of one kind, each counted as often as its loops are known to turn."""

    count: int
    bytes: int  # of what comes out of them on one device


Body = dict[str, str]  # of a computation: name of an instruction -> its line


def computations(hlo: str) -> tuple[dict[str, Body], str]:
    """(name -> instructions, name of the one that is the program)."""
    found, body, entry = {}, None, ""
    for line in hlo.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = found[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif body is not None and (name := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)):
            body[name[1]] = line.strip()
    return found, entry


def in_loops(hlo: str, fused: bool = False) -> list[tuple[int, list[str]]]:
    """(turns, instructions) of every computation that runs inside a loop; with `fused` of the
    insides of fusions too. `turns` is the product over the loops around it, where one whose number
    of turns the program does not hold (tokens of a chunk, micro-batches) counts once."""
    known, entry = computations(hlo)
    out = []

    def visit(name: str, turns: int, inside: bool) -> None:
        if inside:
            out.append((turns, [*known[name].values()]))
        for line in known[name].values():
            if " fusion(" in line and not fused:
                continue
            if re.search(r" async-(update|done)\(", line):  # its work is counted where it starts
                continue
            loop = re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            times = turns * (_turns(line, known[loop[1]], known[loop[2]]) or 1) if loop else turns
            several = re.findall(r"(?:branch_computations|called_computations)=\{(.*?)\}", line)
            for callee in re.findall(_CALLEE, line) + re.findall(r"[\w.\-]+", ",".join(several)):
                visit(callee, times, inside or loop is not None)

    visit(entry, 1, False)
    return out


def _turns(loop: str, condition: Body, body: Body) -> int | None:
    """As the loop says (XLA on CPU), or of one that counts from 0 up to a constant, as scans do by
    1 and products over gathered windows by 2; None otherwise."""
    if said := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(said[1])
    less = re.search(r" compare\((.*)\), direction=LT", _root(condition))
    if not less:
        return None
    counter, end = _operands(less[1])
    index = re.search(r" get-tuple-element\(.*\), index=(\d+)", condition.get(counter, ""))
    end = _constants(condition).get(end)
    return end and -(-end // (_step(int(index[1]), body) if index else 1))


def _step(index: int, body: Body) -> int:
    """What a turn adds to element `index` of the loop's state; 1 where that is not to be seen."""
    state = re.search(r" tuple\((.*?)\)", _root(body))
    after = dict(enumerate(_operands(state[1]))) if state else {}
    added = re.search(r" add\((.*?)\)", body.get(after.get(index), ""))
    known = _constants(body)
    return next((known[x] for x in _operands(added[1]) if known.get(x)), 1) if added else 1


def _root(body: Body) -> str:
    return next((line for line in body.values() if line.startswith("ROOT")), "")


def _operands(text: str) -> list[str]:
    """'u32[] %a, /*index=1*/%b' -> ['a', 'b']."""
    plain = re.sub(r"/\*.*?\*/|\{.*?\}|\[.*?\]", "", text)
    return [x.split()[-1].lstrip("%") for x in plain.split(",") if x.strip()]


def _constants(body: Body) -> dict[str, int]:
    found = {name: re.search(r" [su]\d+\[\]\S* constant\((\d+)\)", x) for name, x in body.items()}
    return {name: int(x[1]) for name, x in found.items() if x}


def instructions(lines: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """(bytes of an array, operation, line) for every array that comes out of an instruction."""
    for line in lines:
        if kind := _INSTRUCTION.match(line):
            for size, _ in arrays(line):
                yield size, kind[2], line


def arrays(line: str) -> list[tuple[int, int]]:
    """(bytes, numbers) of every array that comes out of an instruction."""
    kind = _INSTRUCTION.match(line)
    return [(_bytes(x), _numbers(x)) for x in _ARRAY.finditer(kind[1])] if kind else []


def collectives(hlo: str) -> dict[str, Moved]:
    """Kind -> what is moved between devices inside loops; see `in_loops` for how often.

    XLA:TPU hides a gather behind other work by fusing it with several of them, and with each turn
    of a product over windows: the first fusion starts it, and all hold the same instruction. It is
    counted where it starts.
    """
    out: dict[str, Moved] = {}
    start = 'custom_call_target="AsyncCollectiveStart"'
    bodies = [(n, any(start in x for x in lines), lines) for n, lines in in_loops(hlo, fused=True)]
    hidden = {_key(line) for _, starts, lines in bodies if starts for line in lines}
    for turns, starts, lines in bodies:
        for line in lines:
            found = _INSTRUCTION.match(line)
            kind = _COLLECTIVE.fullmatch(found[2]) if found else None
            if not kind or (_key(line) in hidden and not starts):
                continue
            arrays = list(_ARRAY.finditer(found[1]))
            if kind[2] and kind[1] != "all-reduce":  # returns its operands first, and its handles
                arrays = [x for x in arrays if x[0] != "u32[]"]
                arrays = arrays[len(arrays) // 2 :]
            old, size = out.get(kind[1], Moved(0, 0)), sum(map(_bytes, arrays))
            out[kind[1]] = Moved(old.count + turns, old.bytes + turns * size)
    return out


def _key(line: str) -> tuple[str, ...] | None:
    """(operation, its array, channel) of a collective, the same wherever it shows up."""
    found, channel = _INSTRUCTION.match(line), re.search(r"channel_id=(\d+)", line)
    if not found or not channel or not _COLLECTIVE.fullmatch(found[2]):
        return None
    return found[2], _ARRAY.search(found[1])[0], channel[1]


def _bytes(array: re.Match) -> int:
    bits = _BITS.get(array[1]) or int(array[1][1:])
    return -(-bits * _numbers(array) // 8)


def _numbers(array: re.Match) -> int:
    return math.prod(int(n) for n in array[2].split(",") if n)
