"""Environments of the package `verifiers` as it is published: rows, scores, and what is refused."""

import asyncio
import json
import pathlib
import sys
import tarfile

import pytest
from levels import slow
from test_rewards import grades, rewarded

from dapo_jax import config
from dapo_jax.config import validation
from dapo_jax.data import environments, problems, references
from dapo_jax.reward import grading

vf = pytest.importorskip(
    "verifiers.v1", reason="needs 'dapo_jax[verifiers]' (requirements-peers.txt)"
)

SUMS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class SumsTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def exact(self, trace) -> float:
        if trace.last_reply == "boom":
            raise KeyError("boom")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> dict:
        return {"short": 1 / (1 + len(trace.last_reply)), "asked": float(len(trace.messages))}

    @vf.metric
    async def length(self, task, trace) -> float:
        return float(len(trace.last_reply))
EXTRA
class Sums(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for n in range(5):
            data = Data(prompt=f"{n} + {n} ?", system_prompt="Be brief.", answer=str(2 * n))
            yield SumsTask(data, self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """Writes a taskset as an installed package; the test's argument stands in its task's class."""

    def write(name: str, extra: str = "", text: str = SUMS) -> str:
        (tmp_path / f"{name}.py").write_text(text.replace("EXTRA", extra))
        monkeypatch.syspath_prepend(tmp_path)
        return f"verifiers:{name}"

    return write


def own_score(task, response: str) -> float:
    """As `replay` of the package scores a finished trace."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=[
            MessageNode(message=vf.SystemMessage(content=task.data.system_prompt)),
            MessageNode(parent=0, message=vf.UserMessage(content=task.data.prompt)),
            MessageNode(parent=1, message=vf.AssistantMessage(content=response), sampled=True),
        ],
    )
    asyncio.run(task.score(trace))
    return trace.reward


@pytest.mark.parametrize("workers", [0, slow(1)])
def test_rows_and_scores_are_the_environment_s(sums, workers):
    name = sums("sums_here" if not workers else "sums_there")
    found, report = problems.read(name, how=problems.Reading(whole=True))
    assert report.rows == 5 and [p.answer for p in found] == list("02468")
    assert found[1].messages == (("system", "Be brief."), ("user", "1 + 1 ?"))
    assert {p.source for p in found} == {name} and all(p.chat for p in found)
    judge = grading.judge(rewarded(function=f"{name},0.25*exact", workers=workers))
    texts = tuple(str(n) for n in range(40))
    said = grading.said(judge, [(p, texts) for p in found])
    tasks = environments.tasks(name)
    assert len(said) == 200 and judge.own and len(judge.source) == 64
    for (p, text), grade in zip(((p, t) for p in found for t in texts), said, strict=True):
        want = own_score(tasks[p.row["task"]], text)
        ident = name.partition(":")[2]
        assert grade.parts[ident] == pytest.approx(want, abs=1e-12)
        assert grade.parts[f"{ident}.length"] == len(text)
        assert grade.parts[f"{ident}.exact"] == float(text == p.answer)
    c = config.base()
    c.data.train, c.eval.files = name, f"sums={name}"
    assert validation.missing(c) == []


def test_a_published_environment_scores_as_it_does(tmp_path, monkeypatch):
    """200 responses, by echo_v1 in the sources of the package, which `.ci/run` fetches; where its
    code fails it is named."""
    sources = sorted(pathlib.Path(sys.prefix, "sources").glob("verifiers-*.tar.gz"))
    if not sources:
        pytest.skip("no sources of verifiers beside the peers (requirements-peers.txt)")
    with tarfile.open(sources[-1]) as archive:
        (member,) = (m for m in archive if m.name.endswith("/tests/v1/fixtures/echo_v1.py"))
        (tmp_path / "echo_v1.py").write_bytes(archive.extractfile(member).read())
    monkeypatch.syspath_prepend(tmp_path)
    name, how = "verifiers:echo_v1", problems.Reading(takes=references.any_answer, whole=True)
    found, _ = problems.read(name, how=how)
    each = -(-200 // len(found))
    kinds = lambda x: (x, x.upper(), x[:-1], "a b", "")
    texts = lambda p: tuple(f"{n} " * (n > 9) + kinds(p.answer)[n % 5] for n in range(each))
    judge = grading.judge(rewarded(function=name))
    said = grading.said(judge, [(p, texts(p)) for p in found])
    tasks = environments.tasks(name)
    want = [own_score(tasks[p.row["task"]], text) for p in found for text in texts(p)]
    assert [grade.score for grade in said] == want and len(want) >= 200 and len({*want}) > 1
    monkeypatch.setattr(sys.modules["echo_v1"], "lenient_match", lambda *_: 1 / 0)
    for failed in grading.said(judge, [(p, ("a",)) for p in found]):
        assert "ZeroDivisionError: division by zero" in failed.why


def test_an_error_of_an_environment_is_no_score(sums):
    name = sums("sums_errors")
    found, _ = problems.read(name, how=problems.Reading(whole=True))
    ask = lambda **fields: grading.said(
        grading.judge(rewarded(function=name, **fields)), [(found[0], ("0", "boom"))]
    )
    good, bad = ask()
    assert good.score == pytest.approx(2 + 0.5 * (1 / 2 + 3)) and "boom" in bad.why
    assert not bad.temporary
    with pytest.raises(ValueError, match="has no task for this row; its own are data.train"):
        grades(grading.judge(rewarded(function=name)), "a")


REFUSED = {
    "a reward with a runtime": (
        "    @vf.reward\n    async def ran(self, trace, runtime) -> float: return 1.0\n",
        "task 0: ran needs a runtime to score",
    ),
    "a hook": ("    async def setup(self, trace, runtime): pass\n", "its setup needs a runtime"),
    "a container": ("    NEEDS_CONTAINER = True\n", "needs a container or tools"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_turn_without_a_runtime_cannot_score_is_refused(sums, what):
    extra, why = REFUSED[what]
    name = sums("refused_" + what.replace(" ", "_"), extra)
    with pytest.raises(ValueError, match=f"^{name}: .*{why}") as error:
        grading.judge(rewarded(function=name))
    assert "\n" not in str(error.value)


def test_what_is_no_environment_is_one_line(sums):
    endless = SUMS.replace("def load", "INFINITE = True\n    def load")
    users = SUMS.replace('prompt=f"{n} + {n} ?", ', "")
    for name, why in (
        (sums("endless", text=endless), "has no end"),
        (sums("of_users", text=users), "has no prompt: a user begins"),
        ("verifiers:not_there_at_all", "taskset 'not_there_at_all' not found"),
        (sums("broken", text="1 / 0"), "division by zero"),
    ):
        for ask in (problems.read, lambda name: grading.judge(rewarded(function=name))):
            with pytest.raises(ValueError, match=why) as error:
                ask(name)
            assert "\n" not in str(error.value) and str(error.value).startswith(name)
    assert json.loads(environments.rows(sums("sums_rows")).read_text().splitlines()[0])["task"]
