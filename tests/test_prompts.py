"""The DAPO prompt, against the released AIME-2024 file."""

import os

import pyarrow.parquet as pq
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
    assert content == prompts.DAPO_TEMPLATE.format(problem="What is $6 \\times 7$?")


@given(st.text())
def test_raw_problem_inverts_in_template(problem):
    assert prompts.raw_problem(prompts.in_template(problem)) == problem


def test_other_messages_are_left_alone():
    assert prompts.raw_problem((("user", "f 4 ; g + 2 ?"),)) == "f 4 ; g + 2 ?"
    assert prompts.raw_problem((("system", "Be brief."), ("user", "1+1?"))) == "Be brief.\n1+1?"
    before, after = prompts.DAPO_TEMPLATE.split("{problem}")
    halves = before[:-2] + after  # both ends match, but they share the blank line
    assert prompts.raw_problem((("user", halves),)) == halves


def test_aime_prompts():
    assets = os.environ.get("DAPO_JAX_ASSETS")
    if not assets:
        pytest.skip("DAPO_JAX_ASSETS is not set: no AIME-2024 file")
    table = pq.read_table(f"{assets}/math/dapo_aime-2024_original.parquet").to_pylist()
    assert len(table) == 960
    for row in table:
        messages = tuple((m["role"], m["content"]) for m in row["prompt"])
        raw = row["extra_info"]["raw_problem"]
        assert prompts.raw_problem(messages) == raw
        assert prompts.in_template(raw) == messages
