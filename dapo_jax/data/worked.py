"""Worked examples: prompts with the responses that a model learns to imitate (run/warmup.py).

`rows.py` lists the kinds of files; a row is one of
    {question | problem | prompt, response | completion}   each a text or a chat
    {messages: [{role, content}, ...]}                     the last, the assistant's, is imitated
Prompts are built as for reinforcement learning (`problems.conversation`).
"""

from collections.abc import Sequence
from typing import Any

from dapo_jax import bars
from dapo_jax.data import problems, prompts, rows
from dapo_jax.data.rows import BadRow
from dapo_jax.data.settings import Data
from dapo_jax.data.tokenizer import Tokenizer

_RESPONSES = ("response", "completion")
_NEEDS = "needs messages, or a prompt (question, problem) and a response (completion)"

Pair = tuple[list[int], list[int]]  # token ids of a prompt, and of its response with its stop token


def read(
    files: str, tokenizer: Tokenizer, chat: bool, data: Data, most: int, how: problems.Reading
) -> tuple[list[Pair], str]:
    """(the examples of all files in their order, one line that says what was left out).

    chat: prompts go through the tokenizer's chat template, and responses end as the template ends
      one. data: which rows are used, as for reinforcement learning.
    most: longest response in TOKENS, with its stop token (rollout.max_response_tokens).
    ValueError: a row is refused (the error names file and row); no row is left."""
    end = ending(tokenizer, chat)
    encode = tokenizer.chat if chat else lambda m: tokenizer.encode(prompts.plain_text(m))
    pairs, count, long, refused = [], 0, 0, []
    for path in (p for name in files.split(",") if name.strip() for p in rows.find(name.strip())):
        found = rows.read(path, _wanted, _NEEDS)
        for number, row in bars.bar(found, desc=f"encoding {path.name}", **rows.BAR):
            count += 1
            try:
                messages, text = example(problems.decoded(row), how)
                prompt, response = encode(messages), [*tokenizer.encode(text), end]
                if not prompt or len(response) == 1:
                    raise BadRow("row", text, "the tokenizer makes no token of it")
                if len(response) > most:
                    over = f"tokens with its end, over rollout.max_response_tokens = {most}"
                    raise BadRow("response", text, f"has {len(response)} {over}")
            except BadRow as bad:
                refused.append(problems.refusal(path, number, bad))
                if data.on_bad == "skip":
                    continue
                raise ValueError(f"{refused[0]} (data.on_bad='skip' leaves such rows out)") from bad
            if len(prompt) > data.max_prompt_tokens:
                long += 1
                if data.on_long == "filter":
                    continue
            pairs.append((prompt[-data.max_prompt_tokens :], response))
    if not pairs:
        why = f"; the first: {refused[0]}" if refused else ""
        over = f"{long} prompts longer than data.max_prompt_tokens = {data.max_prompt_tokens}{why}"
        bad = f"{len(refused)} of {count} rows refused, {over}"
        raise ValueError(f"{files}: no usable row for the warm-up: {bad}")
    left_out = {
        "without a response that fits skipped": len(refused),
        f"prompts over {data.max_prompt_tokens} tokens ({data.on_long})": long,
    }
    return pairs, problems.note(f"warm-up: {len(pairs)} of {count} rows", left_out)


def ending(tokenizer: Tokenizer, chat: bool) -> int:
    """The token that ends a response: the one after an assistant's message in the chat template;
    without a template, the stop token with the smallest id."""
    after = ""
    if chat:
        turn = (("user", "Question."), ("assistant", "Reply."))
        after = tokenizer.render_chat(turn).rpartition("Reply.")[2]
    ends = (i for i in tokenizer.encode(after) if i in tokenizer.stop_ids)
    return next(ends, min(tokenizer.stop_ids))


def example(row: dict[str, Any], how: problems.Reading) -> tuple[prompts.Messages, str]:
    """(the prompt's messages, the response) of one row. BadRow: one of them is missing."""
    if row.get("messages") is not None:
        chat = row["messages"]
        if not isinstance(chat, Sequence) or isinstance(chat, str) or len(chat) < 2:
            raise BadRow("messages", chat, "expected a prompt and the assistant's response to it")
        return problems.conversation(chat[:-1], "messages", how), _reply(chat[-1:], "messages")
    asks, answers = (problems.first_given(row, names) for names in (problems.PROMPTS, _RESPONSES))
    if not asks or not answers:
        raise BadRow("row", sorted(map(str, row)), _NEEDS)
    return problems.conversation(row[asks], asks, how), _reply(row[answers], answers)


def _reply(value: Any, field: str) -> str:
    """The text of a response, given as a text or as a chat of one message."""
    text = value
    if not isinstance(value, str):
        ((role, text),) = problems.conversation(value, field, problems.Reading())[:1]
        if role != "assistant" or len(value) > 1:
            raise BadRow(field, value, "expected one message of the assistant")
    if not text.strip():
        raise BadRow(field, value, "missing or empty")
    rows.require_text(field, value, text)
    return text


def _wanted(names: list[str]) -> list[str]:
    """The columns of a parquet file that are read; none: it has no examples."""
    pair = any(n in names for n in problems.PROMPTS) and any(n in names for n in _RESPONSES)
    known = ("messages", *problems.PROMPTS, *_RESPONSES) if pair or "messages" in names else ()
    return [n for n in names if n in known]
