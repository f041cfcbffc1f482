"""The recipe of a reward that runs the policy's code, as docs/own_reward.md shows it. (That of a
judge by HTTP: test_reward_forms.py.)"""

import re

import pytest
from levels import slow
from pages import DOCS
from test_rewards import TOKENS, problem, response, rewarded

from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.reward import grading

PAGE = (DOCS / "own_reward.md").read_text()
(SHOWN,) = re.findall(r"^```python\n((?:(?!^```).)*sandbox\.run.*?)^```", PAGE, re.S | re.M)
CASES = [[[3, 1, 2], [1, 2, 3]], [[], []], [[2, 2], [2, 2]]]
BLOCK = "so\n```python\n{}\n```\n"
RESPONSES = {
    BLOCK.format("solve = sorted"): True,
    BLOCK.format("solve = print") + BLOCK.format("def solve(x):\n    return sorted(x)"): True,
    BLOCK.format("solve = lambda x: x"): False,
    BLOCK.format("def solve(x):\n    print(x)\n    return sorted(x)"): False,
    BLOCK.format("import os\nos.system('echo 1')\nsolve = sorted"): False,
    BLOCK.format("open('/etc/passwd').read()\nsolve = sorted"): False,
    BLOCK.format("print([1, 2, 3]); print([]); print([2, 2]); raise SystemExit"): True,
    BLOCK.format("solve = sorted("): False,
    "solve = sorted": False,
}


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_code_is_run_and_held(tmp_path, workers):
    """One that has learned the results by heart passes: there have to be more cases than a policy
    sees. What it expects is nowhere in the process that it runs in."""
    (tmp_path / "own.py").write_text(SHOWN)
    judge = grading.judge(rewarded(function=f"{tmp_path}/own.py:score", workers=workers))
    group = Group(0, [1], [response(text) for text in RESPONSES])
    (found,) = grading.grade_groups(TOKENS, judge, [group], [problem(cases=CASES)])
    assert found.grades.right_G.tolist() == list(RESPONSES.values())


def test_a_loop_without_end_is_ended():
    scope = {}
    exec(SHOWN.replace("sandbox.run(", "(lambda code: sandbox.run(code, seconds=1))("), scope)
    assert scope["score"](problem(cases=CASES), BLOCK.format("while True: pass")) is False
