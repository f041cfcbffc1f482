"""Before a run: which gold answers its reward takes."""

from types import SimpleNamespace

import pytest

from dapo_jax import config
from dapo_jax.data.problems import Problem
from dapo_jax.lab import before
from dapo_jax.reward import grading
from dapo_jax.reward.grading import Grade

ASKED = [Problem(f"p{i}", (("user", "1 + 1 ?"),), a, "s") for i, a in enumerate(("3", "4", "15"))]
EVEN = """from dapo_jax.reward.grading import Grade
def even(problem, response):
    return Grade(1.0, response.endswith(problem.answer) and int(problem.answer) % 2 == 0)
def always(problem, response): return True
def length(problem, response): return len(response) / 10
def fails(problem, response): return 1 / (int(problem.answer) - 4)
"""


def judged(**fields):
    c = config.base()
    c.reward.update(fields)
    return before.gold(grading.judge(c.reward), ASKED)


@pytest.mark.parametrize(
    ("fields", "right", "failed", "others"),
    [
        ({"verifier": "dapo"}, {"Answer: {}": 3}, [], 0),
        ({"verifier": "boxed"}, {"\\boxed{{{}}}": 3}, [], 0),
        ({"function": "judge.py:even"}, {"Answer: {}": 1}, ["p0", "p2"], 0),
        ({"function": "judge.py:always"}, {"Answer: {}": 3}, [], 3),
        ({"function": "judge.py:length"}, {"Answer: {}": 3}, [], 3),  # more than nothing at all
        ({"function": "judge.py:fails"}, {}, ["p0", "p1", "p2"], 0),
        ({"function": "format"}, {before.FORMS[3]: 3}, [], 3),
    ],
)
def test_gold_answers_by_the_reward(fields, right, failed, others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(EVEN)
    found = judged(**fields)
    assert {form: n for form, n in found.right.items() if n} == right
    assert [p.id for p, _ in found.failed] == failed and found.others == others
    assert found.asked == 3  # each with the next one's answer


def test_why_a_gold_answer_fails_is_said():
    score = lambda problem, response: Grade(-1.0, False, response[-1:])
    found = before.gold(grading.judge(config.base().reward, score), ASKED)
    assert found.usual == "Answer: {}" and found.failed[0][1] == "score -1, read as '3'"
    assert found.scores == {"gold": -1.0, "others": -1.0}


@pytest.mark.parametrize(("enabled", "tokens"), [(True, "1,280"), (False, "320")])
def test_a_step_draws_more_where_the_filter_goes_on(enabled, tokens):
    """One of four groups teaches, and responses have ten tokens."""
    c = config.base()
    c.dynamic_sampling.enabled, c.rollout.groups, c.rollout.group_size = enabled, 8, 4
    train = SimpleNamespace(ids=[[1]], n_long=0, problems=ASKED[:1])
    text = SimpleNamespace(
        train=train, notes=[], tokenizer=SimpleNamespace(decode=lambda *_, **k: "")
    )
    probe = {"groups": 4, "teach": 1, "teach_low": 0, "teach_high": 1, "response/length_mean": 10}
    said = "\n".join(before.report(c, text, before.Gold({}, [], 0, 0, {}), probe))
    assert f"a step of 8 groups would draw about {tokens} tokens" in said
