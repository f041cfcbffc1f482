"""Problem files: read, check, de-duplicate, encode, and put into an endless order.

A problem is a prompt and an answer. What files there may be says `rows.py`; a row is one of
    {prompt: [{role, content}, ...], reward_model: {ground_truth}, data_source}  verl (DAPO's file)
    {verl_row: {the above}}                                                  with notes around
    {prompt | question | problem, answer}      the answer, or a solution that ends in #### answer
    {prompt | question | problem, solution}    MATH: the answer in the last \\boxed{}
or has columns of its own (`Reading.columns`). Chats stay as they are; a prompt that is a text gets
the DAPO prompt or another template. Rows count from 1; in jsonl and CSV they are line numbers. To
look at a file:

    python -m dapo_jax.data.problems inspect FILE... [--tokenizer=DIR] [--chat_template=FILE]
"""

import argparse
import functools
import hashlib
import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dapo_jax import bars, gate
from dapo_jax.data import prompts, rows
from dapo_jax.data.answers import last_boxed
from dapo_jax.data.rows import BAR as _BAR, SUFFIXES as SUFFIXES, Foreign
from dapo_jax.data.tokenizer import Tokenizer, load as load_tokenizer

_PROMPTS, _ANSWERS = ("question", "problem", "prompt"), ("answer", "solution")
SCHEMAS = (
    ("verl_row",),
    ("prompt", "reward_model"),
    *((p, a) for p in _PROMPTS for a in _ANSWERS),
)
_NEEDS = "needs the fields " + ", or ".join("+".join(s) for s in SCHEMAS)
_COLUMNS = {"source_prompt", "data_source"}.union(*SCHEMAS)
_SHOW = reprlib.Repr()  # bounded in length and depth, so that no value can spoil a message
_SHOW.maxstring = _SHOW.maxother = 60


class Problem(NamedTuple):
    id: str  # 16 hex digits of the SHA-256 of the prompt: stable over files
    messages: prompts.Messages  # ((role, content), ...)
    answer: str  # an integer, any size: no '+', no leading zeros, no separators; or any text
    source: str  # data_source of the row, else the file's name
    row: Mapping[str, Any] = MappingProxyType({})  # its columns but the prompt, where asked for

    def __hash__(self):
        return hash(self.id)


class Reading(NamedTuple):
    """How rows become problems."""

    takes: Callable[[object, str], str] | None = None  # `any_answer`, or None = `integer`
    # 'prompt', 'answer', 'source' -> name in the row, a.b for b within a; '' = there is none
    columns: Mapping[str, str] = MappingProxyType({})
    template: str = ""  # with {problem}; '' = chats as they are, texts in the paper's prompt
    system: str = ""  # system message, in place of the row's
    whole: bool = False  # keep the rows


_USUAL = Reading()


class Refusal(NamedTuple):
    file: str
    row: int
    field: str
    value: str
    reason: str

    def __str__(self):
        return f"{self.file} row {self.row}: {self.field} = {self.value}: {self.reason}"


def refusal(path: Path, row: int, field: str, value: object, reason: str) -> Refusal:
    """With no more of the value than a line takes."""
    return Refusal(str(path), row, field, _SHOW.repr(value), reason)


class Conflict(NamedTuple):
    id: str
    answers: tuple[str, ...]
    rows: tuple[str, ...]  # 'file row n' of the first row with each answer


class Report(NamedTuple):
    rows: int
    unique: int  # distinct prompts, whatever became of their answers
    duplicates: int  # rows that repeat an earlier prompt
    conflicts: tuple[Conflict, ...]
    refused: tuple[Refusal, ...]
    mapped: int = 0  # rows with the columns of `Reading.columns`


class Encoded(NamedTuple):
    ids: list[list[int]]
    problems: list[Problem]  # aligned with ids
    n_long: int  # prompts that were left out, or cut


class BadRow(ValueError):  # (field, value, reason)
    pass


def read(
    paths: str | Path | Sequence[str | Path], on_bad: str = "refuse", how: Reading = _USUAL
) -> tuple[list[Problem], Report]:
    """The distinct problems of one or more files, patterns or data sets of the hub (`rows.find`),
    in order of first appearance.

    Prompts are the same if roles and contents are, character by character, over all the files. One
    that comes with two different answers is dropped: nobody can tell which of them is wrong.

    on_bad: what to do about rows without a prompt or without an answer that `how` takes. 'refuse'
      reads everything, then raises; 'skip' leaves them out and names each in the report.
    ValueError: those rows; missing, empty, damaged or foreign files; no problem left over.
    """
    if on_bad not in ("refuse", "skip"):
        raise ValueError(f"on_bad: 'refuse' or 'skip', not {on_bad!r}")
    named = [paths] if isinstance(paths, str | Path) else paths
    if not named:
        raise ValueError("no problem file was named")
    paths = [path for name in named for path in rows.find(name)]
    count, mapped, duplicates, refused = 0, 0, 0, []
    first: dict[prompts.Messages, tuple[str, str, str, dict] | None] = {}  # answer, ..., where, row
    others: dict[prompts.Messages, dict[str, str]] = {}  # answer -> where
    for path in paths:
        before = count
        for number, row in rows.read(path, lambda names, path=path: _wanted(path, names, how)):
            count += 1
            try:
                asked = _parse(row, how)
                mapped += asked.mapped
                duplicates += asked.messages in first
                known = first.setdefault(asked.messages, None)
                answer = asked.value
                if asked.field:
                    answer = (how.takes or integer)(asked.value, asked.field)
            except BadRow as e:
                field, value, reason = e.args
                refused.append(refusal(path, number, field, value, reason))
                continue
            where = f"{path} row {number}"
            if known is None:
                source = asked.source or path.name.split(".")[0]
                first[asked.messages] = (answer, source, where, asked.row)
            elif known[0] != answer:
                others.setdefault(asked.messages, {}).setdefault(answer, where)
        if count == before:
            raise ValueError(f"{path}: no rows in this file")
    if refused and on_bad == "refuse":
        raise ValueError(
            f"{refused[0]} ({len(refused)} of {count} rows are refused; "
            "data.on_bad='skip' leaves them out)"
        )
    conflicts = tuple(
        Conflict(_id(messages), (first[messages][0], *more), (first[messages][2], *more.values()))
        for messages, more in others.items()
    )
    problems = [
        Problem(_id(messages), messages, *known[:2], known[3])
        for messages, known in first.items()
        if known and messages not in others
    ]
    if not problems:
        why = f"; the first: {refused[0]}" if refused else ""
        raise ValueError(
            f"{paths[0]}: no usable row: {len(refused)} of {count} refused, "
            f"{len(conflicts)} prompts with conflicting answers{why}"
        )
    return problems, Report(count, len(first), duplicates, conflicts, tuple(refused), mapped)


def integer(value: object, field: str = "answer") -> str:
    """The answer as its shortest decimal digits: ' 1,234' -> '1234', '+7' -> '7', '033' -> '33'.

    verl compares answers as strings and drops the commas of a non-negative integer on both sides,
    so removing them changes no verdict there; leading zeros, '+' and '-1,234' it would demand
    literally, which no reader of the problem can know.

    A float or a decimal, also as text ('27.0'), is read where it is integral and below 2**53, up to
    which a float holds every integer. Refused as damaged are those beyond, and integers beyond that
    fill a float's 53-bit mantissa. Five rows of DAPO-Math-17k look like that: their
    105263157894736848 should end in 42.

    ValueError (three arguments: field, value, reason) for whatever is not an integer.
    """
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
        if not _fills_mantissa(digits):
            return "-" * (m[1] == "-" and digits != "0") + digits
    elif not re.fullmatch(r"[+-]?[0-9][0-9,]*(\.0*|(\.[0-9]+)?[eE]\+?[0-9]+)", text):  # 27.0, 1e5
        raise BadRow(field, value, "not an integer")
    raise BadRow(field, value, "float-damaged integer; restore it from the original data")


def _fills_mantissa(digits: str) -> bool:
    """Whether an integer looks like a rounded one: beyond 2**53, yet exactly a float64, and no
    shorter than 48 bits without its trailing zeros. (2**64, 10**20 and 20! are shorter.)"""
    n = int(digits) if len(digits) < 309 else 0
    return n > 2**53 and int(float(n)) == n and (n // (n & -n)).bit_length() >= 48


def any_answer(value: object, field: str = "answer") -> str:
    """An answer of any type as text: integers as `integer` gives them (but '007', '+7' as they
    are), other text without the blanks around it, a list of one value as that value, what else
    JSON can hold as JSON. ValueError as of `integer`, for what is missing or damaged."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    text = value.strip() if isinstance(value, str) else ""
    try:
        return text if re.match(r"\+|-?0[0-9]", text) else integer(value, field)
    except BadRow as bad:
        if bad.args[2] == "missing or empty" or ("damaged" in bad.args[2] and "e" not in text):
            raise
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(field, value, "not a finite number")
    return text or json.dumps(value, ensure_ascii=False, default=str)


def columns(listed: str) -> dict[str, str]:
    """'prompt=query,answer=final' as a mapping. ValueError: it is not of that form."""
    pairs = [entry.partition("=") for entry in listed.split(",") if entry.strip()]
    out = {role.strip(): name.strip() for role, _, name in pairs}
    if not out.keys() <= {"prompt", "answer", "source"} or not all(e for _, e, _ in pairs):
        raise ValueError(
            f"config.data.columns: {listed!r} is not of the form prompt=NAME,answer=NAME,"
            "source=NAME"
        )
    return out


# --- one row ------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    messages: prompts.Messages
    field: str  # name of the answer's field; '' = the rows have none
    value: Any  # the answer as it stands there
    source: str
    row: dict  # what else there is, where that is wanted
    mapped: bool


def _wanted(path: Path, names: list[str], how: Reading) -> list[str]:
    """The columns of a parquet file that are read."""
    own = {name.partition(".")[0] for name in how.columns.values()} - {""}
    if not (own and own <= set(names)) and not any(set(s) <= set(names) for s in SCHEMAS):
        raise Foreign(f"{path}: has the columns {', '.join(names)[:300]}; {_NEEDS}")
    return names if how.whole else [n for n in names if n in _COLUMNS | own]


def decoded(row: rows.Row) -> dict:
    """The columns of a row. BadRow: it has none."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8-sig"))
        except UnicodeDecodeError as e:
            raise BadRow("row", row, f"not UTF-8 text (byte {e.start})") from e
        except (ValueError, RecursionError) as e:
            raise BadRow("row", row, f"not valid JSON: {e}") from e
    if isinstance(row, Exception):
        raise BadRow("row", "", f"cannot be read: {gate.describe(row)}") from row
    if isinstance(row, dict) and row.get("verl_row") is not None:
        row = row["verl_row"]
    if not isinstance(row, dict):
        raise BadRow("row", row, "not an object with named fields")
    return row


def _parse(row: rows.Row, how: Reading) -> _Asked:
    """BadRow: no such row."""
    row = decoded(row)
    names = how.columns
    if mapped := bool(names) and all(_at(row, n) is not None for n in names.values() if n):
        source = str(_at(row, names["source"])) if names.get("source") else ""
    else:
        names, source = {}, ""
    if not source and isinstance(row.get("data_source"), str):
        source = row["data_source"]
    verl = row.get("prompt") is not None and row.get("reward_model") is not None
    there = lambda of: next((n for n in of if row.get(n) is not None), "")
    asks = names.get("prompt") or ("prompt" if verl else there(_PROMPTS))
    if not asks:
        raise BadRow("row", sorted(map(str, row)), _NEEDS)
    prompt = _at(row, asks)
    if verl and asks == "prompt":
        # Some processed copies keep the messages in source_prompt and the bare problem in prompt.
        prompt = row.get("source_prompt") or prompt
    messages = conversation(prompt, asks, how)
    rest = {k: v for k, v in row.items() if k not in (asks, "source_prompt")} if how.whole else {}
    field = names.get("answer", "reward_model.ground_truth" if verl else there(_ANSWERS))
    if not field and "answer" not in names:
        field = "answer"
    value = _at(row, field) if field else ""
    if field == "solution" and isinstance(value, str):
        boxed = last_boxed(value)
        if boxed is not None or asks != "prompt":  # TRL's solution may be the answer itself
            field, value = "solution \\boxed", boxed
    elif isinstance(value, str) and "####" in value and not verl:
        value = value.rsplit("####", 1)[1]
    return _Asked(messages, field, value, source, rest, mapped)


def _at(row: dict, name: str) -> Any:
    """The value of 'a', or of 'b' within 'a' for 'a.b'; None where there is none."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def conversation(value: object, field: str, how: Reading) -> prompts.Messages:
    """A prompt as it stands in a row, in the template and with the system message of `how`. BadRow:
    it is none."""
    try:
        if isinstance(value, str):
            messages, text = prompts.in_template(value, how.template), value
        else:
            messages = tuple((m["role"], m["content"]) for m in value)
            text = prompts.plain_text(messages)
        "\n".join([text, *(role for role, _ in messages)]).encode()
    except UnicodeEncodeError as e:
        raise BadRow(field, value, "holds half of a surrogate pair, which is not text") from e
    except (TypeError, KeyError, IndexError) as e:
        raise BadRow(field, value, "expected text or a list of {role, content} texts") from e
    if not text.strip():
        raise BadRow(field, value, "missing or empty")
    said = tuple(m for m in messages if m[0] != "system")
    if how.template and not isinstance(value, str):
        if len(said) != 1:
            raise BadRow(field, value, "data.template needs a prompt of one user message")
        before = messages[: messages.index(said[0])]
        said = prompts.in_template(prompts.raw_problem(said), how.template)
        messages = (*before, *said)
    return (("system", how.system), *said) if how.system else messages


def _id(messages: prompts.Messages) -> str:
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


# --- token ids and order ------------------------------------------------------------------------


def encode(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    max_tokens: int,
    chat: bool,
    on_long: str = "filter",
    name: str = "",
) -> Encoded:
    """Prompts as token ids, each 1..max_tokens tokens long.

    chat: through the tokenizer's chat template; otherwise the contents alone, as plain text.
    on_long: 'filter' leaves longer prompts out; 'left_truncate' keeps their last max_tokens
      tokens, as verl's `truncation=left` does (the question survives, the template's head not).
    name: of the set, for errors.
    ValueError: a prompt without tokens; no prompt that fits; no chat template.
    """
    if on_long not in ("filter", "left_truncate") or max_tokens < 1:
        raise ValueError(
            "on_long is 'filter' or 'left_truncate' and max_tokens positive, not "
            f"{on_long!r} and {max_tokens}"
        )
    ids, kept, n_long = [], [], 0
    tokens = tokenizer.chat if chat else lambda m: tokenizer.encode(prompts.plain_text(m))
    for problem in bars.bar(problems, desc="encoding prompts", **_BAR):
        row = tokens(problem.messages)
        if not row:
            raise ValueError(f"problem {problem.id}: the tokenizer makes no token of its prompt")
        n_long += len(row) > max_tokens
        if len(row) <= max_tokens or on_long == "left_truncate":
            ids.append(row[-max_tokens:])
            kept.append(problem)
    if problems and not kept:
        raise ValueError(
            f"{name or problems[0].source}: all {n_long} prompts are longer than {max_tokens}"
            " tokens; raise data.max_prompt_tokens or set data.on_long='left_truncate'"
        )
    return Encoded(ids, kept, n_long)


class Stream:
    """By position, remembered: one of few problems takes Grain milliseconds to find."""

    def __init__(self, order):  # grain.MapDataset
        self._at = functools.lru_cache(1 << 16)(order.__getitem__)

    def __getitem__(self, position: int):
        return self._at(position)


def stream(problems: Sequence[Problem], seed: int) -> Stream:
    """Endless order of the problems, a new permutation each epoch, with random access.

    `stream(problems, seed)[i]` is a pure function of its arguments and i, so the state of the data
    is one integer: the next position. Position i lies in epoch i // len(problems). Anything with a
    length and an index can take the problems' place. ValueError: no problems.
    """
    import grain  # here, not above: Grain imports JAX, and reading files should not

    if not len(problems):
        raise ValueError("no problems to stream")
    # Grain shuffles epoch e by seed + e: unhashed, seed 1 would replay seed 0 one epoch later.
    digest = hashlib.sha256(f"problem order {seed}".encode()).digest()
    order = grain.MapDataset.source(problems).shuffle(int.from_bytes(digest[:4], "big"))
    return Stream(order.repeat())


def host_slice(start: int, stop: int, host: int, hosts: int) -> range:
    """The positions start..stop-1 that one host of `hosts` takes: contiguous, sizes differing by at
    most one, and the slices of hosts 0, 1, ... in a row are the whole range."""
    if not (0 <= host < hosts and start <= stop):
        raise ValueError(f"host_slice: no host {host} of {hosts} in positions {start}..{stop}")
    return range(*(start + (stop - start) * h // hosts for h in (host, host + 1)))


# --- python -m dapo_jax.data.problems inspect ---------------------------------------------------


def inspect(
    paths: Sequence[str], tokenizer: str = "", chat_template: str = "", how: Reading = _USUAL
) -> Iterator[str]:
    """The lines that `inspect` prints. Lengths are in tokens, without a tokenizer in characters."""
    if chat_template and not tokenizer:
        raise ValueError("--chat_template needs --tokenizer")
    tok = load_tokenizer(tokenizer, chat_template) if tokenizer else None
    problems, report = read(paths, "skip", how)
    chat = bool(tok and tok.template)
    render = tok.render_chat if chat else prompts.plain_text
    texts = [render(p.messages) for p in problems]
    lengths = [
        len(tok.encode(text) if tok else text) for text in bars.bar(texts, desc="encoding", **_BAR)
    ]
    integers = [p.answer for p in problems if re.fullmatch(r"-?[0-9]+", p.answer)]
    low, high = (f(integers, key=Decimal, default="none") for f in (min, max))

    yield f"rows        {report.rows:>9,}"
    yield f"unique      {report.unique:>9,}   distinct prompts"
    yield f"duplicates  {report.duplicates:>9,}   rows that repeat an earlier prompt"
    yield f"conflicts   {len(report.conflicts):>9,}   prompts with different answers, dropped"
    for c in report.conflicts[:3]:
        yield "    " + "; ".join(f"{a} at {row}" for a, row in zip(c.answers, c.rows, strict=True))
    kind = "an" if how.takes else "an integer"
    yield f"refused     {len(report.refused):>9,}   rows without a prompt or {kind} answer"
    yield from (f"    {refusal}" for refusal in report.refused[:5])
    yield f"kept        {len(problems):>9,}   problems"
    yield f"sources     {', '.join(sorted({p.source for p in problems}))}"
    others = len(problems) - len(integers)
    yield f"answers     {low} .. {high}" + (f", and {others:,} that are no integers" * bool(others))
    yield f"{'tokens' if tok else 'characters':<11} " + "  ".join(
        f"p{q} {np.percentile(lengths, q, method='higher')}" for q in (0, 50, 90, 99, 100)
    )
    for p, text in zip(problems[:3], texts[:3], strict=True):
        yield (
            f"\n--- problem {p.id}, answer {p.answer}, "
            f"{'in the chat template' if chat else 'as plain text'}\n{text}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    cli = argparse.ArgumentParser(prog="python -m dapo_jax.data.problems")
    cli.add_argument("command", choices=["inspect"])
    cli.add_argument("files", nargs="+", metavar="FILE")
    cli.add_argument("--tokenizer", default="", help="tokenizer.json, *.model or their folder")
    cli.add_argument("--chat_template", default="", help="Jinja file")
    cli.add_argument("--columns", default="", help="as config.data.columns")
    cli.add_argument("--template", default="", help="as config.data.template")
    cli.add_argument("--any", action="store_true", help="answers that are no integers too")
    args = cli.parse_args(argv)
    try:
        takes = any_answer if args.any else None
        how = Reading(takes, columns(args.columns), prompts.template(args.template))
        for line in inspect(args.files, args.tokenizer, args.chat_template, how):
            print(line, flush=True)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough; leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
