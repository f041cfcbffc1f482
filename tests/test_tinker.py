"""Environments of the package `tinker-cookbook` as it is published: rows, scores, and refusals."""

import asyncio
import re

import pytest
from levels import slow
from test_rewards import rewarded

from dapo_jax import config
from dapo_jax.config import validation
from dapo_jax.data import problems, references
from dapo_jax.reward import grading

pytest.importorskip("tinker_cookbook.rl.types", reason="needs pip install 'dapo_jax[tinker]'")

from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl import arithmetic_env, math_env

MADE = """
from functools import partial
import chz
from tinker_cookbook.recipes.math_rl import arithmetic_env, math_env
from tinker_cookbook.rl import problem_env, types

class Math(types.RLDataset):
    def get_batch(self, index):
        env = partial(math_env.MathEnv, f"What is {index} / 4?", f"\\\\frac{{{index}}}{{4}}", None)
        return [problem_env.ProblemGroupBuilder(env, num_envs=2)]

    def __len__(self):
        return 10

def arithmetic(n_batches=2):
    return arithmetic_env.ArithmeticDataset(10, None, group_size=2, n_batches=n_batches)

@chz.chz
class Builder(types.RLDatasetBuilder):
    async def __call__(self):
        return Math(), None

class Broken(math_env.MathEnv):
    def check_format(self, text):
        raise KeyError(text)

class Stepping(math_env.MathEnv):
    async def step(self, action, *, extra=None):
        return await super().step(action)

class Compared(problem_env.ProblemGroupBuilder):
    async def compute_group_rewards(self, trajectories, envs):
        return [(1.0, {})] * len(trajectories)

def one(kind, group=problem_env.ProblemGroupBuilder):
    data = Math()
    data.get_batch = lambda index: [group(partial(kind, "Why?", "1", None), num_envs=1)]
    return data

broken, stepping = partial(one, Broken), partial(one, Stepping)
compared = partial(one, math_env.MathEnv, Compared)
agents = partial(one, lambda *_: object())
empty = partial(arithmetic, 0)
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The data sets above, as a user's module."""
    (tmp_path / "made_of_tinker.py").write_text(MADE)
    monkeypatch.syspath_prepend(tmp_path)
    return "tinker:made_of_tinker:"


class Bytes:
    """A tokenizer that a renderer takes: one token per character."""

    bos_token = eos_token_id = None
    name_or_path = ""

    def encode(self, text, **_):
        return list(map(ord, text))

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def own_score(kind, *about, text: str) -> float:
    """The package's own, of the tokens of a response that its renderer parses."""
    renderer = renderers.get_renderer("role_colon", Bytes())
    env = kind(*about, renderer)
    done = asyncio.run(env.step(renderer.tokenizer.encode(f" {text}\n\nUser:")))
    return done.reward


PROBLEMS = {  # data set -> (the class of its environments, what its problem is made of, texts)
    "arithmetic": (
        arithmetic_env.ArithmeticEnv,
        lambda p: map(int, re.findall(r"\d+", p.messages[-1][1])),
        (*(f"That is {n}." for n in range(0, 200, 10)), "no", "5, 1,00"),
    ),
    "Builder": (
        math_env.MathEnv,
        lambda p: (p.messages[0][1].partition(" Write")[0], p.answer),
        (*(f"So \\boxed{{{n / 4}}}" for n in range(17)), "3", "\\boxed{", "", "\\boxed{\\frac 64}"),
    ),
}


@pytest.mark.parametrize("workers", [0, slow(1)])
@pytest.mark.parametrize("what", PROBLEMS)
def test_rows_and_scores_are_the_environment_s(made, what, workers):
    """200 responses of each of two published environments."""
    name, (kind, parts, texts) = made + what, PROBLEMS[what]
    how = problems.Reading(takes=references.any_answer, whole=True)
    found, _ = problems.read(name, how=how)
    if what == "arithmetic":
        assert found[0].messages[:2] == (("user", "What is 4 + 5?"), ("assistant", "9"))
    else:
        assert found[3].messages[0][1].startswith("What is 3 / 4? Write")
        assert found[3].answer == r"\frac{3}{4}" and found[3].source == name
    judge = grading.judge(rewarded(function=name, workers=workers))
    said = grading.said(judge, [(p, texts) for p in found])
    own = [own_score(kind, *parts(p), text=text) for p in found for text in texts]
    assert [g.score for g in said] == own and len({*own}) > 1 and len(own) >= 200
    assert {tuple(g.parts) for g in said} == {("format", "correct")} and len(judge.source) == 64
    c = config.base()
    c.data.train, c.eval.files = name, f"own={name}"
    assert validation.missing(c) == []


def test_an_error_of_an_environment_is_no_score(made):
    name, how = made + "broken", problems.Reading(takes=references.any_answer, whole=True)
    found, _ = problems.read(name, how=how)
    judge = grading.judge(rewarded(function=f"{name},0.5*format", format_tags="a"))
    (failed,) = grading.said(judge, [(found[0], ("a text",))])
    assert "KeyError: 'a text' (made_of_tinker.py line" in failed.why and not failed.temporary


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("made_of_tinker:stepping", "Stepping is no ProblemEnv whose responses score alone"),
        ("made_of_tinker:compared", "MathEnv is no ProblemEnv whose responses score alone"),
        ("made_of_tinker:agents", "object is no ProblemEnv"),
        ("made_of_tinker:empty", "has no problems"),
        ("made_of_tinker:absent", "has no attribute 'absent'"),
        ("made_of_nothing:here", "No module named 'made_of_nothing'"),
        ("tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder", "batch_size"),
        ("", "Empty module name"),
    ],
)
def test_what_is_not_one_question_and_one_answer_is_one_line(made, what, why):
    for ask in (problems.read, lambda name: grading.judge(rewarded(function=name))):
        with pytest.raises(ValueError, match=why) as error:
            ask(f"tinker:{what}")
        assert "\n" not in str(error.value) and str(error.value).startswith(f"tinker:{what}: ")
