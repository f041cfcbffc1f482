"""Prompt templates, including that of the DAPO paper, and the way back to the bare problem."""

from dapo_jax.gate import visible  # noqa: F401

Messages = tuple[tuple[str, str], ...]  # ((role, content), ...): immutable, so it can be a key

# Word for word as in DAPO-Math-17k and in the AIME-2024 file of the DAPO authors.
DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_BEFORE, _AFTER = DAPO_TEMPLATE.split("{problem}")
TEMPLATES = {
    "dapo": DAPO_TEMPLATE,
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "think": "{problem}\n\nReason between <think> and </think>, and then write the final answer,"
    " and nothing else, between <answer> and </answer>.",
    "plain": "{problem}",
}


def template(named: str) -> str:
    """The template with this name in TEMPLATES; a text with {problem}, or '', is returned
    unchanged. ValueError: neither a name nor a text with {problem}."""
    if named and named not in TEMPLATES and "{problem}" not in named:
        wrong = f"{named!r:.80} is none of {', '.join(TEMPLATES)} and has no {{problem}}"
        raise ValueError(f"config.data.template: {wrong}")
    return TEMPLATES.get(named, named)


def in_template(problem: str, template: str = "") -> Messages:
    """The problem as one user message. The model's chat template may add a system message."""
    return (("user", (template or DAPO_TEMPLATE).replace("{problem}", problem)),)


def plain_text(messages: Messages) -> str:
    """The contents joined without roles: the prompt of a model without a chat format."""
    return "\n".join(content for _, content in messages)


def raw_problem(messages: Messages) -> str:
    """The problem inside the paper's prompt; for other messages their plain text."""
    text = plain_text(messages)
    rest = text.removeprefix(_BEFORE)
    if len(messages) == 1 and rest != text and rest.endswith(_AFTER):
        return rest.removesuffix(_AFTER)
    return text
