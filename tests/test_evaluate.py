"""avg@k, maj@k and pass@k against their definitions."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dapo_jax import build, config, parallel
from dapo_jax.data.problems import Encoded
from dapo_jax.evaluation import sampling, scores
from dapo_jax.model import qwen2


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            share = np.mean([any(s) for s in itertools.combinations(samples, k)])
            assert scores.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)
    assert scores.pass_at_k(10_000, 1, 5_000) == 0.5  # nothing overflows


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
    assert scores.majority(correct, answers) == pytest.approx(score)


def test_scores_average_over_problems():
    answers = [["7", "7", "3", "7"], ["1", "2", "2", None], ["5", "6", "5", "6"]]
    golds = ["7", "1", "6"]
    correct = np.array([[a == g for a in row] for row, g in zip(answers, golds, strict=True)])
    empty = np.zeros((3, 4))
    of = scores.Scores(correct, answers, golds, empty, empty, [])
    mean = (3 / 4 + 1 / 4 + 2 / 4) / 3
    wanted = {"avg@k": mean, "maj@k": (1 + 0 + 1 / 2) / 3, "pass@k": 1.0}
    assert of.headline() == pytest.approx(wanted)
    passed = scores.summary(of, ["a", "b", "c"])["pass@"]
    assert [passed[k] for k in "124"] == pytest.approx([mean, (1 + 1 / 2 + 5 / 6) / 3, 1.0])


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


@pytest.mark.slow
def test_a_runs_evaluation_is_one_call_with_the_samples_of_each_alone(tmp_path):
    c = config.base()
    c.model.update(dict(hidden_size=16, intermediate_size=16, num_layers=1))
    c.eval.k, c.eval.top_p, c.rollout.slots = 2, 0.7, 8
    text = build.load_text(c, tmp_path, None)
    cut = {s: Encoded(d.ids[:3], d.problems[:3], 0) for s, d in text.evals.items()}
    assert len(cut) > 1
    text = text._replace(evals=cut)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), parallel.AXES)
    machine = build.assemble(c, mesh, qwen2.shape_from_config(c), text.tokenizer.stop_ids)
    params = machine.engine.decode_params(build.initial_params(c, machine))
    calls, generate = [], machine.engine.generate
    machine.engine.generate = lambda *a, **k: calls.append(len(a[1])) or generate(*a, **k)

    evaluator = sampling.Evaluator(machine, params, text, 2)
    tags, rows = sampling.evaluate_sets(c, evaluator)
    assert calls == [len(cut) * 2 * 3 * 2] and len(rows) == len(cut) * 2 * 3
    asked = [(name, draw) for name in cut for draw in build.evaluation_draws(c)]
    together = sampling.evaluate(evaluator, [(cut[name], draw) for name, draw in asked])
    for (name, draw), got in zip(asked, together, strict=True):
        (alone,) = sampling.evaluate(evaluator, [(cut[name], draw)])
        tag = f"eval/{name}" + ("_top_p0.7" if draw.top_p < 1 else "")
        assert tags[f"{tag}/avg@k"] == alone.headline()["avg@k"]
        pair = (list(itertools.chain(*s.responses)) for s in (got, alone))
        for a, b in zip(*pair, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logps, b.logps)
    first, cutoff = (s.responses[0][0].tokens.tolist() for s in together[:2])
    assert first != cutoff
