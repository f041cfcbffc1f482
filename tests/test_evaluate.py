"""avg@k, maj@k and pass@k against their definitions."""

import itertools

import numpy as np
import pytest

from dapo_jax import evaluate
from dapo_jax.log import scores


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            share = np.mean([any(s) for s in itertools.combinations(samples, k)])
            assert evaluate.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_does_not_overflow():
    assert evaluate.pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize(
    ("answers", "right", "score"),
    [
        (["7", "7", "3"], "7", 1.0),
        (["7", "3", "3"], "7", 0.0),
        (["7", "3"], "7", 0.5),  # a tie counts by its right share
        (["7", "3", "5", "5", "7", "3"], "5", 1 / 3),
        ([None, None, None, "7"], "7", 1.0),  # no answer is no vote
        ([None, None], "7", 0.0),
        (["3", "3"], "7", 0.0),
    ],
)
def test_majority(answers, right, score):
    correct = [a == right for a in answers]
    assert evaluate.majority(correct, answers) == pytest.approx(score)


def test_scores_average_over_problems():
    answers = [["7", "7", "3", "7"], ["1", "2", "2", None], ["5", "6", "5", "6"]]
    golds = ["7", "1", "6"]
    correct = np.array([[a == g for a in row] for row, g in zip(answers, golds, strict=True)])
    empty = np.zeros((3, 4))
    scores = evaluate.Scores(correct, answers, golds, empty, empty, [])
    assert scores.avg_at_k == pytest.approx((3 / 4 + 1 / 4 + 2 / 4) / 3)
    assert scores.maj_at_k == pytest.approx((1 + 0 + 1 / 2) / 3)
    assert scores.pass_at(1) == pytest.approx(scores.avg_at_k)
    assert scores.pass_at(2) == pytest.approx((1 + 1 / 2 + 5 / 6) / 3)
    assert scores.pass_at(4) == 1.0


def test_a_damaged_line_of_samples_is_named(tmp_path):
    """Its batch would be short of samples: it is to be made again."""
    rows = [{"problem": "p", "sample": i} for i in range(3)]
    scores.write_lines(tmp_path / "batch_000000.jsonl", rows)
    assert scores.finished(tmp_path) == {"p": rows}
    path = tmp_path / "batch_000001.jsonl"
    path.write_text('{"problem": "q"}\n\0\n')
    with pytest.raises(ValueError) as error:
        scores.finished(tmp_path)
    assert str(error.value).startswith(f"{path}: line 2 is damaged; remove the file: the same comm")
