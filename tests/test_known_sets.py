"""Sets of the hub that docs/own_data.md names: rows with their columns become problems with their
own answers. The rows are made up."""

import re

import pytest
from pages import DOCS
from tables import write_rows

from dapo_jax.data import problems, prompts, published, references

TABLE = re.findall(
    r"^\| `([\w-]+/[^`@:]+)[^`]*` \| (.*) \|$", (DOCS / "own_data.md").read_text(), re.M
)
Q, FRACTION = "Find x.", "\\frac{1}{2}"
SOLUTION = {f"r1_solution_{i}": "So \\boxed{3}." for i in (1, 2, 3)}
SKYWORK = {
    "data_source": "train-math-deepscaler", "prompt": [{"content": Q, "role": "user"}],
    "ability": "math", "reward_model": {"ground_truth": '["\\\\frac{1}{2}"]', "style": "rule"},
    "extra_info": {"index": 0, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 4}},
}  # fmt: skip
ROWS = {
    "DeepMath-103K": ({"question": Q, "final_answer": FRACTION} | SOLUTION, FRACTION),
    "Skywork-OR1-RL-Data": (SKYWORK, FRACTION),
    "Polaris-Dataset-53K": ({"problem": Q, "answer": FRACTION, "difficulty": "1/8"}, FRACTION),
    "Big-Math-RL-Verified": (
        {"problem": Q, "answer": "033", "source": "a", "domain": ["a"], "llama8b_solve_rate": 0.4},
        "033",
    ),
    "BeyondAIME": ({"problem": Q, "answer": 7}, "7"),
    "hmmt_feb_2026": ({"problem_idx": 1, "problem": Q, "answer": "$x$"}, "$x$"),
}  # fmt: skip


def test_the_page_names_them():
    assert [name.split("/")[1] for name, _ in TABLE] == list(ROWS)


@pytest.mark.parametrize(("name", "advice"), TABLE, ids=lambda x: x.split("/")[-1][:20])
def test_rows_are_problems_with_their_own_answers(name, advice, tmp_path):
    """By what the page sets beside the name, in both kinds of files that the hub has."""
    row, answer = ROWS[name.split("/")[1]]
    listed = re.search(r"`data\.columns=([^`]+)`", advice)
    template = "boxed" if "data.template=boxed" in advice else ""
    how = problems.Reading(
        references.any_answer,
        problems.columns(listed[1] if listed else ""),
        prompts.template(template),
    )
    for kind in ("a.jsonl", "a.parquet"):
        (found,), report = problems.read(write_rows(tmp_path / kind, [row]), how=how)
        assert (found.answer, report.refused, report.conflicts) == (answer, (), ())
        asked = prompts.in_template(Q, how.template) if template else (("user", Q),)
        assert found.messages == asked


def test_sets_that_bring_the_words_of_a_template_are_asked_as_they_are():
    words = prompts.TEMPLATES["boxed"]
    for name in ("aime26", "hmmt25"):
        pinned, protocol = published.evaluated(name)
        assert protocol.template == "plain" and "data.template=plain" in pinned.note
        said = prompts.in_template(words.replace("{problem}", Q), prompts.TEMPLATES["plain"])
        assert said == prompts.in_template(Q, words)
