"""Settings of text and problems."""
# fmt: off

from dataclasses import dataclass

from dapo_jax.gate import ROWS, TOKENS, Section, setting


@dataclass
class Tokenizer(Section, place="tokenizer"):
    """Tokenizer and chat template."""

    path: str = setting("", "directory or file: tokenizer.json or SentencePiece .model; '' = model.path, else the embedded task's", path=True)
    chat: bool = setting(False, "render prompts through the chat template (False: message contents as they are)")
    chat_template: str = setting("", "Jinja file; '' = the tokenizer's own", path=True)


@dataclass
class Data(Section, place="data"):
    """Training problems and their prompts."""

    train: str = setting("", "problem files, comma-separated: parquet, jsonl, json, csv, patterns (data/*.jsonl), data sets of the hub (openai/gsm8k:main/train-*), or environments (verifiers:ID, tinker:MODULE:NAME); '' = the embedded arithmetic task", path=True)
    on_bad: str = setting("refuse", "a row without an answer that the reward accepts: stop and name it, or skip and count", choices=("refuse", "skip"))
    columns: str = setting("", "names of the rows' own columns, as prompt=query,answer=final,source=kind (a.b: b within a; answer= for none); '' = those of verl, TRL, GSM8K and MATH")
    template: str = setting("", "text with {problem} around each problem, or dapo, boxed, think, plain; '' = chats as they are, texts in the paper's prompt")
    system: str = setting("", "system message before each prompt, replacing the row's; '' = the row's, if any")
    on_long: str = setting("filter", "a prompt over max_prompt_tokens: leave the problem out, or cut the prompt's beginning (verl)", choices=("filter", "left_truncate"))
    max_prompt_tokens: int = setting(32, "longest prompt (paper: 2048)", 1, TOKENS)
    embedded_problems: int = setting(4096, "training problems of the embedded task", 1, ROWS)
