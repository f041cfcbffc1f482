"""Problem files: read, check, de-duplicate, encode, and put into an endless order.

A problem is a prompt and an answer. `rows.py` lists the kinds of files; a row is one of
    {prompt: [{role, content}, ...], reward_model: {ground_truth}, data_source}  verl (DAPO's file)
    {verl_row: {the above}}                                                  with notes around
    {prompt | question | problem, answer}      the answer, or a solution that ends in #### answer
    {prompt | question | problem, solution}    MATH: the answer in the last \\boxed{}
or has columns of its own (`Reading.columns`). Chats stay as they are; a prompt that is a text is
put into the DAPO prompt or another template. Row numbers start at 1; in jsonl and CSV they are line
numbers. `python -m dapo_jax.data inspect FILE...` looks at a file.
"""

import functools
import hashlib
import itertools
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dapo_jax import bars, gate
from dapo_jax.data import prompts, references, rows
from dapo_jax.data.integer_verifier import last_boxed
from dapo_jax.data.rows import BadRow
from dapo_jax.data.tokenizer import Tokenizer

PROMPTS, _ANSWERS = ("question", "problem", "prompt"), ("answer", "solution")
SCHEMAS = (("verl_row",), ("prompt", "reward_model"), *itertools.product(PROMPTS, _ANSWERS))
_NEEDS = (
    "needs the fields " + ", or ".join("+".join(s) for s in SCHEMAS) + "; data.columns names others"
)
_COLUMNS = {"source_prompt", "data_source"}.union(*SCHEMAS)
_SHOW = reprlib.Repr()  # bounded in length and depth, so that no value can spoil a message
_SHOW.maxstring = _SHOW.maxother = 60


class Problem(NamedTuple):
    id: str  # 16 hex digits of the SHA-256 of the prompt: stable over files
    messages: prompts.Messages  # ((role, content), ...)
    answer: str  # an integer, any size: no '+', no leading zeros, no separators; or any text
    source: str  # data_source of the row, else the file's name
    row: Mapping[str, Any] = MappingProxyType({})  # all columns but the prompt, if `Reading.whole`
    chat: bool = False  # whether the prompt came as a chat and not as a text

    def __hash__(self):
        return hash(self.id)


class Reading(NamedTuple):
    """How rows become problems."""

    takes: Callable[[object, str], str] = references.integer  # or `references.any_answer`
    # 'prompt', 'answer', 'source' -> column in the row, a.b for b within a; '' = no such column
    columns: Mapping[str, str] = MappingProxyType({})
    template: str = ""  # with {problem}; '' = chats as they are, texts in the paper's prompt
    system: str = ""  # system message, in place of the row's
    whole: bool = False  # keep the rows


_USUAL = Reading()


def ident(messages: prompts.Messages) -> str:
    """`Problem.id`."""
    return hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]


def refusal(path: Path, row: int, bad: BadRow) -> str:
    """One line that names the row, with the value shortened to fit on it."""
    field, value, reason = bad.args
    return f"{path} row {row}: {field} = {_SHOW.repr(value)}: {reason}"


class Report(NamedTuple):
    rows: int
    unique: int  # distinct prompts, whatever became of their answers
    duplicates: int  # rows that repeat an earlier prompt
    conflicts: tuple[str, ...]  # each prompt with several: 'answer at file row n; answer at ...'
    refused: tuple[str, ...]  # `refusal` of each row
    mapped: int = 0  # rows with the columns of `Reading.columns`


class Encoded(NamedTuple):
    ids: list[list[int]]
    problems: list[Problem]  # aligned with ids
    n_long: int  # prompts that were left out, or cut


def read(
    paths: str | Path | Sequence[str | Path], on_bad: str = "refuse", how: Reading = _USUAL
) -> tuple[list[Problem], Report]:
    """The distinct problems of one or more files, patterns or data sets of the hub (`rows.find`),
    in order of first appearance. Prompts are the same if all roles and contents are equal,
    character by character. One with two answers is dropped: nobody can tell which is wrong.

    on_bad: what to do about rows without a prompt or without an answer that `how` takes. 'refuse'
      reads everything, then raises; 'skip' leaves them out and names each in the report.
    ValueError: those rows; missing, empty, damaged or foreign files; no problem left over."""
    named = [paths] if isinstance(paths, str | Path) else paths
    if not named:
        raise ValueError("no problem file was named")
    paths = [path for name in named for path in rows.find(name)]
    problems, report = _gathered(paths, how)
    refused = f"{len(report.refused)} of {report.rows}"
    if report.refused and on_bad == "refuse":
        advice = "data.on_bad='skip' leaves them out"
        raise ValueError(f"{report.refused[0]} ({refused} rows are refused; {advice})")
    if not problems:
        conflicts = f"{len(report.conflicts)} prompts with conflicting answers"
        why = f"; the first: {report.refused[0]}" if report.refused else ""
        raise ValueError(f"{paths[0]}: no usable row: {refused} refused, {conflicts}{why}")
    return problems, report


def _gathered(paths: Sequence[Path], how: Reading) -> tuple[list[Problem], Report]:
    """The problems of all files, and what became of the rows. ValueError: a file without rows."""
    count = mapped = duplicates = 0
    refused: list[str] = []
    first: dict[prompts.Messages, Problem] = {}
    # The accepted answers of each prompt, with 'file row n' of the first row that has it.
    given: dict[prompts.Messages, dict[str, str]] = {}
    for path in paths:
        before = count
        every = rows.read(path, functools.partial(_wanted, how), _NEEDS)
        for number, row in bars.bar(every, desc=path.name, unit="row", **rows.BAR):
            count += 1
            try:
                raw, field, has_columns = _parse(row, how)
                mapped += has_columns
                duplicates += raw.messages in given
                answers = given.setdefault(raw.messages, {})
                answer = how.takes(raw.answer, field) if field else raw.answer
                rows.require_text(field, raw.answer, answer)
                rows.require_text("data_source", raw.source, raw.source)
            except BadRow as bad:
                refused.append(refusal(path, number, bad))
                continue
            if not answers:
                source = raw.source or path.name.split(".")[0]
                problem = raw._replace(id=ident(raw.messages), answer=answer, source=source)
                first[raw.messages] = problem
            answers.setdefault(answer, f"{path} row {number}")
        if count == before:
            raise ValueError(f"{path}: no rows in this file")
    several = (answers for answers in given.values() if len(answers) > 1)
    conflicts = tuple("; ".join(f"{a} at {row}" for a, row in found.items()) for found in several)
    report = Report(count, len(given), duplicates, conflicts, tuple(refused), mapped)
    return [first[m] for m, answers in given.items() if len(answers) == 1], report


def columns(listed: str) -> dict[str, str]:
    """'prompt=query,answer=final' as a mapping. ValueError: the text has another form."""
    pairs = [entry.partition("=") for entry in listed.split(",") if entry.strip()]
    out = {role.strip(): name.strip() for role, _, name in pairs}
    known = out.keys() <= {"prompt", "answer", "source"} and len(out) == len(pairs)
    signs = all(sign for _, sign, _ in pairs)
    parts = (name.split(".") for role, name in out.items() if name or role != "answer")
    if not (known and signs and all(map(all, parts))):
        form = "prompt=NAME,answer=NAME,source=NAME"
        raise ValueError(f"config.data.columns: {listed!r} is not of the form {form}")
    return out


def _wanted(how: Reading, names: list[str]) -> list[str]:
    """The columns of a parquet file that are read; none: it has no problems."""
    own = {n if n in names else n.partition(".")[0] for n in how.columns.values()} - {""}
    if not (own and own <= set(names)) and not any(set(s) <= set(names) for s in SCHEMAS):
        return []
    return names if how.whole else [n for n in names if n in _COLUMNS | own]


def decoded(row: rows.Row) -> dict:
    """The columns of a row as a dict. BadRow: the row is no object, or cannot be read."""
    if isinstance(row, bytes):
        try:
            row = rows.parse(row)
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


def _parse(row: rows.Row, how: Reading) -> tuple[Problem, str, bool]:
    """(the problem of a row, without id and with the answer as it stands; the answer's field, '' =
    the rows have none; whether it has the columns of `how`). BadRow: it has none of the forms."""
    row = decoded(row)
    names = how.columns
    # A row whose own answer is missing is refused; no other column is taken for it.
    mapped = bool(names) and all(
        n in row or n.partition(".")[0] in row if role != "prompt" else _at(row, n) is not None
        for role, n in names.items()
        if n
    )
    names = names if mapped else {}
    source = _at(row, names["source"]) if names.get("source") else None
    source = "" if source is None else str(source)
    if not source and isinstance(row.get("data_source"), str):
        source = row["data_source"]
    verl = row.get("prompt") is not None and row.get("reward_model") is not None
    asks = names.get("prompt") or ("prompt" if verl else first_given(row, PROMPTS))
    if not asks:
        raise BadRow("row", sorted(map(str, row)), _NEEDS)
    prompt = _at(row, asks)
    if verl and asks == "prompt":
        # Some processed copies keep the messages in source_prompt and the bare problem in prompt.
        prompt = row.get("source_prompt") or prompt
    messages = conversation(prompt, asks, how)
    rest = {k: v for k, v in row.items() if k not in (asks, "source_prompt")} if how.whole else {}
    field = names.get("answer", "reward_model.ground_truth" if verl else None)
    if field is None:
        field = first_given(row, _ANSWERS) or "answer"
    value = _at(row, field) if field else ""
    if field == "solution" and isinstance(value, str):
        boxed = last_boxed(value)
        if boxed is not None or asks != "prompt":  # TRL's solution may be the answer itself
            field, value = "solution \\boxed", boxed
    elif isinstance(value, str) and not verl:
        _, found, line = value.rpartition("####")
        value = line if found and "\n" not in line.strip() else value  # or it is Markdown's
    return Problem("", messages, value, source, rest, not isinstance(prompt, str)), field, mapped


def first_given(row: dict, names: Sequence[str]) -> str:
    """The first of `names` that has a value in the row; '' if none has."""
    return next((name for name in names if row.get(name) is not None), "")


def _at(row: dict, name: str) -> Any:
    """The value of column 'a', or of 'b' within 'a' for 'a.b'; None if there is none."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def conversation(value: object, field: str, how: Reading) -> prompts.Messages:
    """A prompt value's messages, in the template and system message of `how`. BadRow: no prompt."""
    try:
        if isinstance(value, str):
            messages, text = prompts.in_template(value, how.template), value
        else:
            messages = tuple((m["role"], m["content"]) for m in value)
            text = prompts.plain_text(messages)
        rows.require_text(field, value, "\n".join([text, *(role for role, _ in messages)]))
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


def encode(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    max_tokens: int,
    chat: bool,
    on_long: str = "filter",
    name: str = "",
) -> Encoded:
    """Prompts as token ids, each 1..max_tokens tokens long.

    chat: use the tokenizer's chat template; otherwise join the contents as plain text.
    on_long: 'filter' leaves longer prompts out; 'left_truncate' keeps their last max_tokens
      tokens, as verl's `truncation=left` does (the question survives, the template's start is cut).
    name: the set's name, for errors.
    ValueError: a prompt without tokens; no prompt that fits; no chat template."""
    ids, kept, n_long = [], [], 0
    tokens = tokenizer.chat if chat else lambda m: tokenizer.encode(prompts.plain_text(m))
    for problem in bars.bar(problems, desc="encoding prompts", **rows.BAR):
        row = tokens(problem.messages)
        if not row:
            raise ValueError(f"problem {problem.id}: the tokenizer makes no token of its prompt")
        n_long += len(row) > max_tokens
        if len(row) <= max_tokens or on_long == "left_truncate":
            ids.append(row[-max_tokens:])
            kept.append(problem)
    if problems and not kept:
        all_long = f"all {n_long} prompts are longer than {max_tokens} tokens"
        remedy = "raise data.max_prompt_tokens or set data.on_long='left_truncate'"
        raise ValueError(f"{name or problems[0].source}: {all_long}; {remedy}")
    return Encoded(ids, kept, n_long)


def read_set(
    name: str,
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    data,
    chat: bool,
    how: Reading,
    limit: int,
    needs_columns: bool,
) -> tuple[Encoded, str]:
    """One problem set of a run, and one line for the log that says what was left out.

    data: the section `config.data`. chat: encode through the tokenizer's chat template.
    limit: how many of the first problems to take; 0 = all. needs_columns: at least one row has to
      have the columns that `how` names. ValueError: as `read` and `encode`; no row has the columns.
    """
    found, report = read(files, data.on_bad, how)
    if how.columns and needs_columns and not report.mapped:
        raise ValueError(f"config.data.columns: no row of {files[0]} has all of these columns")
    longest = data.max_prompt_tokens
    out = encode(found[: limit or None], tokenizer, longest, chat, data.on_long, name)
    kind = "an integer answer" if how.takes is references.integer else "an answer"
    left_out = {
        "repeated prompts": report.duplicates,
        "prompts with conflicting answers dropped": len(report.conflicts),
        f"rows without {kind} skipped": len(report.refused),
        f"prompts over {longest} tokens ({data.on_long})": out.n_long,
        "problems beyond eval.max_problems": len(found[limit:]) * bool(limit),
    }
    return out, note(f"{name}: {len(out.problems)} problems of {report.rows} rows", left_out)


def note(kept: str, left_out: Mapping[str, int]) -> str:
    """One line for the log: what was kept, and the counts that are not 0 of what was not."""
    return ", ".join([kept, *(f"{count} {what}" for what, count in left_out.items() if count)])


class Stream:
    """An order of problems by position, with a cache: Grain takes milliseconds for a look-up."""

    def __init__(self, order):  # grain.MapDataset
        self._at = functools.lru_cache(1 << 16)(order.__getitem__)

    def __getitem__(self, position: int):
        return self._at(position)


def stream(problems: Sequence[Problem], seed: int) -> Stream:
    """Endless order of the problems, a new permutation each epoch, with random access.

    `stream(problems, seed)[i]` is a pure function of its arguments and i, so the state of the data
    is one integer: the next position. Position i lies in epoch i // len(problems). `problems` can
    be anything with a length and an index. ValueError: no problems."""
    import grain  # here, not above: Grain imports JAX, and reading files should not

    if not len(problems):
        raise ValueError("no problems to stream")
    # Grain shuffles epoch e by seed + e: unhashed, seed 1 would replay seed 0 one epoch later.
    digest = hashlib.sha256(f"problem order {seed}".encode()).digest()
    order = grain.MapDataset.source(problems).shuffle(int.from_bytes(digest[:4], "big"))
    return Stream(order.repeat())
