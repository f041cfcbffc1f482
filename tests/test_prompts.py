"""Prompt templates; good_rows.jsonl has the paper's, word for word."""

import pytest
from hypothesis import given, strategies as st

from dapo_jax.data import prompts


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
