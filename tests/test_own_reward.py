"""A reward of one's own: a graded one, of which nothing is right or wrong, trained and resumed; and
the one that README shows, named on the command line as FILE.py:NAME."""

import pathlib
import re

import numpy as np
import pytest
import typed
from test_train import arrays, assert_same_bits, small, without_clocks

from dapo_jax import train
from dapo_jax.data import answers
from dapo_jax.data.problems import Problem
from dapo_jax.log import guards, metrics, tags
from dapo_jax.reward.grading import Grade

ROOT = pathlib.Path(__file__).parent.parent


def answering(problem, response: str) -> Grade:
    """Graded, with parts: the word "Answer" is wanted up to twice."""
    found = min(response.count("Answer"), 2) / 2
    return Grade(found, parts={"answers": found, "characters": len(response)})


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """The workdir of a run, and the batch of each step."""
    workdir, batches = tmp_path_factory.mktemp("three"), []
    hooks = train.Hooks(step=lambda state, record: batches.append(record.batch))
    assert train.train(small(3), workdir, score=answering, hooks=hooks)
    return workdir, batches


@pytest.mark.slow
def test_graded_groups_are_accepted_by_the_spread_of_their_scores(three_steps):
    workdir, batches = three_steps
    drawn = [g for batch in batches for g in batch.drawn]
    assert all(g.grades.right_G is None for g in drawn)
    differs = [len(set(g.grades.score_G)) > 1 for g in drawn]
    assert [g.mixed for g in drawn] == differs and 0 < sum(differs) < len(differs)
    for batch in batches:
        taken = [g.position for g in batch.drawn if len(set(g.grades.score_G)) > 1][:4]
        assert [g.position for g in batch.groups] == taken and len(taken) == 4
    last = metrics.read(workdir / "metrics.jsonl")[-1]
    assert last["optim/updates"] == 6 and last["optim/grad_norm"] > 0


def test_its_score_and_parts_are_logged_by_name(three_steps):
    workdir, batches = three_steps
    for record, batch in zip(metrics.read(workdir / "metrics.jsonl")[1:], batches, strict=True):
        grades = [g.grades for g in batch.drawn]
        mean = lambda of, grades=grades: pytest.approx(np.mean([of(g) for g in grades]))
        assert record["reward/score"] == mean(lambda g: g.score_G)
        assert record["reward_part/answers"] == mean(lambda g: g.parts_G["answers"])
        assert record["reward_part/characters"] == mean(lambda g: g.parts_G["characters"])
        assert record["source/variable_chain/score"] == record["reward/score"]


def test_its_records_hold_what_the_table_of_tags_says(three_steps):
    first, *middle, last = metrics.read(three_steps[0] / "metrics.jsonl")
    step = {"record", "step", "drawn", "trained", "scored", "parts"}
    for record, kinds in (
        (first, {"record", "start", "evaluation"}),
        *((m, step) for m in middle),
        (last, step | {"evaluation"}),
    ):
        there = {tags.family(t) for t in record if t != "step"}
        assert there - {"alarms"} == {name for name, t in tags.TAGS.items() if t.when in kinds}


def test_what_is_said_of_short_batches_and_alike_scores_fits_a_score_alone():
    c = small(1)
    log = {"sampling/rounds": 10, "sampling/batch_groups": 1, "sampling/accept_frac": 0.001}
    log["reward/score"] = 0.5
    assert guards.shortage(c, log) == (
        "1 of 4 groups have scores that differ after 10 rounds; training on them"
    )
    (alarm,) = guards.alarms(c, log, guards.History([], []))
    assert "let the score differ" in alarm and "wrong" not in alarm


def test_a_graded_run_resumes_bit_for_bit(three_steps, tmp_path):
    train.train(small(2), tmp_path, score=answering)
    train.train(small(3), tmp_path, score=answering)
    assert_same_bits(arrays(tmp_path, 3), arrays(three_steps[0], 3))
    assert without_clocks(tmp_path)[-1] == without_clocks(three_steps[0])[-1]


SHORT = """
def short(problem, response):
    assert len(response) % 5, "five characters, or ten"
    return 1 / (1 + len(response))
"""


@pytest.mark.slow
def test_several_train_the_same_bits_in_workers_as_in_the_run(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    seen = []
    for workers in (0, 3):
        c = small(1)
        c.reward.function = f"{tmp_path}/short.py:short,0.1*exact,done=0.5*format"
        c.reward.on_error, c.reward.workers = "miss", workers
        workdir = tmp_path / f"{workers}"
        assert train.train(c, workdir)
        seen.append((without_clocks(workdir), arrays(workdir, 1)))
    (here, first), (there, second) = seen
    assert here == there
    assert_same_bits(first, second)
    (step,) = [r for r in here if "reward/missed_frac" in r]
    assert tags.family("reward/missed_frac") and 0 < step["reward/missed_frac"] < 1
    parts = {t.partition("/")[2]: v for t, v in step.items() if t.startswith("reward_part/")}
    assert parts.keys() == {"short", "exact", "done"} and 0 < parts["short"] < 1
    drawn = 1 - step["reward/missed_frac"]  # a miss scores reward.wrong and has no parts
    want = drawn * (parts["short"] + 0.1 * parts["exact"] + 0.5 * parts["done"]) - (1 - drawn)
    assert step["reward/mean"] - step["reward/overlong_penalty"] == pytest.approx(want)


CONFIG = f"""import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_train import small
def get_config():
    return small(1)
"""


@pytest.fixture
def start(shell, tmp_path):
    (tmp_path / "tiny.py").write_text(CONFIG)
    command = ("-m", "dapo_jax.train", "--config=tiny.py", "--workdir=run")
    command += ("--config.reward.function=my_reward.py:score",)
    eight = f"{typed.SOON} --xla_force_host_platform_device_count=8"
    return lambda *more: shell.python(*command, *more, cwd=tmp_path, XLA_FLAGS=eight)


@pytest.mark.slow
def test_the_reward_of_readme_trains_and_is_refused_when_its_file_changes(start, tmp_path):
    (shown,) = re.findall(r"```python\n([^`]*def score[^`]*)```", (ROOT / "README.md").read_text())
    assert len(shown.splitlines()) <= 10
    (tmp_path / "my_reward.py").write_text(shown)
    trained = start()
    assert trained.returncode == 0, trained.stderr
    parts = {t for t in metrics.read(tmp_path / "run/metrics.jsonl")[-1] if "reward_part/" in t}
    assert parts
    (tmp_path / "my_reward.py").write_text(shown + "# a remark\n")
    refused = start("--config.steps=2")
    assert refused.returncode == 1
    wrong, *_ = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert wrong.endswith("the file of config.reward.function: it has other contents")


def test_the_reward_of_the_page_about_rewards_says_right_or_wrong():
    text = (ROOT / "docs" / "own_reward.md").read_text()
    (shown,) = re.findall(r"```python\n([^`]*def score[^`]*)```", text)
    exec(shown, names := {})
    problem = Problem("0", (("user", "1 + 2 ?"),), "3", "sums")
    assert names["score"](problem, "so Answer: 3") == Grade(1.0, True)
    assert names["score"](problem, "3 or 4") == Grade(-1.0, False)
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [*answers.MODES, *Grade._fields]
    assert all(f"`{field}`" in text for field in Problem._fields)
