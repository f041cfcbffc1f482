"""Rewards of one's own: a graded one, of which nothing is right or wrong; those of the pages."""

import re

import pytest
from scripts import ROOT
from test_train import arrays, assert_same_bits, small, without_clocks

from dapo_jax import config, train
from dapo_jax.log import guards, metrics, tags
from dapo_jax.reward.grading import Grade


def answering(problem, response: str) -> Grade:
    """Graded, with parts: the word "Answer" is wanted up to twice."""
    found = min(response.count("Answer"), 2) / 2
    return Grade(found, parts={"answers": found, "characters": len(response)})


def test_what_is_said_of_short_batches_and_alike_scores_fits_a_score_alone():
    c = small(1)
    log = {"sampling/rounds": 10, "sampling/batch_groups": 1, "sampling/accept_frac": 0.001}
    log["reward/score"] = 0.5
    assert guards.shortage(c, log) == (
        "1 of 4 groups have scores that differ after 10 rounds; training on them"
    )
    (alarm,) = guards.alarms(c, log, guards.History([], []))
    assert "let the score differ" in alarm and "wrong" not in alarm


@pytest.mark.slow
def test_a_graded_run_resumes_bit_for_bit_and_has_its_own_tags(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for steps, workdir in ((3, whole), (2, cut), (3, cut)):
        assert train.train(small(steps), workdir, score=answering)
    assert_same_bits(arrays(cut, 3), arrays(whole, 3))
    assert without_clocks(cut)[-1] == without_clocks(whole)[-1]
    *_, last = metrics.read(whole / "metrics.jsonl")
    kinds = {"record", "step", "drawn", "trained", "scored", "parts", "evaluation"}
    there = {tags.family(t) for t in last if t != "step"}
    assert there - {"alarms"} == {name for name, t in tags.TAGS.items() if t.when in kinds}


def test_the_reward_of_readme_trains_and_is_refused_when_its_file_changes(tmp_path):
    (shown,) = re.findall(r"```python\n([^`]*def score[^`]*)```", (ROOT / "README.md").read_text())
    file, c = tmp_path / "my_reward.py", small(1)
    file.write_text(shown)
    c.reward.function = f"{file}:score"
    assert train.train(c, tmp_path / "run")
    last = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert {t for t in last if "part/" in t} == {"reward_part/right", "reward_part/brief"}
    file.write_text(shown + "# a remark\n")
    c.steps = 2
    with pytest.raises(config.ConfigError, match=r"file of config\.reward\.function: it has other"):
        train.train(c, tmp_path / "run")
