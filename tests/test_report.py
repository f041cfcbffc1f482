"""The console's words, and responses as rows to read."""

import io
import sys
import types

import numpy as np

from dapo_jax import build, config
from dapo_jax.dapo.dynamic_sampling import Collected, Group
from dapo_jax.dapo.reward import Grade, Grades
from dapo_jax.dapo.state import Counters
from dapo_jax.data.problems import Encoded, Problem
from dapo_jax.log import report
from dapo_jax.reward.grading import Judge
from dapo_jax.rollout.engine import Response


def test_a_line_a_step_where_no_terminal_is(monkeypatch):
    """The time left is the median step times the steps left, so that compiling does not count."""
    now = iter([0.0, 100.0, 102.0, 104.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    said, file = [], io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    progress = report.Progress(64, 1, said.append)
    for _ in range(3):
        progress.update({"reward/accuracy": 0.5, "perf/tokens_per_s": 12345.6, "optim/lr": 1.0})
    progress.close()
    assert said[0].startswith("step 2/64  acc 0.50 tok/s 12,346  eta ") and len(said) == 3
    assert said[2].endswith("eta 02:00") and file.getvalue() == ""


def test_a_phase_that_takes_long_says_every_30_s_that_it_goes_on(monkeypatch):
    now = iter([0.0, 100.0, 129.0, 131.0, 140.0, 162.0, 200.0, 205.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    phase = report.Phase((said := []).append)
    phase.begins("rollout")
    for finished in (1, 1000, 2, 3):
        phase.begins("chunk")
        phase.progress(finished)
    phase.begins("evaluation")
    phase.progress(7)
    took = ("1,001 responses ended in 00:31", "1,006 responses ended in 01:02")
    assert said == [f"  rollout: {x}" for x in took]


def test_a_line_a_step_and_a_bar_where_a_terminal_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said, file = [], io.StringIO()
    file.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", file)
    progress = report.Progress(64, 11, said.append)
    progress.update({"reward/accuracy": 0.5})
    progress.update({})
    progress.close()
    assert said == ["step 12/64  acc 0.50", "step 13/64  "]
    assert "13/64" in file.getvalue() and "<" in file.getvalue()  # the bar has the time left


def test_the_last_words():
    """Also of sets that are gone or came later, and of a number that was not finite."""
    state = Counters(step=2, updates=4, samples=1000, tokens=7)
    records = [
        {"step": 0, "eval/a/avg@k": 0.1, "eval/b/avg@k": 0.3, "time/eval_s": 1.0},
        {"step": 1, "eval/a/avg@k": None, "time/eval_s": 1.0, "alarms": ["x"]},
        {"step": 2, "eval/a/avg@k": 0.25, "eval/c/avg@k": 0.4, "time/eval_s": 1.0},
    ]
    run = config.base()
    said = report.summary(run, "runs/x", state, "", "", records)
    assert said.startswith("done: 2 steps, 4 updates, 1,000 responses, 7 tokens\n")
    assert "alarms in 1 steps, the last in step 1" in said
    assert "curves: tensorboard --logdir runs/x/tensorboard (pip install tensorboard)" in said
    lines = [" ".join(line.split()) for line in said.splitlines() if "avg@k" in line]
    a, b, c = "0.10 -> - -> 0.25", "0.30 -> - -> -", "- -> - -> 0.40"
    assert lines == [f"eval/a/avg@k {a}", f"eval/b/avg@k {b}", f"eval/c/avg@k {c}"]
    assert said.endswith("\n  samples: runs/x/rollouts, checkpoints: runs/x/checkpoints")
    stopped = report.summary(run, "x", state, "why", "", [])
    assert stopped.startswith("stopped after step 2, saved: why")
    run.log.tensorboard, run.checkpoint.directory = False, "gs://b/c"
    said = report.summary(run, "x", state, "", "cut off", [])
    assert said == "cut off\n  samples: x/rollouts, checkpoints: gs://b/c"


def group(position: int, correct: list[bool], truncated: list[bool]) -> Group:
    full = lambda n, x: np.full(n, x, np.float32)
    rows = [
        Response(np.arange(n), full(n, -0.25), full(n, 0.5), cut)
        for n, cut in enumerate(truncated, 1)
    ]
    right = np.array(correct)
    return Group(position, [7, 8], rows, Grades(np.where(right, 2.0, 0.0), right))


R, W, CUT, END = True, False, True, False
FIRST = group(3, [W, R, R], [CUT, END, END])
FIRST = FIRST._replace(grades=FIRST.grades._replace(answers=["9", "12", "12"]))
SECOND = group(4, [R, W, W], [END, END, CUT])
THIRD = group(6, [R, W, R], [CUT, END, CUT])
REJECTED = group(5, [W, W, W], [CUT, END, CUT])
GOT = Collected([FIRST, SECOND, THIRD], [], [FIRST, SECOND, REJECTED, THIRD], 7, 1, 0.5)


def test_a_right_one_and_a_wrong_one_of_the_first_groups_and_truncated_ones():
    positions = lambda count: [(g.position, i) for g, i in report.chosen(GOT, count)]
    assert positions(0) == []
    assert positions(1) == [(3, 0), (3, 1), (4, 2)]  # (3, 0) is truncated, and there already
    assert positions(2) == [(3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (6, 0)]
    # Of the batch as far as it has them, then of what the filter rejected; each once.
    assert positions(9)[6:] == [(4, 2), (6, 2), (5, 0), (5, 2)]


def test_a_row_holds_what_a_reader_needs():
    words = ["a", "b ", "\ufffd"]
    decode = lambda ids, **_: "".join(words[i] if i < 3 else f"<{i}>" for i in ids)
    c = config.base()
    c.log.samples, c.rollout.max_response_tokens = 1, 8
    c.reward.overlong_buffer_tokens = 8  # so that every token costs 1/8
    asked = [Problem(f"id{n}", (), "12", "math") for n in range(7)]
    # Of a group that a restart has carried over.
    read_again = lambda problem, said: Grade(2.0 * (len(said) == 1), len(said) == 1, said[-1])
    tokenizer, encoded = types.SimpleNamespace(decode=decode), Encoded([[7, 8]] * 7, asked, 0)
    text = build.Text(tokenizer, encoded, {}, [], Judge(read_again))
    rows = list(report.samples(c, text, range(7), GOT))
    assert rows[-1] == {
        "position": 4, "problem": "id4", "source": "math", "prompt": "<7><8>", "answer": "12",
        "response": "ab \ufffd", "extracted": "\ufffd", "correct": False, "reward": -0.375,
        "tokens": 3, "truncated": True, "mean_entropy": 0.5, "pieces": ["a", "b ", "\ufffd"],
        "entropies": [0.5] * 3, "logps": [-0.25] * 3,
    }  # fmt: skip
    assert rows[0]["extracted"] == "9"  # what it was graded by
    assert [(r["correct"], r["tokens"]) for r in rows] == [(False, 1), (True, 2), (False, 3)]
