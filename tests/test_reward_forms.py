"""Rewards as others write them: verl's, TRL's, of groups, and those that wait for a service."""

import asyncio
import http.server
import json
import pathlib
import re
import threading
import time

import numpy as np
import pytest
from levels import slow
from test_rewards import TOKENS, grades, problem, response, rewarded

from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.data import problems
from dapo_jax.reward import forms, functions, grading, waiting
from dapo_jax.reward.functions import Grade

FUNCTIONS = """
from __future__ import annotations
import asyncio, dataclasses, pickle, urllib.error

@dataclasses.dataclass
class Best:
    length: int

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"index": 3}, (data_source, extra_info)
    right = solution_str == ground_truth["target"]
    return {"score": 2.0 * right - 1, "acc": right, "pred": solution_str, "n": 2, "text": "no"}

async def later(data_source, solution_str, ground_truth, **more):
    await asyncio.sleep(0)
    return float(len(solution_str))

def verl_short(solution_str, ground_truth, method="strict"):
    return solution_str == "42"

def trl(completions, prompts, level, **kwargs):
    assert len(prompts) == len(level) == len(kwargs["answer"]) == len(completions)
    return [float(len(c)) * x for c, x in zip(completions, level)]

async def trl_chat(prompts, completions, **kwargs):
    assert prompts[0] == [{"role": "user", "content": "6 * 7 ?"}]
    return [float(len(c[0]["content"])) for c in completions]

def score_group(problem, responses, margin=0):
    best = pickle.loads(pickle.dumps(Best(max(map(len, responses)))))
    return [len(r) == best.length for r in responses]

async def wait_group(problem, responses):
    await asyncio.sleep(0.01)
    return [float(len(r)) for r in responses]

async def score(problem, response):
    if response == "fail":
        raise RuntimeError("no")
    if response == "hang":
        await asyncio.sleep(1000)
    if response == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if response == "exit":
        import os
        os._exit(0)
    await asyncio.sleep(0.02 / len(response))  # those asked last are done first
    return len(response) / 8

def few(problem, responses): return [1.0]
def no_list(problem, responses): return 1.0
def five(a, b, c, d, e): return 1.0
def odd(solution_str, ground_truth, router): return 1.0
def ids(completions, completion_ids): return [1.0]

def partial(solution_str, ground_truth, extra_info):
    import numpy as np
    share, parts = len(solution_str) / 6, [("n", np.int64(2)), ("share", np.float32(0.5))]
    parts = reversed(parts) if share == 1 else parts
    return {"score": share, "acc": share} | dict(parts) | {"told": extra_info == "{}"}
"""
TEXTS = ["a", "bbb", "42", "cccccc"]
VERL = dict(reward_model={"ground_truth": {"target": "42"}}, extra_info={"index": 3}, level=2)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return f"{tmp_path}/own.py"


def judged(function, texts, chat=False, **fields):
    """The grades of a group of these texts, with a row of verl's and of TRL's columns."""
    judge = grading.judge(rewarded(function=function, **fields))
    about = problem(**VERL)._replace(chat=chat)
    (group,) = grading.grade_groups(
        TOKENS, judge, [Group(0, [1], [*map(response, texts)])], [about]
    )
    return group.grades


LENGTHS = [1.0, 3.0, 2.0, 6.0]
RIGHT = [False, False, True, False]
FORMS = {  # function -> scores, right
    "compute_score": ([-1, -1, 1, -1], RIGHT),
    "later": (LENGTHS, None),
    "verl_short": ([0, 0, 1, 0], RIGHT),
    "trl": (np.multiply(LENGTHS, 2), None),
    "score_group": ([0, 0, 0, 1], [False, False, False, True]),
    "wait_group": (LENGTHS, None),
    "score": (np.divide(LENGTHS, 8), None),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("workers", [0, slow(1)])
def test_each_form_is_graded_as_it_stands(own, name, workers):
    found = judged(f"{own}:{name}", TEXTS, workers=workers)
    np.testing.assert_array_equal(found.score_G, FORMS[name][0])
    assert (None if found.right_G is None else found.right_G.tolist()) == FORMS[name][1]
    if name == "compute_score":
        assert {k: v.tolist() for k, v in found.parts_G.items()} == {"n": [2.0] * 4}
        assert found.answers == TEXTS
    # The same within a sum: together with a verifier, and with the other kinds
    both = judged(f"boxed,a=0.5*{own}:{name},b={own}:score_group,c=2*{own}:score", TEXTS)
    want = np.array([-1.0] * 4) + 0.5 * np.array(FORMS[name][0]) + [0, 0, 0, 1]
    np.testing.assert_allclose(both.score_G, want + 2 * np.divide(LENGTHS, 8), rtol=1e-15)
    assert both.right_G.tolist() == [False] * 4
    assert both.answers == (TEXTS if name == "compute_score" else [None] * 4)
    np.testing.assert_array_equal(both.parts_G["a"], FORMS[name][0])


def test_verl_s_may_be_right_in_part_and_give_numpy_s_numbers_in_any_order(own):
    judge, about = grading.judge(rewarded(function=f"{own}:partial")), VERL | {"extra_info": "{}"}
    group = Group(0, [1], [*map(response, TEXTS)])
    (graded,) = grading.grade_groups(TOKENS, judge, [group], [problem(**about)])
    found = graded.grades
    assert found.right_G.tolist() == [False, False, False, True]
    parts = {k: v.tolist() for k, v in found.parts_G.items()}
    assert parts == {"n": [2.0] * 4, "share": [0.5] * 4, "told": [1.0] * 4}


def test_trl_sees_chats_where_the_rows_are_chats(own, tmp_path):
    assert judged(f"{own}:trl_chat", TEXTS, chat=True).score_G.tolist() == LENGTHS
    chat = [{"role": "user", "content": "1 + 1 ?"}]
    rows = [{"prompt": chat, "answer": "2"}, {"prompt": "1 + 2 ?", "answer": "3"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found, _ = problems.read(tmp_path / "rows.jsonl")
    assert [p.chat for p in found] == [True, False]


@pytest.mark.parametrize("name", ["five", "odd", "ids"])
def test_another_form_is_one_line_where_the_file_is_read(own, name):
    with pytest.raises(ValueError, match=rf"^config\.reward\.function: {name}\(.*is none: a rewa"):
        grading.judge(rewarded(function=f"{own}:{name}"))


@pytest.mark.parametrize(
    ("name", "why"),
    [("few", "gave 1 grades for 4 responses to"), ("no_list", "gave 1.0 for problem .*: no list")],
)
def test_a_group_needs_a_grade_for_each(own, name, why):
    with pytest.raises(ValueError, match=why):
        judged(f"{own}:{name}", TEXTS)


def test_those_that_wait_fail_one_by_one_and_in_time(own):
    texts = ["a", "fail", "hang", "stubborn", "exit", "bb", *["ccc"] * 40]
    fields = dict(function=f"{own}:score", timeout_s=0.5, on_error="miss", retries=0)
    found = [judged(texts=texts, concurrency=n, **fields) for n in (64, 5)]
    for got in found:
        assert got.missed == 4
        want = [1 / 8, *[-1.0] * 4, 2 / 8, *[3 / 8] * 40]
        assert got.score_G.tolist() == want
    with pytest.raises(ValueError, match=r"RuntimeError: no \(own.py line \d+\)"):
        judged(f"{own}:score", ["a", "fail"])
    with pytest.raises(ValueError, match=r"took more than 0.1 s"):
        judged(f"{own}:score", ["a", "hang"], timeout_s=0.1, retries=0)


def test_at_most_so_many_wait_together_and_in_one_loop():
    now, most, loops = 0, 0, set()

    async def score(problem, text):
        nonlocal now, most
        loops.add(asyncio.get_running_loop())
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return 1.0

    judge = grading.judge(rewarded(concurrency=7), score)
    before = threading.active_count()
    for _ in range(3):
        (found,) = grades(judge, "a" * 50)
        assert found.score_G.tolist() == [1.0] * 50
    assert most == 7 and len(loops) == 1 and threading.active_count() <= before + 1

    async def in_a_notebook():
        return grades(judge, "abc")

    assert asyncio.run(in_a_notebook())[0].missed is None


def test_a_reward_that_blocks_is_said_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(waiting, "BLOCKED_S", 0.2)
    free = threading.Event()

    async def score(problem, text):
        free.wait(60.0)
        return 1.0

    with pytest.raises(ValueError, match="keeps its thread for more than 0.2 s without an await"):
        grades(grading.judge(rewarded(), score), "ab")
    free.set()


class Status(Exception):
    def __init__(self, status):
        self.status_code = status


def chained(error):
    try:
        try:
            raise error
        except Exception as first:
            raise RuntimeError("client") from first
    except RuntimeError as second:
        return second


@pytest.mark.parametrize(
    ("error", "passes"),
    [(ConnectionResetError(), True), (TimeoutError(), True), (Status(503), True),
     (Status(408), True), (Status(429), True), (Status(404), False), (Status(409), False),
     (Status(600), False), (OSError("x"), False), (ValueError("x"), False),
     (chained(ConnectionRefusedError()), True), (chained(KeyError("x")), False)],
)  # fmt: skip
def test_what_may_work_later(error, passes):
    assert waiting.temporary(error) is passes


def test_what_is_no_grade_now_is_none_later():
    given = functions.NoGrade("5")
    assert functions.raised(problem(), given) == functions.Failed(
        "5", "gave what is no grade", given, False
    )
    assert not functions.failed(problem(), "ended its process").temporary


@pytest.mark.parametrize("waits", [True, False])
def test_what_fails_for_a_while_is_asked_again_and_nothing_else(waits, monkeypatch, capfd):
    slept, asked = [], []
    monkeypatch.setattr(time, "sleep", slept.append)

    def plain(problem, text):
        asked.append(text)
        if text == "d" or (text in "bc" and asked.count(text) < 3):
            raise Status(404 if text == "d" else 503)
        return 1.0

    async def later(problem, text):
        return plain(problem, text)

    settings = rewarded(on_error="miss", wrong=-2.0)
    (found,) = grades(grading.judge(settings, later if waits else plain), "abcd")
    assert found.score_G.tolist() == [1, 1, 1, -2] and found.missed == 1
    assert sorted(asked) == list("abbbcccd") and slept == [1.0, 2.0]
    assert "2 are asked again in 1 s" in capfd.readouterr().err
    asked.clear()
    with pytest.raises(ValueError, match="Status: 404"):  # the run ends anyway: nothing is retried
        grades(grading.judge(rewarded(), plain), "abcd")
    assert asked == list("abcd")


def test_the_page_s_service_is_asked_by_many_at_once_and_again(tmp_path, monkeypatch):
    """Half of the first requests get a 503; 40 are open at a time."""
    page = (pathlib.Path(__file__).parents[1] / "docs" / "own_reward.md").read_text()
    (shown,) = re.findall(r"```python\n([^`]*async def score[^`]*)```", page)
    lock, meeting, count = threading.Lock(), threading.Barrier(40), iter(range(10**6))

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            about = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = next(count)
            if number < 40:
                meeting.wait(60.0)
            if number % 2 and number < 40:
                self.send_error(503)
                return
            body = json.dumps({"score": len(about["response"])}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    monkeypatch.setattr(http.server.ThreadingHTTPServer, "request_queue_size", 40)
    server = http.server.ThreadingHTTPServer(("localhost", 0), Service)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "own.py").write_text(shown.replace("8000", str(server.server_port)))
    monkeypatch.setattr(time, "sleep", lambda s: None)
    found = judged(f"{tmp_path}/own.py:score", ["a" * (1 + i % 7) for i in range(40)], timeout_s=60)
    assert found.score_G.tolist() == [1 + i % 7 for i in range(40)]
    server.shutdown()


def test_a_group_s_grades_are_kept_for_the_whole_group():
    kept, asked = {}, []

    class Memory:
        get = staticmethod(lambda jobs: [kept.get(job) for job in jobs])
        put = staticmethod(kept.__setitem__)

    def score(problem, responses):
        asked.append(tuple(responses))
        return [Grade(float(len(responses)))] * len(responses)

    judge = grading.judge(rewarded(), score)._replace(memory=Memory)
    for texts in (["a", "a"], ["a", "a"], ["a", "a", "b"]):
        assert grades(judge, texts)[0].score_G.tolist() == [len(texts)] * len(texts)
    assert asked == [("a", "a"), ("a", "a", "b")]


def test_a_form_is_itself():
    form = forms.of(functions.tagged("x"))
    assert forms.of(form) is form and form(problem(), "<x></x>") == 1.0
    assert not forms.of(max).by_group  # C code, which does not say what it takes
