"""TensorBoard's file beyond what tests/test_tags.py reads from a whole run: odd input, samples."""

from test_tags import events

from dapo_jax import config
from dapo_jax.log import tensorboard as board

ROW = dict(correct=True, truncated=False, reward=0.5, tokens=3, mean_entropy=0.25, answer="7")
ROW |= dict(prompt="p q", response="x\n**y**", extracted="7")


def values(workdir) -> list:
    return [(e.step, v) for e in events(workdir) for v in e.summary.value]


def test_what_is_no_point_is_left_out(tmp_path):
    out = board.Board(tmp_path / "tensorboard", config.base())
    odd = {"a": None, "b": [], "c": {}, "d": "text", "e": [0, 0], "f": ["x", 1], "g": [[1]]}
    out.record({"step": 3, "unknown/tag": 1.5, "mine": [1, 2], **odd})
    out.close()
    (step, number), (_, counts) = values(tmp_path)
    assert (step, number.tag, number.simple_value) == (3, "unknown/tag", 1.5)
    assert list(counts.histo.bucket) == [1, 2] and not counts.metadata.summary_description


def test_a_histogram_s_sums_are_those_of_its_bins_middles(tmp_path):
    out = board.Board(tmp_path / "tensorboard", config.base())
    out.record({"step": 0, "sampling/groups_by_correct": [2, 0, 3]})
    out.close()
    ((_, v),) = values(tmp_path)
    assert (v.histo.num, v.histo.sum, v.histo.sum_squares) == (5, 6, 12)
    assert (v.histo.min, v.histo.max) == (-0.5, 2.5)


def test_samples_are_markdown_that_leaves_a_response_as_it_is(tmp_path):
    long = ROW | dict(correct=False, truncated=True, reward=-2.0, response="z" * 5000)
    out = board.Board(tmp_path / "tensorboard", config.base())
    odd = dict(reward=[1], mean_entropy=None, response=[2], prompt={"a": 1}, answer={})
    out.samples(4, [ROW, long, odd])
    out.samples(5, [])
    out.close()
    ((step, v),) = values(tmp_path)
    first, second, third = v.tensor.string_val[0].decode().split("\n\n---\n\n")
    assert (step, v.tag) == (4, "samples/text_summary")
    head = "**right**, reward 0.5, tokens 3, mean_entropy 0.25; answer 7, found 7"
    assert first == f"{head}\n\n    p q\n\n    x\n    **y**"
    assert second.startswith("**wrong, truncated**, reward -2.0, ")
    assert "[3,000 characters]" in second and second.count("z") == 2000
    assert third.startswith("**wrong**, reward [1], tokens None, mean_entropy None; answer {}")
    assert third.endswith("\n\n    {'a': 1}\n\n    [2]")
