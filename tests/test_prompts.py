"""The DAPO prompt; test_published_answers.py compares it with the released AIME-2024 file."""

import pytest
from hypothesis import given, strategies as st

from dapo_jax.data import prompts


def test_template_is_word_for_word():
    ((role, content),) = prompts.in_template("What is $6 \\times 7$?")
    assert role == "user"
    assert content == (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        "\n\nWhat is $6 \\times 7$?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )


@given(st.text())
def test_raw_problem_inverts_in_template(problem):
    assert prompts.raw_problem(prompts.in_template(problem)) == problem


def test_other_messages_are_left_alone():
    assert prompts.raw_problem((("system", "Be brief."), ("user", "1+1?"))) == "Be brief.\n1+1?"
    before, after = prompts.DAPO_TEMPLATE.split("{problem}")
    for text in ("f 4 ; g + 2 ?", before[:-2] + after, before, after):  # the 2nd's halves overlap
        assert prompts.raw_problem((("user", text),)) == text
    both = (*prompts.in_template("q"), *prompts.in_template("r"))
    assert prompts.raw_problem(both) == prompts.plain_text(both)


def test_templates_have_names():
    assert all("{problem}" in prompts.template(n) for n in prompts.TEMPLATES)
    with pytest.raises(ValueError, match=r"config\.data\.template: 'boxd' is none of dapo, boxed"):
        prompts.template("boxd")
