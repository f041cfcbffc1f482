"""The console's words, and responses as rows to read."""

import types

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Collected, Group
from dapo_jax.data.problems import Problem
from dapo_jax.rollout.engine import Response
from dapo_jax.run import report

# ------------------------------------------------------------------------------------------------
# Console
# ------------------------------------------------------------------------------------------------


def test_short_shows_what_there_is():
    log = {"reward/accuracy": 0.5, "perf/tokens_per_s": 12345.6, "optim/lr": 1.0}
    assert report.short(log) == "acc 0.50 tok/s 12,346"
    assert report.short({}) == ""


def test_evaluation_lines():
    log = {"eval/b/avg@k": 0.25, "eval/a/avg@k": 0.5, "eval/a/length_mean": 9.0, "reward/mean": 0.0}
    a, b = report.evaluation_lines(7, log)
    assert a.split() == ["step", "7", "a", "avg@k", "0.500"]
    assert b.split() == ["step", "7", "b", "avg@k", "0.250"]


# ------------------------------------------------------------------------------------------------
# Samples
# ------------------------------------------------------------------------------------------------


def group(position: int, correct: list[bool], truncated: list[bool]) -> Group:
    rows = [
        Response(
            np.arange(n + 1), np.full(n + 1, -0.25, np.float32), np.full(n + 1, 0.5, np.float32), t
        )
        for n, t in enumerate(truncated)
    ]
    return Group(position, [7, 8], rows, np.array(correct))


R, W, CUT, END = True, False, True, False
FIRST = group(3, [W, R, R], [CUT, END, END])
SECOND = group(4, [R, W, W], [END, END, CUT])
THIRD = group(6, [R, W, R], [CUT, END, CUT])
REJECTED = group(5, [W, W, W], [CUT, END, CUT])
GOT = Collected([FIRST, SECOND, THIRD], [], [FIRST, SECOND, REJECTED, THIRD], 7, 1, 0.5)


def positions(count: int) -> list[tuple[int, int]]:
    return [(g.position, i) for g, i in report.chosen(GOT, count)]


def test_a_right_one_and_a_wrong_one_of_the_first_groups_and_truncated_ones():
    assert positions(0) == []
    assert positions(1) == [(3, 0), (3, 1), (4, 2)]  # (3, 0) is truncated, and there already
    assert positions(2) == [(3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (6, 0)]
    # Of the batch as far as it has them, then of what the filter rejected; each once.
    assert positions(9)[6:] == [(4, 2), (6, 2), (5, 0), (5, 2)]


def test_a_row_holds_what_a_reader_needs():
    words = ["a", "b ", "\ufffd"]

    def decode(ids, skip_special=True):
        return "".join(words[i] if i < 3 else f"<{i}>" for i in ids)

    rows = list(
        report.samples(
            GOT,
            1,
            lambda position: Problem(f"id{position}", (), "12", "math"),
            types.SimpleNamespace(decode=decode),
            lambda text, answer: text[-1] if answer == "12" else None,
            lambda correct, length: correct * 2.0 - length / 8,
        )
    )
    assert rows[-1] == {
        "position": 4,
        "problem": "id4",
        "source": "math",
        "prompt": "<7><8>",
        "response": "ab \ufffd",
        "answer": "12",
        "extracted": "\ufffd",
        "correct": False,
        "reward": -0.375,
        "tokens": 3,
        "truncated": True,
        "mean_entropy": 0.5,
        "pieces": ["a", "b ", "\ufffd"],
        "entropies": [0.5] * 3,
        "logps": [-0.25] * 3,
    }
    assert [(r["correct"], r["tokens"]) for r in rows] == [(False, 1), (True, 2), (False, 3)]
