"""Metrics against direct computation; files that hold each step once, whatever happened before."""

import errno
import json
import math
import time

import numpy as np
import pytest
from test_tags import events
from test_trackers import settings

from dapo_jax import config
from dapo_jax.dapo.dynamic_sampling import Collected, Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.log import metrics, tags
from dapo_jax.rollout.engine import Response


def response(n, truncated=False, seed=0):
    rng = np.random.default_rng([seed, n])
    logps = -rng.exponential(size=n).astype(np.float32)
    return Response(np.arange(n), logps, rng.random(n).astype(np.float32), truncated)


def group(position, correct, lengths, answers, shadow):
    rows = [response(n, n == 9, position) for n in lengths]
    source = "b/c" if position == 1 else "a"
    right = np.array(correct)
    grades = Grades(np.where(right, 1.0, -1.0), right, answers, np.array(shadow), source=source)
    return Group(position, [1, 2], rows, grades)


DRAWN = [
    group(0, [True, False, False], [2, 4, 9], ["7", None, "3"], [True, True, False]),
    group(1, [False, False, False], [1, 1, 3], [None, None, "1"], [False] * 3),
    group(2, [True, True, True], [5, 6, 9], ["2"] * 3, [True] * 3),
    group(3, [True, True, False], [8, 2, 2], ["2", "2", "9"], [True, True, False]),
]


A_TENTH_PER_TOKEN = config.base()
A_TENTH_PER_TOKEN.rollout.max_response_tokens = 9
A_TENTH_PER_TOKEN.reward.overlong_buffer_tokens = 9
A_TENTH_PER_TOKEN.reward.overlong_penalty = 0.9


def test_rollout_metrics():
    got = Collected([DRAWN[0], DRAWN[3]], [], DRAWN, 4, 2, 0.5)
    rows = [r for g in DRAWN for r in g.responses]
    log = metrics.rollout_metrics(A_TENTH_PER_TOKEN, got, 52)
    entropies = np.concatenate([r.entropies for r in rows])
    want = {
        "sampling/rounds": 2,
        "sampling/batch_groups": 2,
        "reward/mean": 0.0 - 5.2 / 12,  # six of twelve are right
        "reward/accuracy": 6 / 12,
        "reward/overlong_penalty": -5.2 / 12,
        "response/length_mean": 52 / 12,
        "response/length_max": 9,
        # lengths 1 1 2 2 2 3 4 5 6 8 9 9: between the two that surround the place p / 100 * 11
        "response/length_p50": 3.5,
        "response/length_p90": 8 + 0.9 * (9 - 8),
        "response/length_p99": 9,
        "response/truncated_frac": 2 / 12,
        "policy/entropy": np.concatenate([r.entropies for r in rows]).mean(),
        "policy/mean_prob": np.exp(np.concatenate([r.logps for r in rows])).mean(),
        "sampling/accept_frac": 2 / 4,
        "sampling/all_correct_frac": 1 / 4,
        "sampling/all_wrong_frac": 1 / 4,
        "sampling/parse_fail_frac": 3 / 12,
        "sampling/shadow_gain": 7 / 12 - 6 / 12,
        "reward/batch_accuracy": 3 / 6,
        "response/length_correct": (2 + 5 + 6 + 9 + 8 + 2) / 6,
        "response/length_wrong": (4 + 9 + 1 + 1 + 3 + 2) / 6,
        "source/a/accuracy": 6 / 9,
        "source/b/c/accuracy": 0.0,
    }
    # Groups with 0, 1, 2, 3 right responses; responses of 1, 2, ... 9 tokens.
    assert log.pop("sampling/groups_by_correct") == [1, 1, 1, 1]
    assert log.pop("response/length_hist") == [2, 3, 1, 1, 1, 1, 0, 1, 2]
    edges = [-1.0, *tags.ENTROPY_EDGES[1:]]
    assert log.pop("policy/entropy_hist") == np.histogram(entropies, edges)[0].tolist()
    assert log == pytest.approx(want, abs=1e-6)


def test_metrics_of_scores_of_which_one_was_missed():
    """Nothing speaks of right and wrong; a miss has a score and no parts."""
    parts = {"tags": np.array([0.0, 0.5, np.nan])}
    grades = Grades(np.array([0.25, 0.5, -3.0]), None, [None] * 3, None, parts, "a", missed=1)
    got = Collected([], [], [DRAWN[0]._replace(grades=grades)], 1, 1, 0.5)
    log = metrics.rollout_metrics(A_TENTH_PER_TOKEN, got, 15)
    assert log["reward/score"] == log["source/a/score"] == -0.75
    assert log["reward_part/tags"] == 0.25 and log["reward/missed_frac"] == 1 / 3
    assert not [t for t in log if "correct" in t or "accuracy" in t or "shadow" in t]


def test_of_what_there_is_none_nothing_is_said():
    for only, there, absent in ((DRAWN[1], "wrong", "correct"), (DRAWN[2], "correct", "wrong")):
        got = Collected([], [], [only], 1, 1, 0.5)
        log = metrics.rollout_metrics(A_TENTH_PER_TOKEN, got, 20)
        assert f"response/length_{there}" in log and f"response/length_{absent}" not in log
        assert "sampling/parse_fail_frac" in log
        only = only._replace(grades=only.grades._replace(answers=[None] * 3))  # a reward of yes, no
        log = metrics.rollout_metrics(A_TENTH_PER_TOKEN, got._replace(drawn=[only]), 20)
        assert ("sampling/parse_fail_frac" in log) == (there == "wrong")
    log = metrics.rollout_metrics(config.base(), Collected([], [], [], 0, 0, 1.0), 0)
    assert log == {"sampling/rounds": 0, "sampling/batch_groups": 0}


def test_a_histogram_s_bins_hold_their_upper_edge():
    """As TensorBoard reads them. All values are counted, those outside in the outer bins."""
    values = np.array([0, 1, 2, 3, 4, 99])
    assert metrics.histogram("response/length_hist", values, 4) == [2, 1, 1, 2]
    longest = 20_480
    counts = metrics.histogram("response/length_hist", np.array([1, 640, 641, 20_480]), longest)
    assert len(counts) == 32 and (counts[0], counts[1], counts[-1]) == (2, 1, 1)
    nats = np.array([-1e-7, 0.0, 0.001, 0.002, 11.9, 13.0])
    counts = metrics.histogram("policy/entropy_hist", nats, longest)
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (3, 1, 2, 6)


SUMMED = ("entropy", "prob", "clip_low", "clip_high", "dual_clip", "approx_kl", "ref_kl")


def updates():
    """Logs of two updates of 10 and 30 tokens; sums as `update` returns them."""
    one = dict(loss=0.5, tokens=10.0, ratio_max=1.5, sampler_gap=0.01, grad_norm=2.0, skipped=True)
    two = dict(loss=-0.1, tokens=30.0, ratio_max=1.2, sampler_gap=0.9, grad_norm=4.0, skipped=False)
    sums = lambda by: {name: by * n for n, name in enumerate(SUMMED, 1)}
    return [one | sums(1.0), two | sums(10.0)]


def test_update_metrics():
    log = metrics.update_metrics(updates(), with_reference=True)
    want = {
        "optim/skipped": 1, "optim/grad_norm": 3.0,
        "policy/loss": 0.2, "policy/batch_entropy": 11 / 40, "policy/batch_mean_prob": 22 / 40,
        "policy/clip_low_frac": 33 / 40, "policy/clip_high_frac": 44 / 40, "policy/ratio_max": 1.5,
        "policy/dual_clip_frac": 55 / 40, "policy/approx_kl": 66 / 40, "policy/ref_kl": 77 / 40,
        "policy/sampler_trainer_logprob_gap": 0.01,  # of the first update alone
    }  # fmt: skip
    assert log == pytest.approx(want)
    assert "policy/ref_kl" not in metrics.update_metrics(updates(), with_reference=False)
    weighted = [u | {"importance": 9.0, "importance_capped": 1.0} for u in updates()]
    added = {"policy/importance_mean": 18 / 40, "policy/importance_capped_frac": 2 / 40}
    assert metrics.update_metrics(weighted, with_reference=True) == pytest.approx(want | added)
    assert metrics.update_metrics([], with_reference=True) == {"optim/skipped": 0}


PLAIN, PLOTTED = settings(tensorboard=False), settings(text_every=0)


def write(workdir, resume_step, steps, board=False):
    writer = metrics.Writer(workdir, resume_step, PLOTTED if board else PLAIN)
    for step in steps:
        writer.record(step, {"reward/mean": step / 2 + resume_step})
        writer.lines("rollouts", step, [{"text": "é", "resumed": resume_step}])
    writer.close()


def plotted(workdir) -> list[tuple[int, float]]:
    values = ((e.step, v) for e in events(workdir) for v in e.summary.value)
    return sorted((step, v.simple_value) for step, v in values if v.HasField("simple_value"))


def test_a_resumed_run_holds_each_step_once(tmp_path):
    write(tmp_path, -1, range(6), board=True)
    (tmp_path / "eval" / "heldout").mkdir(parents=True)  # of the evaluate command
    for name in ("step_000003.jsonl", "step_000004.jsonl", "step_000009.jsonl.tmp"):
        (tmp_path / "eval" / name).touch()
    write(tmp_path, 3, [4, 5, 6], board=True)  # the run died after step 5; step 3 was saved
    records = metrics.read(tmp_path / "metrics.jsonl")
    want = [(s, s / 2 - 1) for s in range(4)] + [(s, s / 2 + 3) for s in (4, 5, 6)]
    assert [(r["step"], r["reward/mean"]) for r in records] == want == plotted(tmp_path)
    for step, file in enumerate(sorted((tmp_path / "rollouts").iterdir())):
        assert file.name == f"step_{step:06d}.jsonl"
        assert json.loads(file.read_text())["resumed"] == (-1 if step < 4 else 3)
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"heldout", "step_000003.jsonl"}
    metrics.Writer(tmp_path, -1, PLAIN).close()
    assert metrics.read(tmp_path / "metrics.jsonl") == []
    assert not (tmp_path / "tensorboard").exists() and not [*(tmp_path / "rollouts").iterdir()]


def test_what_a_full_disk_refuses_is_written_later(tmp_path, monkeypatch):
    """Also where the disk fills in the middle of a line."""
    said = []
    writer = metrics.Writer(tmp_path, -1, PLOTTED, said.append)
    writer.record(0, {"a": 0.0})
    path = tmp_path / "metrics.jsonl"

    def full(*_):
        with path.open("a") as file:
            file.write('{"step": 1, "a')
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(metrics.os, "fsync", full)
        for step in (1, 2):
            writer.record(step, {"a": float(step)})
        m.setattr(metrics.files, "write", full)
        writer.lines("rollouts", 2, [{"text": "x"}])
    assert [r["step"] for r in metrics.read(path)][:1] == [0]
    assert said == [f"warning: {path}: No space left on device; records wait in memory"]
    writer.record(3, {"a": 3.0})
    writer.close()
    assert [r["step"] for r in metrics.read(path)] == [0, 1, 2, 3]
    assert len(path.read_text().splitlines()) == 4
    assert plotted(tmp_path) == [(s, float(s)) for s in range(4)]
    assert (tmp_path / "rollouts" / "step_000002.jsonl").read_text() == '{"text": "x"}\n'


@pytest.mark.parametrize("garbage", ["\0garbage", "[1]", '{"step": null}', '{"step": 2', ""])
def test_a_damaged_line_costs_that_line(tmp_path, garbage):
    write(tmp_path, -1, range(7))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = garbage
    path.write_text("\n".join(lines)[:-9])  # the last one is cut off, as by a crash
    before, said = path.read_bytes(), []
    writer = metrics.Writer(tmp_path, 6, PLOTTED, said.append)
    writer.record(7, {"reward/mean": 7.0})
    writer.close()
    assert [r["step"] for r in metrics.read(path)] == [0, 1, 3, 4, 5, 7]
    assert [step for step, _ in plotted(tmp_path)] == [0, 1, 3, 4, 5, 7]
    assert said.pop() == (
        f"warning: {path}: has no record of step 6, from whose checkpoint this run goes on: it was"
        " written by a run in another workdir, or lines are lost"
    )
    kept = tmp_path / "metrics.jsonl.damaged"
    if not garbage:  # an empty line was no record
        assert not said and not kept.exists()
        return
    assert said == [
        f"warning: {path}: no record in lines [3] (1 in all); the file as it was is kept as"
        " metrics.jsonl.damaged"
    ]
    assert kept.read_bytes() == before
    path.write_text("x\n")
    metrics.Writer(tmp_path, 6, PLOTTED, said.append).close()
    assert kept.read_bytes() == before and (tmp_path / "metrics.jsonl.damaged.2").exists()


def test_tensorboard_s_folder_may_be_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/old").write_text("")
    (tmp_path / "tensorboard").symlink_to("there")
    write(tmp_path, -1, range(2), board=True)
    assert [step for step, _ in plotted(tmp_path)] == [0, 1]
    assert not (tmp_path / "there/old").exists()


def test_values_that_json_lacks_become_null(tmp_path):
    writer = metrics.Writer(tmp_path, -1, PLOTTED)
    values = dict(a=math.nan, b=np.float32(np.inf), c=np.int64(3), d=np.float32(0.5), e=-math.inf)
    writer.record(1, values)
    row = {"mean_entropy": math.nan, "logps": [0.5, -math.inf, 1], "pieces": ["a"], "correct": True}
    writer.lines("rollouts", 3, [row])
    writer.lines("rollouts", 2, [{"half": "\ud83d"}])
    writer.close()
    assert json.loads((tmp_path / "rollouts/step_000002.jsonl").read_text()) == {"half": "\ud83d"}
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert 0 <= time.time() - record.pop("time/wall") < 10**4
    assert json.dumps(record) == '{"step": 1, "a": null, "b": null, "c": 3, "d": 0.5, "e": null}'
    assert (tmp_path / "rollouts" / "step_000003.jsonl").read_text() == (
        '{"mean_entropy": null, "logps": [0.5, null, 1], "pieces": ["a"], "correct": true}\n'
    )
    assert plotted(tmp_path) == [(1, 0.5), (1, 3.0)]
