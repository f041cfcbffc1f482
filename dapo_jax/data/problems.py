"""Problem files: read, check, de-duplicate, encode, and put into an endless order.

A problem is a prompt and an integer. Files are parquet, jsonl or jsonl.gz; a row is one of
    {prompt: [{role, content}, ...], reward_model: {ground_truth}, data_source}  verl (DAPO's file)
    {verl_row: {the above}}                                                  with notes around
    {question, answer}            GSM8K: the answer alone, or a solution that ends in #### answer
    {problem, answer}             and
    {problem, solution}           MATH: the answer in the last \\boxed{}
verl rows keep their messages; the others get the DAPO prompt. Rows count from 1; in jsonl they are
line numbers. To look at a file:

    python -m dapo_jax.data.problems inspect FILE... [--tokenizer=DIR] [--chat_template=FILE]
"""

import argparse
import difflib
import gzip
import hashlib
import json
import os
import re
import reprlib
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo_jax import bars, gate
from dapo_jax.data import prompts
from dapo_jax.data.tokenizer import Tokenizer, load as load_tokenizer

if TYPE_CHECKING:
    import grain

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
SCHEMAS = (
    ("verl_row",),
    ("prompt", "reward_model"),
    ("question", "answer"),
    ("problem", "answer"),
    ("problem", "solution"),
)
_NEEDS = "needs the fields " + ", or ".join("+".join(s) for s in SCHEMAS)
_COLUMNS = {"source_prompt", "data_source"}.union(*SCHEMAS)
_SHOW = reprlib.Repr()  # bounded in length and depth, so that no value can spoil a message
_SHOW.maxstring = _SHOW.maxother = 60
_BAR = dict(delay=2, leave=False, unit_scale=True)  # a progress bar, if it takes more than 2 s


class Problem(NamedTuple):
    id: str  # 16 hex digits of the SHA-256 of the prompt: stable over files
    messages: prompts.Messages  # ((role, content), ...)
    answer: str  # an integer, any size: no '+', no leading zeros, no separators
    source: str  # data_source of the row, else the file's name


class Refusal(NamedTuple):
    file: str
    row: int
    field: str
    value: str
    reason: str

    def __str__(self):
        return f"{self.file} row {self.row}: {self.field} = {self.value}: {self.reason}"


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


class Encoded(NamedTuple):
    ids: list[list[int]]
    problems: list[Problem]  # aligned with ids
    n_long: int  # prompts that were left out, or cut


class _BadRow(ValueError):  # (field, value, reason)
    pass


class _Foreign(ValueError):  # a whole file, and the message names it
    pass


def read(
    paths: str | Path | Sequence[str | Path], on_bad: str = "refuse"
) -> tuple[list[Problem], Report]:
    """The distinct problems of one or more files, in order of first appearance.

    Prompts are the same if roles and contents are, character by character, over all the files. One
    that comes with two different answers is dropped: nobody can tell which of them is wrong.

    on_bad: what to do about rows without a prompt or without an integer answer. 'refuse' reads
      everything, then raises; 'skip' leaves them out and names each in the report.
    ValueError: those rows; missing, empty, damaged or foreign files; no problem left over.
    """
    if on_bad not in ("refuse", "skip"):
        raise ValueError(f"on_bad: 'refuse' or 'skip', not {on_bad!r}")
    paths = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not paths:
        raise ValueError("no problem file was named")
    rows, duplicates, refused = 0, 0, []
    first: dict[prompts.Messages, tuple[str, str, str] | None] = {}  # (answer, source, where)
    others: dict[prompts.Messages, dict[str, str]] = {}  # answer -> where
    for path in paths:
        before = rows
        for number, row in _rows(path):
            rows += 1
            try:
                messages, field, value, source = _parse(row)
                duplicates += messages in first
                known = first.setdefault(messages, None)
                answer = integer(value, field)
            except _BadRow as e:
                field, value, reason = e.args
                refused.append(Refusal(str(path), number, field, _SHOW.repr(value), reason))
                continue
            where = f"{path} row {number}"
            if known is None:
                first[messages] = (answer, source or path.name.split(".")[0], where)
            elif known[0] != answer:
                others.setdefault(messages, {}).setdefault(answer, where)
        if rows == before:
            raise ValueError(f"{path}: no rows in this file")
    if refused and on_bad == "refuse":
        raise ValueError(
            f"{refused[0]} ({len(refused)} of {rows} rows are refused; "
            "data.on_bad='skip' leaves them out)"
        )
    conflicts = tuple(
        Conflict(_id(messages), (first[messages][0], *more), (first[messages][2], *more.values()))
        for messages, more in others.items()
    )
    problems = [
        Problem(_id(messages), messages, *known[:2])
        for messages, known in first.items()
        if known and messages not in others
    ]
    if not problems:
        why = f"; the first: {refused[0]}" if refused else ""
        raise ValueError(
            f"{paths[0]}: no usable row: {len(refused)} of {rows} refused, "
            f"{len(conflicts)} prompts with conflicting answers{why}"
        )
    return problems, Report(rows, len(first), duplicates, conflicts, tuple(refused))


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
        raise _BadRow(field, value, "missing or empty")
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
        raise _BadRow(field, value, "not an integer")
    raise _BadRow(field, value, "float-damaged integer; restore it from the original data")


def _fills_mantissa(digits: str) -> bool:
    """Whether an integer looks like a rounded one: beyond 2**53, yet exactly a float64, and no
    shorter than 48 bits without its trailing zeros. (2**64, 10**20 and 20! are shorter.)"""
    n = int(digits) if len(digits) < 309 else 0
    return n > 2**53 and int(float(n)) == n and (n // (n & -n)).bit_length() >= 48


# --- one row ------------------------------------------------------------------------------------


def _parse(row: bytes | dict | Exception) -> tuple[prompts.Messages, str, object, str]:
    """(messages, name of the answer's field, answer as it stands there, source or ''); _BadRow."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8-sig"))
        except UnicodeDecodeError as e:
            raise _BadRow("row", row, f"not UTF-8 text (byte {e.start})") from e
        except (ValueError, RecursionError) as e:
            raise _BadRow("row", row, f"not valid JSON: {e}") from e
    if isinstance(row, Exception):
        raise _BadRow("row", "", f"cannot be read: {gate.describe(row)}") from row
    if isinstance(row, dict) and row.get("verl_row") is not None:
        row = row["verl_row"]
    if not isinstance(row, dict):
        raise _BadRow("row", row, "not an object with named fields")
    source = row["data_source"] if isinstance(row.get("data_source"), str) else ""
    if row.get("prompt") is not None and row.get("reward_model") is not None:
        # Some processed copies keep the messages in source_prompt and the bare problem in prompt.
        messages = _messages(row.get("source_prompt") or row["prompt"], "prompt")
        reward = row["reward_model"]
        answer = reward.get("ground_truth") if isinstance(reward, dict) else None
        return messages, "reward_model.ground_truth", answer, source
    if row.get("question") is not None:
        answer = row.get("answer")
        if isinstance(answer, str) and "####" in answer:
            answer = answer.rsplit("####", 1)[1]
        return _messages(row["question"], "question"), "answer", answer, source
    if row.get("problem") is not None:
        messages = _messages(row["problem"], "problem")
        if row.get("answer") is not None or not isinstance(row.get("solution"), str):
            return messages, "answer", row.get("answer"), source
        return messages, "solution \\boxed", _boxed(row["solution"]), source
    raise _BadRow("row", sorted(map(str, row)), _NEEDS)


def _messages(value: object, field: str) -> prompts.Messages:
    try:
        if isinstance(value, str):
            messages, text = prompts.dapo_messages(value), value
        else:
            messages = tuple((m["role"], m["content"]) for m in value)
            text = prompts.plain_text(messages)
        "\n".join([text, *(role for role, _ in messages)]).encode()
    except UnicodeEncodeError as e:
        raise _BadRow(field, value, "holds half of a surrogate pair, which is not text") from e
    except (TypeError, KeyError, IndexError) as e:
        raise _BadRow(field, value, "expected text or a list of {role, content} texts") from e
    if not text.strip():
        raise _BadRow(field, value, "missing or empty")
    return messages


def _boxed(solution: str) -> str | None:
    """Contents of the last \\boxed{...}, its braces balanced; None without one."""
    _, found, rest = solution.rpartition("\\boxed{")
    depth = 1
    for end, char in enumerate(rest if found else ""):
        depth += (char == "{") - (char == "}")
        if not depth:
            return rest[:end]
    return None


def _id(messages: prompts.Messages) -> str:
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


# --- files --------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[int, bytes | dict | Exception]]:
    """(row number, a dict of parquet or an undecoded line of jsonl)."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}{_nearest(path)}")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: not a problem file; expected {', '.join(SUFFIXES)}")
    number = 0
    try:
        for number, row in (_parquet if path.suffix == ".parquet" else _jsonl)(path):
            yield number, row
    except _Foreign:
        raise
    except Exception as e:  # of pyarrow, gzip, the system: what a damaged file raises is anybody's
        after = f" after row {number}" if number else ""
        raise ValueError(
            f"{path}: cannot be read{after}, is it damaged or cut short? {gate.describe(e)}"
        ) from e


def _jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    bar = bars.bar(total=path.stat().st_size, desc=path.name, unit="B", **_BAR)
    with open(path, "rb") as raw, bar:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for number, line in enumerate(lines, 1):
            bar.update(raw.tell() - bar.n)
            if line.strip():
                yield number, line


def _parquet(path: Path) -> Iterator[tuple[int, dict | Exception]]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if not any(set(schema) <= set(names) for schema in SCHEMAS):
            raise _Foreign(f"{path}: has the columns {', '.join(names)[:300]}; {_NEEDS}")
        # Only what is needed, a few thousand rows at a time: DAPO-Math-17k has 1.79M of them.
        batches = file.iter_batches(4096, columns=[n for n in names if n in _COLUMNS])
        rows = (row for batch in batches for row in _dicts(batch))
        bar = bars.bar(rows, desc=path.name, total=file.metadata.num_rows, unit="row", **_BAR)
        yield from enumerate(bar, 1)


def _dicts(batch: pa.RecordBatch) -> Iterator[dict | Exception]:
    """The rows; where one holds what Python has no value for (the year 5,881,580), its error."""
    try:
        yield from batch.to_pylist()
    except Exception:
        for i in range(batch.num_rows):
            try:
                row = batch.slice(i, 1).to_pylist()[0]
            except Exception as e:
                row = e
            yield row


def _nearest(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    names = sorted(p.name for p in folder.glob("*") if p.name.endswith(SUFFIXES))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.3) or names[:3]
    return f"; near it: {', '.join(str(folder / n) for n in near)}" if near else ""


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


def stream(problems: Sequence[Problem], seed: int) -> "grain.MapDataset":
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
    return grain.MapDataset.source(problems).shuffle(int.from_bytes(digest[:4], "big")).repeat()


def host_slice(start: int, stop: int, host: int, hosts: int) -> range:
    """The positions start..stop-1 that one host of `hosts` takes: contiguous, sizes differing by at
    most one, and the slices of hosts 0, 1, ... in a row are the whole range."""
    if not (0 <= host < hosts and start <= stop):
        raise ValueError(f"host_slice: no host {host} of {hosts} in positions {start}..{stop}")
    return range(*(start + (stop - start) * h // hosts for h in (host, host + 1)))


# --- python -m dapo_jax.data.problems inspect ---------------------------------------------------


def inspect(paths: Sequence[str], tokenizer: str = "", chat_template: str = "") -> Iterator[str]:
    """The lines that `inspect` prints. Lengths are in tokens, without a tokenizer in characters."""
    if chat_template and not tokenizer:
        raise ValueError("--chat_template needs --tokenizer")
    tok = load_tokenizer(tokenizer, chat_template) if tokenizer else None
    problems, report = read(paths, on_bad="skip")
    chat = bool(tok and tok.template)
    render = tok.render_chat if chat else prompts.plain_text
    texts = [render(p.messages) for p in problems]
    lengths = [
        len(tok.encode(text) if tok else text) for text in bars.bar(texts, desc="encoding", **_BAR)
    ]
    low, high = (f(problems, key=lambda p: Decimal(p.answer)).answer for f in (min, max))

    yield f"rows        {report.rows:>9,}"
    yield f"unique      {report.unique:>9,}   distinct prompts"
    yield f"duplicates  {report.duplicates:>9,}   rows that repeat an earlier prompt"
    yield f"conflicts   {len(report.conflicts):>9,}   prompts with different answers, dropped"
    for c in report.conflicts[:3]:
        yield "    " + "; ".join(f"{a} at {row}" for a, row in zip(c.answers, c.rows, strict=True))
    yield f"refused     {len(report.refused):>9,}   rows without a prompt or an integer answer"
    yield from (f"    {refusal}" for refusal in report.refused[:5])
    yield f"kept        {len(problems):>9,}   problems"
    yield f"sources     {', '.join(sorted({p.source for p in problems}))}"
    yield f"answers     {low} .. {high}"
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
    args = cli.parse_args(argv)
    try:
        for line in inspect(args.files, args.tokenizer, args.chat_template):
            print(line, flush=True)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has seen enough; leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
