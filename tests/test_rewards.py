"""What `config.reward` names; functions that fail or take too long, here and in workers."""

import json
import os
import pathlib
import pickle
import re
import time
import types
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from ports import wait_until
from tables import cases
from test_alarm_command import running

from dapo_jax import config
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import answers, references
from dapo_jax.data.problems import Problem
from dapo_jax.log import guards
from dapo_jax.reward import functions as rewards, grading
from dapo_jax.reward.functions import Grade
from dapo_jax.reward.settings import Reward


def problem(answer="42", source="sums", prompt="6 * 7 ?", number=0, **row) -> Problem:
    return Problem(f"{number:016x}", (("user", prompt),), answer, source, row)


def rewarded(**fields) -> Reward:
    settings = Reward()
    settings.update(fields)
    return settings


def score(response: str, about: Problem | None = None, **fields) -> Grade:
    judge = grading.judge(rewarded(**fields))
    return rewards.graded(judge.score, about or problem(), response)


@pytest.mark.parametrize(
    "case", cases("answer_cases"), ids=lambda c: f"{c['mode']} {c['response']}"
)
def test_cases(case):
    mode, said, answer, right = (case[k] for k in ("mode", "response", "answer", "right"))
    if mode == "format":
        assert score(said, function="format") == Grade(float(right))
        return
    if mode == "math":
        pytest.importorskip("math_verify", reason="needs math-verify (requirements-peers.txt)")
    verdict = answers.verify(said, answer, mode)
    assert verdict.correct == right and verdict.extracted == case.get("extracted", verdict[1])


def test_numbers_of_any_length_and_tags_of_ones_own():
    assert answers.verify("\\boxed{" + "9" * 5000 + "}", "9" * 5000, "boxed").correct
    assert score("<x>1</x>", function="format", format_tags="x") == Grade(1.0)


@pytest.mark.parametrize("case", cases("auto_cases"), ids=lambda case: f"{case['mode']}")
def test_auto_goes_by_the_prompt_and_then_by_the_source(case):
    p, mode = problem(**case["problem"]), case["mode"]
    assert answers.chosen(p.answer, p.messages[0][1], p.source) == mode
    for text in ("\\boxed{42}", "Answer: 42", "<answer>42</answer>", "#### 42"):
        right = answers.verify(text, p.answer, mode).correct
        assert score(text, p, verifier="auto").right == right


def test_math_wants_a_worker(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(ValueError, match="set reward.workers=1 or more"):
        grading.judge(rewarded(verifier="math"))


@pytest.mark.parametrize("mode", [mode for mode in answers.MODES if mode != "math"])
def test_reference_answers_are_integers_only_where_the_verifiers_need_them(mode):
    wanted = references.integer if mode in ("dapo", "integer") else references.any_answer
    assert grading.judge(rewarded(verifier=mode)).takes is wanted
    mixed = grading.judge(rewarded(verifier=mode, by_source="x=boxed"))
    assert mixed.takes is references.any_answer


OWN = """
from dapo_jax.reward.functions import Grade

def brief(problem, response):
    return 1 / (1 + len(response))

def tests(problem, response):
    passed = [eval(response, {}, {"x": x}) == y for x, y in problem.row["tests"]]
    return Grade(sum(passed) / len(passed), parts={"passed": sum(passed)})
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_weighted_sum_logs_each_by_name(own):
    got = score(
        "x + 1",
        problem(tests=[[1, 2], [2, 3], [3, 3]]),
        function=f"boxed, short=0.5*{own}:brief, 2*{own}:tests",
    )
    assert got.score == pytest.approx(-1.0 + 0.5 / 6 + 2 * 2 / 3)
    assert got.right is False and got.answer is None
    assert got.parts == {"boxed": -1.0, "short": 1 / 6, "tests": 2 / 3, "tests.passed": 2}
    assert score("x + 1", function=f"3*{own}:brief").score == pytest.approx(3 / 6)


def test_another_reward_for_some_sources(own):
    fields = dict(by_source=f"gsm8k*=integer;code={own}:tests,0.1*format")
    assert score("Answer: 42.", **fields).right is False
    assert score("Answer: 42.", problem(source="gsm8k/test"), **fields).right is True
    code = score("x", problem(source="code", tests=[[1, 1]]), **fields)
    assert code.right is None and code.parts == {"tests": 1, "tests.passed": 1, "format": 0}


def test_the_files_of_all_functions_are_known_to_resume(own, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(OWN)
    source = lambda **fields: grading.judge(rewarded(**fields)).source
    one = source(function=f"{own}:brief")
    assert re.fullmatch("[0-9a-f]{64}", one) and one == source(function=f"boxed,2*{own}:tests")
    two = source(function=f"{own}:brief", by_source=f"x={other}:brief")
    other.write_text(OWN + "# changed")
    assert len({one, two, source(function=f"{own}:brief", by_source=f"x={other}:brief")}) == 3
    assert source() == source(verifier="boxed") == ""


@pytest.mark.parametrize("case", cases("reward_refused"), ids=lambda case: case["wrong"])
def test_a_wrong_reward_is_one_line(case, own, tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(case["wrong"])) as error:
        grading.judge(rewarded(**case["fields"]))
    assert str(error.value).startswith("config.reward") and "\n" not in str(error.value)


# What may not stand in a field of a grade.
NO_NUMBER = ["1", None, [1], {}, np.nan, -np.inf, 1j, 10**400, np.eye(2)]
BAD = {
    "score": NO_NUMBER,
    "right": ["no", 0, 1, 1.0, [], "True"],
    "answer": ["\udcff", b"a", 7, np.int64(7), ["a"], 0.5, False, {}],
    "parts": [None, [1], 7, "a", {1: 1.0}, {None: 1.0}, *({"n": x} for x in NO_NUMBER)],
}


@pytest.mark.parametrize("field", BAD)
def test_what_a_reward_may_not_return(field):
    for value in BAD[field]:

        def mine(problem, response):
            return Grade(**{"score": 1.0, field: value})  # noqa: B023

        said = rewards.attempt(mine, problem(), "r")
        assert said.why.startswith("reward: mine gave Grade(score=") and "\n" not in said.why
        assert f"problem {0:016x}; it has to be a Grade with a finite score" in said.why


@pytest.mark.parametrize("number", [-3, 0.25, True, np.float32(0.5), np.int64(7)])
@pytest.mark.parametrize("right", [None, False, np.bool_(True)])
def test_a_grade_becomes_plain_values_which_json_and_a_pipe_can_carry(number, right):
    given = Grade(number, right, "é", {"n": number})
    said = rewards.checked(given)
    assert given == said == Grade(**json.loads(json.dumps(said._asdict())))
    assert pickle.loads(pickle.dumps(said)) == said
    assert type(said.score) is type(said.parts["n"]) is float
    assert said.right is None or type(said.right) is bool


@pytest.mark.parametrize(
    ("given", "grade"),
    [(True, Grade(1.0, True)), (np.bool_(False), Grade(0.0, False)), (np.float32(0.5), Grade(0.5)),
     (3, Grade(3.0)), (None, None), ("1", None), ((1.0, True), None), (np.inf, None)],
)  # fmt: skip
def test_a_bool_is_right_or_wrong_and_a_number_a_score(given, grade):
    assert rewards.checked(given) == grade


FAILING = pathlib.Path(__file__).with_name("data").joinpath("failing_reward.txt").read_text()
# A token is a character.
TOKENS = types.SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
codes = lambda text: np.array([ord(c) for c in text])
response = lambda text: types.SimpleNamespace(last_turn=codes(text), grade=None)


def grades(judge, *texts_of_groups):
    groups = [Group(i, [1], list(map(response, ts))) for i, ts in enumerate(texts_of_groups)]
    asked = [problem(number=i) for i in range(len(groups))]
    return [g.grades for g in grading.grade_groups(TOKENS, judge, groups, asked)]


@given(st.integers(0, 70), st.integers(1, 9))
def test_processes_share_out_all_groups_in_order(n, processes):
    shares = [grading._share(n, p, processes) for p in range(processes)]
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture
def failing(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    return f"{tmp_path}/failing.py:score"


def test_a_failure_is_an_error_that_names_the_row_or_a_counted_miss(failing):
    stop = grading.judge(rewarded(function=failing))
    with pytest.raises(ValueError) as error:
        grades(stop, ["right"], ["right", "raise"])
    assert str(error.value) == (
        "reward: failed on a response to problem 0000000000000001 of sums: ZeroDivisionError:"
        " division by zero (failing.py line 19)"
        " (config.reward.on_error='miss' counts such responses)"
    )
    with pytest.raises(ValueError, match="score gave nan for a response to problem"):
        grades(stop, ["nan"])
    miss = grading.judge(rewarded(function=failing, on_error="miss", wrong=-3.0))
    first, second = grades(miss, ["right", "raise"], ["nan", "raise"])
    assert first.score_G.tolist() == [5 / 7, -3] and first.right_G.tolist() == [True, False]
    assert first.answers == ["right", None] and first.parts_G["n"][0] == 5
    assert (first.missed, second.missed) == (1, 2) and second.right_G.tolist() == [False, False]
    told = grading._from_plain(json.loads(json.dumps(grading._plain(first))))  # to other processes
    np.testing.assert_equal(told._asdict(), first._asdict())


class Unspeakable(BaseException):
    def __str__(self):
        raise SystemExit(3)


@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, MemoryError, Unspeakable, OSError])
def test_whatever_a_reward_raises_is_one_line(kind, capfd):
    def score(problem, response):
        raise kind(f"{response} of two\nlines")

    for text in "abcdefgh":  # as many causes, where the text shows
        failed = rewards.attempt(score, problem(), text)
        assert "\n" not in failed.why and failed.why.endswith(failed.cause)
    miss = grading.judge(rewarded(on_error="miss"))._replace(score=score)
    (found,) = grades(miss, "abcdefgh")
    assert found.missed == 8
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == (1 if kind in (MemoryError, Unspeakable) else 5)  # without their text
    assert all(line.startswith("warning: reward: failed on a resp") for line in printed)

    with pytest.raises(KeyboardInterrupt):
        rewards.attempt(Mock(side_effect=KeyboardInterrupt), problem(), "")


def test_a_reward_that_prints_fills_no_log(capfd, monkeypatch):
    monkeypatch.setattr(rewards._Output, "left", 3)

    def score(problem, response):
        print(response, flush=True)
        return 1.0

    for text in "abcde":
        assert rewards.attempt(score, problem(), text) == Grade(1.0)
    assert capfd.readouterr().out == (
        "a\nb\nc\nwarning: reward: what else it prints is left out; use a file\n"
    )


@pytest.mark.slow
def test_ten_slow_or_failing_at_once_hang_nothing(failing):
    """And the others get the grades that one process gives them."""
    texts = ["a", "slow", "bb", "die", "stuck", "raise", "slow", "ccc", "die", "right", "nan"]
    texts += ["die", "raise", "dddd", "raise", "right"]
    fields = dict(function=failing, on_error="miss", workers=2, timeout_s=2.0)  # three hang
    judge, began = grading.judge(rewarded(**fields)), time.monotonic()
    (found,) = grades(judge, texts)
    assert time.monotonic() - began < 300 and found.missed == 10
    (again,) = grades(judge, ["right"] * 3)  # workers live on
    assert again.missed == 0
    good = ["a", "bb", "ccc", "right", "dddd", "right"]
    (here,) = grades(grading.judge(rewarded(function=failing)), good)
    assert here.answers == good == [text for text in found.answers if text]
    assert here.score_G.tolist() == [score for score in found.score_G if score > 0]
    children = pathlib.Path(failing.replace(":score", ".children")).read_text().split()
    assert len(children) == 2
    wait_until(lambda: not any(running(int(pid)) for pid in children))  # killed is not buried


def test_workers_judge_side_by_side_what_waits(failing):
    """Each of four waits for the other three; and the same grades in one process."""
    texts, found = ["meet" + "a" * i for i in range(8)], []
    for workers in (4, 1):
        judge = grading.judge(rewarded(function=failing, workers=workers, timeout_s=300.0))
        grades(judge, ["a"] * 3)
        assert len(judge.pool._workers) == min(3, workers)  # no more than what waits
        (got,) = grades(judge, texts)
        found.append(got.score_G.tobytes())
        for worker in judge.pool._workers:
            worker.due = 0.0  # idle for longer than a limit
        grades(judge, ["a"])
        assert len(judge.pool._workers) == workers
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slow", "took more than 2 s"),
        ("die", "ended its process"),
        ("leave", "SystemExit: os._exit(0) (failing.py line 23)"),
        ("become", "SystemExit: os.execv(/bin/true) (failing.py line 25)"),
        ("spill", "wrote to the descriptor on which grades are sent"),
        ("raise", "ZeroDivisionError: division by zero (failing.py line 19)"),
    ],
)
def test_an_error_in_a_worker_names_the_row(text, why, failing):
    judge = grading.judge(rewarded(function=failing, workers=1, timeout_s=2.0))
    with pytest.raises(ValueError) as error:
        grades(judge, ["right", text])
    failed = f"reward: failed on a response to problem {0:016x} of sums: "
    assert str(error.value).startswith(failed + why)


def test_a_worker_that_ended_while_idle_costs_no_response(failing):
    judge = grading.judge(rewarded(function=failing, workers=1))
    grades(judge, ["right"])
    (worker,) = judge.pool._workers
    worker._process.kill()
    worker._process.wait()
    assert grades(judge, ["right"])[0].right_G.tolist() == [True]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_forks_grades_once(workers, failing):
    judge = grading.judge(rewarded(function=failing, workers=workers))
    (found,) = grades(judge, ["fork"] * 4 + ["right"])
    assert found.score_G.tolist() == [4 / 7] * 4 + [5 / 7]


def test_a_worker_that_cannot_start_says_why(failing):
    judge = grading.judge(rewarded(function=failing, workers=2))
    os.unlink(failing.rpartition(":")[0])
    with pytest.raises(ValueError, match=r"config\.reward\.function: .*failing.py: no such file"):
        grades(judge, ["right"])


def test_problems_do_not_mix_right_and_wrong_with_scores(own):
    judge = grading.judge(rewarded(by_source=f"sums={own}:brief"))
    assert [g.right_G for g in grades(judge, ["a"], ["b"])] == [None, None]
    judge = judge._replace(score=lambda p, r: Grade(1.0, True if int(p.id, 16) else None))
    with pytest.raises(ValueError, match="say right or wrong and those of others do not"):
        grades(judge, ["a"], ["b"])


def test_a_hint_where_another_verifier_finds_what_ours_calls_wrong():
    c = config.base()
    judge = grading.judge(c.reward)
    (found,) = grades(judge, ["so \\boxed{42}", "Answer: 42", "Answer: 41", "\\boxed{42}."])
    gain = found.shadow_G.mean() - found.right_G.mean()
    assert gain == 0.5
    said = guards.hint(c, {"sampling/shadow_gain": gain})
    assert said.startswith("verifier 'dapo' calls 50% of the responses wrong in which 'integer'")
    assert guards.hint(c, {"sampling/shadow_gain": 0.01}) == guards.hint(c, {}) == ""
