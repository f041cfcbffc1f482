"""Replies in a response: no part of the loss, asked once, played back after a kill."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from levels import compiled_soon
from rounding import assert_near
from test_carried import Cut, cut_after, saved
from test_train import assert_same_bits, small
from test_update import (  # noqa: F401
    ALL_ON,
    PLAIN,
    SHAPE,
    WEIGHTED,
    Batch,
    make_batch,
    make_programs,
    oracle_loss,
    params,
    run as update,
    truth,
)

from dapo_jax import algorithm, build, config, train
from dapo_jax.checkpoint import journal
from dapo_jax.checkpoint.remembered import Responses
from dapo_jax.dapo import objective
from dapo_jax.dapo.reward import Grade
from dapo_jax.data import tokenizer
from dapo_jax.data.problems import Problem
from dapo_jax.log import metrics
from dapo_jax.reward import grading
from dapo_jax.reward.functions import Failed
from dapo_jax.reward.tools import Reply
from dapo_jax.rollout.engine import Draw, Part, Request, Response, Store
from dapo_jax.variants import choose, objectives, turns

# --- The loss ------------------------------------------------------------------------------------


def with_replies(batch: Batch) -> Batch:
    """Some tokens of each response but its first are a reply's; groups of three share a prompt."""
    rng, items = np.random.default_rng(3), []
    for n, item in enumerate(batch.items):
        logps = item.sampled_logps.copy()
        logps[1:][rng.random(len(logps) - 1) < 0.5] = np.inf
        prompt = batch.items[n // 3 * 3].prompt
        items.append(item._replace(sampled_logps=logps, prompt=prompt))
    assert sum(np.isinf(i.sampled_logps).sum() for i in items) > 10
    return batch._replace(items=items)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "coefficients", "layouts"),
    [
        ("ppo", ALL_ON, [{}, dict(row_tokens=40, micro_rows=4)]),
        ("gspo", PLAIN, [{}, dict(share_prompts=True)]),
    ],
)
@compiled_soon()
def test_gradient_of_rows_with_replies(params, case, coefficients, layouts):  # noqa: F811
    """As the float64 oracle's with a mask, in every layout; metrics too."""
    batch = with_replies(make_batch(params, [-0.6, -0.1, 0.0, 0.1, 0.4, 2.6]))
    token_loss, weighted = objectives.OBJECTIVES[case].token_loss, coefficients is ALL_ON
    choice = (WEIGHTED if weighted else objective.DAPO)._replace(token_loss=token_loss)
    loss = lambda p: oracle_loss(p, batch, coefficients, case, "token" if weighted else None)
    want = truth(loss, params)
    for layout in layouts:
        sharing = layout.get("share_prompts", False)
        programs = make_programs(SHAPE._replace(shared_prompts=sharing), choice=choice)
        assert_near(update(programs, params, batch, coefficients, **layout), want)


# --- A run ---------------------------------------------------------------------------------------

TOOL = """
import os, random
from dapo_jax.reward.grading import Grade
from dapo_jax.reward.tools import Reply

def reply(problem, transcript):
    with open({calls!r}, "a") as file:
        file.write("asked\\n")
    said = random.SystemRandom().choice(["3", "+ 4", "Wait 5", "none", "grade"])
    if said == "none":
        return None
    right = len(transcript[-1][1]) % 2 > 0
    return Grade(float(right), right) if said == "grade" else Reply(said)

def score(problem, response):
    return len(response) % 2 > 0
"""


STOPS = range(1, 11)  # a random model ends a turn soon


def spoken(steps: int, folder):
    """A run with a tool that answers otherwise at each call."""
    c = small(steps)
    c.rollout.turns, c.rollout.max_response_tokens, c.checkpoint.every = 3, 32, 2
    c.reward.reply, c.reward.function = (f"{folder}/tool.py:{f}" for f in ("reply", "score"))
    (folder / "tool.py").write_text(TOOL.format(calls=str(folder / "calls")))
    return c


def asked(folder) -> int:
    return len((folder / "calls").read_text().split())


# By staleness: another schedule, the same samples. Slots and chunk are the clock's where rows
# outlive steps; there some are evicted.
OTHER = ({"rollout.slots": 8, "rollout.chunk": 5}, {"rollout.cache_fraction": 0.6})


@pytest.mark.slow
@pytest.mark.parametrize("aged", [0, 1])
def test_killed_it_is_given_the_same_replies(aged, tmp_path, monkeypatch):
    """Cut off again and again, then beside a run left alone that is given what the first was: the
    same bits. Each reply was asked for once, and is no token of the policy."""
    said, records, keep, other = {}, [], Responses.keep, OTHER[aged]
    monkeypatch.setattr(journal, "_FREE", (*journal._FREE, *other))

    def kept(self, new):
        said.update((self._journal.key(name), payload) for name, payload in new.items())
        keep(self, new)

    monkeypatch.setattr(Responses, "keep", kept)
    known = []

    def often(*where):
        known.append(replace(tokenizer.load(*where), stop_ids=frozenset(STOPS)))
        return known[-1]

    monkeypatch.setattr(build, "tokenizer", SimpleNamespace(load=often))
    c = spoken(3 + aged, tmp_path)
    if aged:
        c.rollout.staleness, c.rollout.chunk, c.loss.importance_cap = 1, 4, 5.0
    for chunks in (4, 11, 400):
        try:
            assert train.train(c, tmp_path / "cut", hooks=cut_after(chunks))
            break
        except Cut:
            continue
    calls = asked(tmp_path)
    assert len(said) == calls > 30 and len({*said.values()}) > 4

    monkeypatch.setattr(Responses, "recall", lambda self, name: said.get(self._journal.key(name)))
    hooks = train.Hooks(step=lambda state, record: records.append(record))
    c.update(other)
    assert train.train(c, tmp_path / "alone", hooks=hooks)
    assert asked(tmp_path) == calls or aged  # what is drawn ahead of the clock is not used
    assert_same_bits(saved(tmp_path / "cut", c.steps), saved(tmp_path / "alone", c.steps))

    rows = [r for record in records for g in record.batch.drawn for r in g.responses]
    replied = [r for r in rows if not r.drawn.all()]
    assert len(replied) > 20 and any((np.diff(r.drawn.astype(int)) < 0).sum() > 1 for r in replied)
    for r in replied:
        starts = np.flatnonzero(np.diff(r.drawn.astype(int)) < 0) + 1
        assert np.isin(r.tokens[starts - 1], STOPS).all() and r.entropies[~r.drawn].max() == 0
        assert len(r.tokens) <= 32 and r.length < len(r.tokens)
    for record in metrics.read(tmp_path / "alone" / "metrics.jsonl")[1:]:
        assert record["policy/sampler_trainer_logprob_gap"] < 1e-4 or aged  # of other weights
        assert record["turns/mean"] > 1 and record["turns/errors"] == 0
    if aged:
        assert_carried_over(known[-1], records)


def assert_carried_over(tok, records) -> None:
    """Some rows with replies are of two steps; what their notes say is what their tokens say."""
    rows = [r for record in records for g in record.batch.drawn for r in g.responses if r.note]
    assert sum(len({*r.versions[r.drawn]}) > 1 for r in rows) > 3
    for r in rows:
        ends = np.flatnonzero(np.diff(r.drawn)) + 1
        texts = [tok.decode(x.tolist()) for x in np.split(r.tokens, ends)]
        note = json.loads(r.note)
        assert [text for _, text in note["said"]] == texts[: len(note["said"])]
        assert r.grade == turns.grade(r) and (r.grade is None) == (note["grade"] is None)
    for step, record in enumerate(records):
        trained = [r for g in record.batch.groups for r in g.responses]
        assert {*np.concatenate([step - r.versions for r in trained])} <= {0, 1}
        parked = [r for g in record.batch.carried for r in g.responses if not r.ended]
        assert all(r.grade is None and r.versions[-1] == step for r in parked if len(r.tokens))


# --- Tools that fail -----------------------------------------------------------------------------

HOSTILE = """
import asyncio, ctypes, os, signal, sys, time
from dapo_jax.reward.grading import Grade
from dapo_jax.reward.tools import Reply

class Odd:
    def __repr__(self):
        raise RuntimeError("no repr")

class Own(BaseException):
    pass

def deep(n):
    return deep(n + 1)

def reply(problem, transcript):
    said = transcript[-1][1]
    if said.startswith("exec "):
        exec(said[5:])
    return eval(said) if not said.startswith("exec ") else None

here = []

async def later(problem, transcript):
    said = transcript[-1][1]
    here.append(said)
    while said == "all" and len(here) < 5:  # where one waits for the other, none comes back
        await asyncio.sleep(0.01)
    await asyncio.sleep(60 if said == "never" else 0)
    return Reply("all are here") if said == "all" else eval(said)
"""
GAVE = r"it has to be Reply\(text\), a Grade"
WRONG = {  # what a turn makes the tool do -> what the run says of it
    "1 / 0": "ZeroDivisionError: division by zero (<string> line 1)",
    "exec raise ValueError('a\\nb')": "a b",
    "exec raise Own('mine')": "Own: mine",
    "exec raise KeyError(Odd())": "its text cannot be made",
    "exec raise MemoryError()": "asks for more memory than there is",
    "deep(0)": "nested too deeply",
    "exec raise GeneratorExit()": "GeneratorExit",
    "sys.exit(3)": "SystemExit: 3",
    "os._exit(4)": "SystemExit: os._exit(4)",
    "exec raise StopIteration": "StopIteration",
    "1 +": "SyntaxError",
    "5": GAVE,
    "'a text'": GAVE,
    "b'bytes'": GAVE,
    "('tool', 'text')": GAVE,
    "Reply": GAVE,
    "Reply(5)": GAVE,
    "Reply(None)": GAVE,
    "Reply('a', 7)": GAVE,
    "Reply('\\ud800')": GAVE,
    "Grade('high')": GAVE,
    "Grade(float('nan'))": GAVE,
    "Grade(1.0, 'yes')": GAVE,
    "Grade(1.0, parts={'a': None})": GAVE,
    "[Reply('a')]": GAVE,
    "{}": GAVE,
    "True": GAVE,
    "len": GAVE,
    "Odd()": "RuntimeError: no repr",
    "Reply()": "missing 1 required positional argument",
}
KILLED = {  # in a worker process
    "time.sleep(60)": "took more than 2 s",
    "exec while True: pass": "took more than 2 s",
    "os.kill(os.getpid(), signal.SIGKILL)": "ended its process",
    "os.abort()": "ended its process",
    "os.kill(os.getpid(), signal.SIGSTOP)": "took more than 2 s",
    "os.kill(0, signal.SIGKILL)": "ended its process",
    "exec os.closerange(3, 99)": "ended its process",
    "os.system('kill -9 $PPID')": "ended its process",
    "ctypes.string_at(0)": "ended its process",
    "exec while True: print('flood ' * 9999)": "took more than 2 s",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(turn, on_error, in a worker) -> what is answered to it."""
    file = tmp_path_factory.mktemp("hostile") / "tool.py"
    file.write_text(HOSTILE)
    problem = Problem("7", (("user", "?"),), "3", "source", {})
    judges = {}

    def ask(
        turn: str, on_error: str = "stop", workers: int = 0, name: str = "reply", rows: int = 1
    ):
        how = name, on_error, workers
        if how not in judges:
            c = config.base().reward
            c.reply, c.on_error, c.workers, c.timeout_s = f"{file}:{name}", on_error, workers, 2.0
            judges[how] = grading.judge(c)
        asker = turns.Asker(judges[how], lambda position: problem, Store(), [])
        asked = [turns.Row(Request([1], 0, i), i) for i in range(rows)]
        said = asker.ask(Draw(0), asked, [(("assistant", turn),)] * rows)
        return said[0] if rows == 1 else said

    return ask


@pytest.mark.parametrize("turn", WRONG)
def test_a_tool_that_fails_is_a_line(answers, turn):
    """As a reward that does so: it ends the run in one line, or counts as a miss."""
    with pytest.raises(ValueError) as said:
        answers(turn)
    line = str(said.value)
    assert "\n" not in line and len(line) < 700 and "(config.reward.on_error='miss'" in line
    assert WRONG[turn] in line or re.search(WRONG[turn], line)
    failed = answers(turn, "miss")
    assert isinstance(failed, Failed) and failed.why in line


# By day what hangs, what ends itself and what is stopped.
BY_DAY = ("time.sleep(60)", "os.abort()", "os.kill(os.getpid(), signal.SIGSTOP)")
of_day = lambda turn: [pytest.mark.nightly] * (turn not in BY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [pytest.param(turn, marks=of_day(turn)) for turn in KILLED])
def test_a_tool_that_hangs_or_kills_is_ended(answers, turn):
    assert KILLED[turn] in answers(turn, "miss", 1).cause
    assert answers("Reply('fine')", "miss", 1) == Reply("fine")


def test_metrics_by_hand():
    """Two replies, of two tokens and of one, in one of two rows; the other row's failed."""
    of = lambda logps, **how: Response(np.arange(len(logps)), np.array(logps), None, False, **how)
    replied = of([-1, -1, np.inf, np.inf, -1, np.inf, -1])
    rows = [replied, of([-1.0] * 3, grade=Failed("why", "cause"))]
    found = turns.metrics(SimpleNamespace(drawn=[SimpleNamespace(responses=rows)]))
    assert found == {
        "turns/mean": 2, "turns/replied_frac": 0.5, "turns/reply_tokens": 1.5, "turns/errors": 1
    }  # fmt: skip
    assert turns.metrics(SimpleNamespace(drawn=[])) == {}


def test_a_reply_joins_its_row_as_tokens_that_were_not_drawn():
    row, one = turns.Row(Request([1], 0, 0), 0), np.ones(1, np.float32)
    turn = Part(0, 0, np.array([9], np.int32), -one, one, True)
    row.add(turn)
    request, part = row.reply(Reply("x"), [5, 6], turn)
    assert list(request.prefix) == part.tokens.tolist() == [9, 5, 6] and not part.ended
    assert part.logps.tolist() == [-1, np.inf, np.inf] and part.entropies.tolist() == [1, 0, 0]
    response = row.response((6,))
    assert (response.length, response.truncated) == (1, False)
    assert response.logps.tolist() == part.logps.tolist()
    assert response.entropies.tolist() == [1, 0, 0] and row.turn == []


@pytest.mark.parametrize("longest", [4, 5])
def test_a_reply_wants_room_for_one_token_behind_it(longest):
    """Two tokens of a turn, then two of its reply."""
    asked, one = [], np.ones(2, np.float32)

    def generate(weights, requests, draw, watch, *, feed):
        asked.extend(feed([Part(0, 0, np.array([7, 9], np.int32), -one, one, True)]))
        return [], None

    engine = SimpleNamespace(generate=generate, stop_ids=(9,), response_tokens=longest)
    words = SimpleNamespace(decode=str, encode=lambda text: [5, 6])
    asker = SimpleNamespace(ask=lambda draw, rows, texts: [Reply("x")])
    talking = turns.Talking(engine, words, turns.Budget(1, 8, False), asker)
    talking.generate(None, [Request([1], 0, 0)], Draw(0))
    assert [r.prefix for r in asked] == [[7, 9, 5, 6]] * (longest - 4)


class Kept(Store):
    def __init__(self):
        self.said = {}
        self.recall, self.keep = self.said.get, self.said.update


def test_what_fails_loses_no_other_reply():
    """Where it ends the run, the next start asks for that one alone."""
    asked, problem = [], Problem("7", (("user", "?"),), "3", "source", {})

    def reply(problem, transcript):
        asked.append(transcript[0][1])
        return Reply(str(1 / int(asked[-1])))

    waited, judge = [], grading.Judge(None, reply=reply)
    asker = turns.Asker(judge, lambda at: problem, Kept(), waited)
    rows = [turns.Row(Request([1], 0, i), i) for i in range(3)]
    ask = lambda said: asker.ask(Draw(0), rows, [(("assistant", text),) for text in said])
    with pytest.raises(ValueError, match="division by zero"):
        ask("102")
    assert ask("142") == [Reply("1.0"), Reply("0.25"), Reply("0.5")]
    assert asked == ["1", "0", "2", "4"] and len(waited) == 1 and 0 <= waited[0] < 60


def test_what_is_right_comes_back_as_it_was(answers):
    for turn, said in {
        "Reply('漢 \\n\\x00')": Reply("漢 \n\x00"), "Reply('a', role='user')": Reply("a", "user"),
        "None": None, "Grade(True)": Grade(1.0), "Grade(0.5, None, 'x', {'a': 1})":
        Grade(0.5, None, "x", {"a": 1.0}), "exec print('loud ' * 10)": None,
        "Reply('flood ' * 10**6)": Reply("flood " * 10**6),
    }.items():  # fmt: skip
        assert answers(turn) == answers(turn, "miss", 1) == said


@pytest.mark.slow
def test_an_async_tool_waits_for_many_at_a_time(answers):
    """It is asked as an async reward is, also in a worker."""
    assert answers("all", "stop", 0, "later", rows=5) == [Reply("all are here")] * 5
    for workers in (0, 1):
        ask = lambda turn, workers=workers: answers(turn, "miss", workers, "later")
        assert ask("Reply('a')") == Reply("a") and ask("None") is None
        assert "division by zero" in ask("1 / 0").cause and "no grade" in ask("5").cause
        assert "took more than 2 s" in ask("never").cause


# --- Replies as tokens ---------------------------------------------------------------------------


def test_conversations_are_tokens_as_the_template_has_them(assets):
    """100 of up to five turns: what stands in the row before each turn is, token by token, what
    the released template makes of the whole conversation."""
    folder, rng = assets / "tokenizer", np.random.default_rng(0)
    qwen = tokenizer.load(folder, folder / "chat_template_qwen2.5_instruct.jinja")
    words = ["  ", "\n\n", "x^2", "Ünï", "漢字", "<tool_call>", "12345", "a", "😀", "<think>",
             "}", "."]  # fmt: skip
    text = lambda: "".join(rng.choice(words, rng.integers(1, 9))) + "e"
    budget, (end,) = turns.Budget(4, 99, True), qwen.encode("<|im_end|>")
    for case in range(100):
        talk = [("system", text())] * (case % 2) + [("user", text())]
        row = qwen.chat(talk)
        for _ in range(rng.integers(1, 5)):
            said = "a" + text()  # a policy that began with a new line would draw two tokens
            reply = Reply(text(), str(rng.choice(["tool", "user"])))
            row += [*qwen.encode(said), end, *turns.rendered(qwen, budget, reply)]
            talk += [("assistant", said), (reply.role, reply.text)]
            assert row == qwen.chat(talk)
    short = turns.rendered(qwen, budget._replace(tokens=3), Reply("word " * 10**6))
    assert short == turns.rendered(qwen, budget, Reply("word word word"))
    silent = replace(qwen, template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="a stop token does not follow the assistant's text"):
        turns.rendered(silent, budget, Reply("a"))
    with pytest.raises(ValueError, match="'' has no token; a reply needs one"):
        turns.rendered(qwen, budget._replace(chat=False), Reply(""))


# --- Off -----------------------------------------------------------------------------------------


def test_off_it_is_dapo_and_on_an_update_is_the_same_program():
    c, lowered = small(1), []
    assert choose.of(c).sample is algorithm.sample_batch and not choose.of(c).remember
    for n in (0, 3):
        c.rollout.turns = n
        machine = build.build_machine(c, 48, [1], None)
        assert machine.engine.resumes == (n > 0)
        assert n or build.talking(c, machine, None) is machine
        call = build.calls(c, machine)["update"]
        lowered.append(call.program.lower(*call.arguments).as_text())
    assert lowered[0] == lowered[1] and choose.of(c).sample is not algorithm.sample_batch
