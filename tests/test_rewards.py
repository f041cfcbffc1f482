"""What `config.reward` names: verifiers, sums with weights, one per data source, format, auto; and
functions that fail or take too long, in this process and in workers."""

import os
import pathlib
import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import answers, references
from dapo_jax.data.problems import Problem
from dapo_jax.log import guards
from dapo_jax.reward import functions as rewards, grading
from dapo_jax.reward.functions import Grade


def problem(answer="42", source="sums", prompt="6 * 7 ?", number=0, **row) -> Problem:
    return Problem(f"{number:016x}", (("user", prompt),), answer, source, row)


def rewarded(**fields) -> config.base:
    c = config.base()
    c.reward.update(fields)
    return c


def score(response: str, about: Problem | None = None, **fields) -> Grade:
    judge = grading.judge(rewarded(**fields))
    return rewards.graded(judge.score, about or problem(), response)


# ------------------------------------------------------------------------------------------------
# Shipped
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("\\boxed{42}", "42", True),
        ("\\boxed{41}, no: \\boxed{42}", "42", True),
        ("\\boxed{42}, no: \\boxed{41}", "42", False),
        ("Answer: 42", "42", False),
        ("\\boxed{42", "42", False),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac12", True),
        ("\\boxed{1/2}", "\\frac{1}{2}", True),
        ("\\boxed{1{,}234}", "1234", True),
        ("\\boxed{0.50}", ".5", True),
        ("\\boxed{-7.0}", "-7", True),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", True),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})", True),
        ("\\boxed{2\\sqrt3}", "2\\sqrt{3}", True),
        ("\\boxed{2\\sqrt{3}}", "2\\sqrt{2}", False),
        ("\\boxed{12}", "1,2", False),
        ("\\boxed{x=5}", "5", True),
        ("\\boxed{" + "9" * 5000 + "}", "9" * 5000, True),
    ],
)
def test_boxed(said, answer, right):
    assert answers.verify(said, answer, "boxed").correct == right


@pytest.mark.parametrize(
    ("said", "stated"),
    [
        ("<think>4</think><answer> a b </answer>", "a b"),
        ("so \\boxed{x^{2}} it is", "x^{2}"),
        ("Answer: 1\nANSWER: two words \n", "two words"),
        ("reasons\nParis\n", "Paris"),
        ("", ""),
    ],
)
def test_exact(said, stated):
    assert answers.stated(said) == stated
    verdict = answers.verify(said, "a b", "exact")
    assert verdict == (stated == "a b", stated or None)


@pytest.mark.parametrize(
    ("about", "mode"),
    [
        (dict(prompt="... put your final answer within \\boxed{}."), "boxed"),
        (dict(prompt='... on its own line after "Answer:".'), "dapo"),
        (dict(prompt="between <answer> and </answer>"), "exact"),
        (dict(prompt="end with #### and the number"), "integer"),
        (dict(source="openai/gsm8k"), "integer"),
        (dict(source="math_dapo"), "dapo"),
        (dict(source="HuggingFaceH4/MATH-500"), "boxed"),
        (dict(source="mine"), "integer"),
        (dict(source="mine", answer="\\frac12"), "boxed"),
    ],
)
def test_auto_goes_by_the_prompt_and_then_by_the_source(about, mode):
    p = problem(**about)
    assert answers.chosen(p.answer, p.messages[0][1], p.source) == mode
    for text in ("\\boxed{42}", "Answer: 42", "<answer>42</answer>", "#### 42"):
        right = answers.verify(text, p.answer, mode).correct
        assert score(text, p, verifier="auto").right == right


def test_math_is_equivalence_or_one_line_that_says_what_to_install():
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install 'dapo_jax\[math\]'"):
            grading.judge(rewarded(verifier="math", workers=1))
        return
    for said, answer, right in (
        ("so it is \\boxed{\\frac{2}{4}}", "0.5", True),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", True),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", True),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", True),
        ("\\boxed{7}", "8", False),
        ("no idea", "8", False),
    ):
        assert answers.verify(said, answer, "math").correct == right, said
    with pytest.raises(ValueError, match="set reward.workers=1 or more"):
        grading.judge(rewarded(verifier="math"))


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\nb</think>\n\n<answer>b</answer>\n", 1),
        ("<think>a</think>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a<think>b</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format(said, value):
    assert score(said, function="format") == Grade(value)
    assert score("<x>1</x>", function="format", format_tags="x") == Grade(1.0)


@pytest.mark.parametrize("mode", [mode for mode in answers.MODES if mode != "math"])
def test_reference_answers_are_integers_only_where_the_verifiers_need_them(mode):
    wanted = references.integer if mode in ("dapo", "integer") else references.any_answer
    assert grading.judge(rewarded(verifier=mode)).takes is wanted
    mixed = grading.judge(rewarded(verifier=mode, by_source="x=boxed"))
    assert mixed.takes is references.any_answer


# ------------------------------------------------------------------------------------------------
# Several, and per source
# ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (dict(function="boxed,boxed"), "the name 'boxed' is used twice; write name=..."),
        (dict(function="boxd"), "'boxd' is not of the form FILE.py:NAME, and none of dapo,"),
        (dict(function="1e*boxed"), "'1e' is no weight"),
        (dict(by_source="boxed"), "'boxed' is not of the form SOURCE=REWARD"),
        (dict(by_source="x=no.py:f"), "config.reward.by_source: no.py: no such file"),
    ],
)
def test_a_wrong_reward_is_one_line(fields, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)) as error:
        grading.judge(rewarded(**fields))
    assert str(error.value).startswith("config.reward") and "\n" not in str(error.value)


def test_a_file_that_does_not_run_is_one_line(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"bad.py: cannot be read: SyntaxError: .*line 1"):
        grading.judge(rewarded(function=f"{tmp_path}/bad.py:f"))


# ------------------------------------------------------------------------------------------------
# What fails
# ------------------------------------------------------------------------------------------------

FAILING = """
import os, subprocess, time
from dapo_jax.reward.functions import Grade

def score(problem, response):
    if response == "slow":
        subprocess.Popen(["sleep", "1000.25"])
        time.sleep(1000)
    if response == "stuck":
        while True:
            9 ** 9 ** 8
    if response == "raise":
        return 1 / 0
    if response == "die":
        os._exit(3)
    if response == "nan":
        return float("nan")
    return Grade(len(response) / 7, response == "right", response, {"n": len(response)})
"""


# A token is a character.
TOKENS = types.SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
response = lambda text: types.SimpleNamespace(tokens=np.array([ord(c) for c in text]))


def grades(judge, *texts_of_groups):
    groups = [Group(i, [1], list(map(response, ts))) for i, ts in enumerate(texts_of_groups)]
    asked = [problem(number=i) for i in range(len(groups))]
    return [g.grades for g in grading.grade_groups(TOKENS, judge, groups, asked)]


@pytest.mark.parametrize(("n", "processes"), [(0, 1), (7, 1), (7, 3), (2, 5), (64, 8)])
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
        " division by zero (failing.py line 13)"
        " (config.reward.on_error='miss' counts such responses)"
    )
    with pytest.raises(ValueError, match="score gave nan for a response to problem"):
        grades(stop, ["nan"])
    miss = grading.judge(rewarded(function=failing, on_error="miss", wrong=-3.0))
    first, second = grades(miss, ["right", "raise"], ["nan", "raise"])
    assert first.score_G.tolist() == [5 / 7, -3] and first.right_G.tolist() == [True, False]
    assert first.answers == ["right", None] and first.parts_G["n"][0] == 5
    assert (first.missed, second.missed) == (1, 2) and second.right_G.tolist() == [False, False]


def alive(word: str) -> list[str]:
    """Processes whose command line has `word`."""
    out = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        out += [line] if word in line else []
    return out


@pytest.mark.slow
def test_ten_slow_or_failing_at_once_hang_nothing(failing):
    """And the others get the grades that one process gives them, whatever the number of workers."""
    texts = ["a", "slow", "bb", "die", "stuck", "raise", "slow", "ccc", "die", "right", "nan"]
    texts = [*texts, "die", "raise", "dddd", "raise", "right"]
    seen = []
    for workers in (2, 3):  # three hang: all at once, and one after the others
        fields = dict(function=failing, on_error="miss", workers=workers, timeout_s=2.0)
        judge = grading.judge(rewarded(**fields))
        began = time.monotonic()
        (found,) = grades(judge, texts)
        assert time.monotonic() - began < 300
        assert found.missed == 10
        seen.append((found.score_G.tobytes(), found.answers, found.right_G.tolist()))
        (again,) = grades(judge, ["right"] * 3)  # workers live on
        assert again.missed == 0
        del judge
    assert seen[0] == seen[1]
    plain = grading.judge(rewarded(function=failing, on_error="miss"))
    quick = [t for t in texts if t not in ("slow", "stuck", "die")]
    (here,) = grades(plain, quick)
    there = dict(zip(texts, seen[0][1], strict=True))
    assert here.answers == [there[t] for t in quick]
    deadline = time.monotonic() + 60
    while alive("sleep 1000.25"):  # killed is not buried
        assert time.monotonic() < deadline
        time.sleep(0.05)


MEETING = """
import pathlib, time
def score(problem, response):
    here = pathlib.Path(__file__).parent / "here"
    here.mkdir(exist_ok=True)
    (here / response).touch()
    while len(list(here.iterdir())) < 4:
        time.sleep(0.01)
    return float(len(response))
"""


def test_workers_judge_side_by_side_what_waits(tmp_path):
    """Each of four waits for the other three; and the same grades in one process."""
    (tmp_path / "meeting.py").write_text(MEETING)
    texts, found = ["a" * i for i in range(1, 9)], []
    for workers in (4, 1):
        reward = rewarded(function=f"{tmp_path}/meeting.py:score", workers=workers, timeout_s=300.0)
        (got,) = grades(grading.judge(reward), texts)
        found.append(got.score_G.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slow", "took more than 2 s"),
        ("die", "ended its process"),
        ("raise", "ZeroDivisionError: division by zero (failing.py line 13)"),
    ],
)
def test_an_error_in_a_worker_names_the_row(text, why, failing):
    judge = grading.judge(rewarded(function=failing, workers=1, timeout_s=2.0))
    with pytest.raises(ValueError) as error:
        grades(judge, ["right", text])
    wanted = f"reward: failed on a response to problem {0:016x} of sums: {why}"
    assert str(error.value).startswith(wanted)


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
    c = rewarded(verifier="dapo")
    judge = grading.judge(c)
    (found,) = grades(judge, ["so \\boxed{42}", "Answer: 42", "Answer: 41", "\\boxed{42}."])
    gain = found.shadow_G.mean() - found.right_G.mean()
    assert gain == 0.5
    said = guards.hint(c, {"sampling/shadow_gain": gain})
    assert said.startswith("verifier 'dapo' calls 50% of the responses wrong in which 'integer'")
    assert guards.hint(c, {"sampling/shadow_gain": 0.01}) == guards.hint(c, {}) == ""


def test_a_text_that_a_group_has_twice_is_read_once(monkeypatch):
    read, verify = [], answers.verify
    monkeypatch.setattr(answers, "verify", lambda *job: read.append(job) or verify(*job))
    judge = grading.judge(rewarded(verifier="dapo"))
    groups = grades(judge, ["Answer: 42", "Answer: 41", "Answer: 42"], ["Answer: 42"])
    assert [g.right_G.tolist() for g in groups] == [[True, False, True], [True]]
    assert len(read) == 4  # two texts, each by the verifier and by the one of the hint


def test_what_judges_and_reads_imports_no_jax():
    """Workers start quickly, and never take the accelerator."""
    names = ["reward.workers", "data.problems", "data.tokenizer", "data.prompts"]
    code = (
        f"import sys, {', '.join('dapo_jax.' + n for n in names)}; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
