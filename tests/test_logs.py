"""Logs read as series: our workdirs, verl's console and CSV, other CSV, JSON lines; and what is
none of these."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from dapo_jax.lab.dynamics import logs, verl
from dapo_jax.log import tags

NO_LOGS = Path(__file__).parent / "data" / "no_logs.jsonl"
VERL_CSV = "train_logs/verl_dapo_rloo_qwen2.5-1.5b_steps.csv"

ROWS = [
    {"step": 0, "eval/heldout/avg@k": 0.1, "time/eval_s": 2.0},
    {"step": 1, "policy/entropy": 0.5, "reward/mean": -0.5, "sampling/rounds": 2},
    {"step": 2, "policy/entropy": None, "reward/mean": 0.25, "sampling/rounds": 3}
    | {"sampling/groups_by_correct": [4, 1, 0, 2], "alarms": ["entropy is low; try <this>"]},
    {"step": 3, "policy/entropy": 0.25, "sampling/groups_by_correct": [3, 2, 1, 1]}
    | {"odd/huge": [10**400, 1]},
]


def write(path, rows, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return str(path)


def plain(series):
    return [(int(s), None if math.isnan(v) else float(v)) for s, v in zip(*series, strict=True)]


@pytest.mark.parametrize("where", ["disk", "gs://b"])
def test_a_workdir(where, tmp_path, bucket):
    home, workdir = (tmp_path, f"{tmp_path}/run") if where == "disk" else (bucket, "gs://b/run")
    write(home / "run/metrics.jsonl", ROWS, tail='{"step": 4, "policy/ent')  # cut by a crash
    run = logs.read(workdir)
    assert run.name == "run" and run.path == workdir and logs.last_step(run) == 3
    assert plain(run.series["policy/entropy"]) == [(1, 0.5), (2, None), (3, 0.25)]
    assert plain(run.series["eval/heldout/avg@k"]) == [(0, 0.1)]
    assert not {"alarms", "sampling/groups_by_correct", "step"} & set(run.series)
    steps, counts = logs.histograms(workdir)["sampling/groups_by_correct"]
    assert steps.tolist() == [2, 3] and counts.tolist() == [[4, 1, 0, 2], [3, 2, 1, 1]]
    assert plain(([0, 1], logs.histograms(workdir)["odd/huge"][1][0])) == [(0, None), (1, 1.0)]
    assert logs.alarms(workdir) == [(2, ROWS[2]["alarms"][0])]
    with pytest.raises(ValueError, match=f"{workdir}/y: no such file or directory"):
        logs.read(f"{workdir}/y")


def test_names_that_differ(tmp_path):
    paths = [write(tmp_path / f"{d}/run.jsonl", ROWS[:1]) for d in "ab"]
    assert [r.name for r in logs.compare(paths)] == paths
    paths.append(write(tmp_path / "other.jsonl", ROWS[:1]))
    assert [r.name for r in logs.compare(paths)][2] == "other"


def console(step, items):
    return f"step:{step} - " + " - ".join(f"{k}:{v}" for k, v in items.items())


def test_verl_console_lines(tmp_path):
    first, second = {"actor/entropy": 0.5, "critic/score/mean": -0.103}, {"actor/entropy": 0.25}
    lines = (
        "{'actor_rollout_ref': {'model': {}}}",
        "(TaskRunner pid=71) ('Initial validation metrics: {}')",
        "\x1b[36m(TaskRunner pid=71)\x1b[0m " + console(0, {"val-core/aime/acc/mean@32": 0.1}),
        "Training Progress:   1%|1 | 1/90\r(TaskRunner pid=71) " + console(1, first),
        "2026-01-01 10:00:00 " + console(2, {"actor/entropy": "np.float64(0.75)"}),
        "(TaskRunner pid=71) " + console(2, second) + "\x1b[32m [repeated 2x across cluster]",
        "(TaskRunner pid=71) " + console(3, {"actor/lr": 1e-06}) + " - actor/gra",
    )
    (tmp_path / "verl.log").write_text("\n".join(lines))
    run = logs.read(str(tmp_path / "verl.log"))
    assert run.name == "verl"
    assert plain(run.series["policy/batch_entropy"]) == [(1, 0.5), (2, 0.25)]  # the later of two
    assert plain(run.series["eval/aime/avg@k"]) == [(0, 0.1)]
    assert plain(run.series["optim/lr"]) == [(3, 1e-6)]
    assert "critic/score/mean" in run.series  # of no known scale: as it is


@pytest.mark.parametrize(
    "low, high, mean, reward, accuracy",
    [
        ((0, 0), (1, 1), (0.25, 0.75), (-0.5, 0.5), (0.25, 0.75)),
        ((-1, -1), (1, 1), (-0.5, 0.5), (-0.5, 0.5), (0.25, 0.75)),
        ((-2, -1), (1, 1), (-0.5, 0.5), (-0.5, 0.5), None),  # with a length penalty
        ((0, 0.2), (1, 1), (0.25, 0.75), None, None),  # some other reward
    ],
)
def test_verl_rewards_in_our_unit(low, high, mean, reward, accuracy):
    steps = np.array([1, 2])
    names = zip(("min", "max", "mean"), (low, high, mean), strict=True)
    ours, of = verl.translate({f"critic/score/{n}": (steps, np.array(v, float)) for n, v in names})
    for tag, wanted in (("reward/mean", reward), ("reward/batch_accuracy", accuracy)):
        assert (tuple(ours[tag][1]) if tag in ours else None) == wanted
    assert ("critic/score/mean" in ours) == (reward is None)
    assert of == ({"reward/mean": "trained batch"} if reward else {})


def test_a_real_verl_log(assets):
    path = assets / VERL_CSV
    with path.open() as file:
        rows = list(csv.DictReader(file))
    run = logs.read(str(path))
    column = lambda name: np.array([float(r[name] or 0) for r in rows])
    seconds = lambda *names: sum(column(f"timing_s/{name}") for name in names)
    wanted = {
        "response/truncated_frac": column("response_length/clip_ratio"),
        "policy/clip_frac": column("actor/pg_clipfrac"),
        "reward/mean": 2 * column("critic/score/mean") - 1,
        "reward/batch_accuracy": column("critic/score/mean"),
        "time/update_s": seconds("update_actor", "old_log_prob", "ref"),
        "time/step_s": seconds("step") - seconds("testing"),
    }
    for tag, values in wanted.items():
        assert run.series[tag][0].tolist() == list(range(1, 191))
        np.testing.assert_allclose(run.series[tag][1], values, atol=1e-9, err_msg=tag)
    assert len(run.series["sampling/rounds"][0]) == 95  # a gap is no zero
    assert "perf/throughput" in run.series  # under its own name


def test_every_name_of_ours_is_a_tag():
    assert all(tags.family(tag) for tag in verl.NAMES.keys() - {"policy/clip_frac"})
    assert all(tags.family(f"eval/x/{score}") for score in verl.SCORES.values())
    old, of = verl.translate({"actor/entropy_loss": (np.array([1]), np.array([0.5]))})
    assert list(old) == ["policy/batch_entropy"] and of == {}


def test_a_csv_that_is_being_written(tmp_path):
    (tmp_path / "x.csv").write_text('step, "a",b,c\n1,2,word,\n2,3,word,4\n3,4,wo')
    series = logs.read(str(tmp_path / "x.csv")).series
    assert {tag: plain(s) for tag, s in series.items()} == {"a": [(1, 2), (2, 3)], "c": [(2, 4)]}


def test_numbers_that_are_none(tmp_path):
    text = '{"step": 1, "a": NaN, "b": 1e999, "c": true, "d": "x", "e": 1' + "0" * 400 + "}\n"
    (tmp_path / "x.jsonl").write_text(text)
    series = logs.read(str(tmp_path / "x.jsonl")).series
    assert {k: plain(s) for k, s in series.items()} == {k: [(1, None)] for k in "abe"}


@pytest.mark.parametrize("case", NO_LOGS.read_text().splitlines())
def test_what_is_no_log(tmp_path, monkeypatch, case):
    """content: of the file, one byte a character."""
    case = json.loads(case)
    monkeypatch.chdir(tmp_path)
    if case["content"]:
        (tmp_path / case["name"]).write_text(case["content"], encoding="latin-1")
    with pytest.raises(ValueError, match=case["message"]) as error:
        logs.read(case["name"])
    assert "\n" not in str(error.value)
