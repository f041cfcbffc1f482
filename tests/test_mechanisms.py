"""The mechanism experiments: what each arm switches, the bases' examples, verdicts on made-up runs
with known answers, the report."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks import harness, mechanisms
from dapo_jax import config as config_lib
from dapo_jax.data import arithmetic
from dapo_jax.lab.experiments import bandit, bases, pool, studies, study, training
from dapo_jax.run import warmup

ARMS = {name: arm for of in studies.ALL.values() for name, arm in of.arms.items()}


def settings(arm):
    return study.settings(pathlib.Path("x"), ARMS[arm].base, ARMS[arm].changes, seed=3, base_seed=1)


SWITCHES = {
    ("mean_sample", "mean_token"): "loss.normalizer",
    ("filter_loss", "filter_off"): "loss.overlong_filter",
    ("filter_group", "filter_off"): "loss.overlong_filter",
    ("filter_group_soft", "filter_group"): "reward.overlong_penalty",
    ("ramble_group_soft", "ramble_group"): "reward.overlong_penalty",
    ("dynamic_on", "dynamic_off"): "dynamic_sampling.enabled",
    # As many steps of the policy.
    ("values_pretrained", "values_at_once"): "critic.pretrain_steps steps",
}


@pytest.mark.parametrize("arms", SWITCHES)
def test_arms_that_are_compared_differ_in_one_switch(arms):
    a, b = (config_lib.leaves(settings(arm)) for arm in arms)
    assert {name for name in a if a[name] != b[name]} == set(SWITCHES[arms].split())
    assert len({ARMS[arm].base for arm in arms}) == 1


@pytest.mark.parametrize("arm", ARMS)
def test_arms_are_valid(arm):
    c = settings(arm)
    config_lib.validate(c, 1)
    assert c.seed == 3 and f"base_{ARMS[arm].base}_1" in c.init_from


def test_a_run_s_result_is_what_it_logged(tmp_path, monkeypatch):
    records = [
        {"step": 0, "eval/k2/avg@k": 0.25, "eval/k3/avg@k": 0.5, "eval/k3/pass@k": 1.0},
        {"step": 1, "policy/entropy": 0.5, "spent/tokens": 9},
        {"step": 2, "policy/entropy": 0.25, "eval/k2/avg@k": 1.0},
    ]
    monkeypatch.setattr(training, "trained", lambda config, where: (records, 1.5))
    got = study.run(tmp_path / "x", "careful", {"steps": 2}, 0, 0)
    assert got["evaluations"] == {"0": {"k2": 0.25, "k3": 0.5}, "2": {"k2": 1.0}}
    assert list(got["series"]) == list(study.SERIES) and got["cpu_s"] == 1.5
    assert got["series"]["policy/entropy"] == [0.5, 0.25]
    assert got["series"]["spent/tokens"] == [9, None]


def test_a_run_that_was_cut_off_is_no_result(tmp_path, monkeypatch):
    """SIGTERM lets a training return normally, short of its last step."""
    monkeypatch.setattr(training.train, "train", lambda c, where: False)
    with pytest.raises(RuntimeError, match="cut off by SIGTERM; the same command goes on"):
        training.run(tmp_path / "x", {})


def test_examples_give_each_level_its_style():
    """`careful` is mostly careful where it will fit, and half the time where it will not."""
    mix = bases.HABITS["careful"].mix
    phase = warmup.Phase("careful", 0, 0.0, mix, 5, 40)
    made = list(warmup.examples(phase, 4000))
    assert len(made) == 4000
    for k, careful in ((2, 0.85), (3, 0.85), (4, 0.45), (5, 0.45)):
        mine = [t for t in made if len(t.prompt.split()) == 3 * k + 3]
        share = np.mean([t.response.startswith(arithmetic.WAIT) for t in mine])
        assert len(mine) == 1000 and share == pytest.approx(careful, abs=0.05)


def test_problem_files_hold_their_levels_and_stay_apart(tmp_path):
    bases.write_problems(tmp_path)
    asked = []
    for file, levels, count in (
        (bases.train_file(tmp_path, (2, 3, 4)), {2, 3, 4}, 4096),
        (tmp_path / "heldout_k4.jsonl", {4}, bases.TEST_PROBLEMS),
    ):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert {row["extra_info"]["k"] for row in rows} == levels and len(rows) == count
        asked.append({row["prompt"][0]["content"] for row in rows})
    assert not asked[0] & asked[1]


def test_one_number_per_run():
    values = [1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 2, None, 2]
    of = lambda reduce, n=13: study.series("x", reduce)({"series": {"x": values[:n]}})
    assert of(study.peak, 11) == pytest.approx(6)
    assert of(studies.LAST) == pytest.approx((6 * 2 + 2 * 2) / 4)
    assert of(slice(4, 6)) == 3.5
    run = {"evaluations": {s: {"heldout": float(s)} for s in ("65", "70", "80")}}
    assert studies.late(run) == 75
    tested = {"evaluations": {"9": {"k2": 0}, "10": {"k2": 1, "k3": 2}}}
    assert study.level(2, 3)(tested) == 1.5


# Arm -> (length, truncation and explained variance, accuracy), in units of `better`.
HIGH = {
    "mean_sample": (1, 0), "mean_token": (0, 0), "filter_off": (0, -1), "filter_loss": (0, 0),
    "filter_group": (2, 0), "filter_group_soft": (0, 0), "ramble_group": (1, 0),
    "ramble_group_soft": (0, 0), "dynamic_off": (0, 0), "dynamic_on": (0, 1),
    "values_at_once": (0, 0), "values_pretrained": (1, 0),
}  # fmt: skip


def made_up(seeds: int, better: float):
    """Results in which the deciding side of every contrast is better by about `better`."""
    rng = np.random.default_rng(0)
    base_of = mechanisms.base_seeds(seeds)
    noisy = lambda *n: 0.01 * rng.standard_normal(n)
    results = {}
    for task in studies.tasks(list(studies.ALL), base_of):
        found = {}
        if task.work is bases.make:
            found = {"evaluations": {"0": {f"k{k}": 0.5 for k in bases.TEST_LEVELS}}}
        elif task.work is study.run:
            arm = task.folder.rpartition("_")[0]
            long, right = HIGH[arm]
            series = 0.3 + better * long + noisy(len(study.SERIES), ARMS[arm].changes["steps"])
            sets = ("heldout", *(f"k{k}" for k in bases.TEST_LEVELS))
            scores = dict.fromkeys(sets, float(0.5 + better * right + noisy()))
            found = {"series": dict(zip(study.SERIES, series.tolist(), strict=True))}
            found["evaluations"] = {"0": scores, "80": scores}
        elif task.work is bandit.play:
            _, bound, positive, played = task.arguments
            gain = better * ((0.2, 0.28, 0.4, 10.0).index(bound) + bool(positive))
            rates = 1.4 + gain + noisy(len(played))
            curves = [[min(0.01 * float(r) ** i, 1.0) for i in range(21)] for r in rates]
            found = {"curves": dict(zip(map(str, played), curves, strict=True))}
        results[task.folder] = found | {"cpu_s": 1.0}
    return study.Runs(results, base_of)


@pytest.mark.parametrize("better", [0.1, 0.0])
def test_verdicts_follow_the_numbers_and_every_deciding_contrast_is_needed(better):
    runs = made_up(6, better)
    every = {name: of.compare(runs) for name, of in studies.ALL.items()}
    for name, found in study.told(every).items():
        assert all(ax.lines and ax.get_ylabel() for ax in studies.ALL[name].figure(runs).axes)
        assert study.shown(found) == (better > 0), name
        for i, x in enumerate(found):
            assert x.told == x.shown and x.told <= bool(x.contrast.expected)
            if better and x.contrast.expected:
                assert not study.shown([*found[:i], x._replace(told=False), *found[i + 1 :]])
                other = x._replace(after=x.before, before=x.after)  # told apart, the wrong way
                assert other.told and not study.shown([other, *found])
                none = every | {name: [*found[:i], x._replace(after=x.before), *found[i + 1 :]]}
                assert not study.shown(study.told(none)[name])


def test_what_decides_is_corrected_for_the_number_of_contrasts():
    one = study.Compared(study.Contrast("x", "a", "b", float, +1), [1.0, 2.0, 3.1], [0.0, 0.4, 1.5])
    free = one._replace(contrast=one.contrast._replace(expected=0))
    assert study.told({"a": [free, one]})["a"] == [free, one._replace(told=True)]  # p = .02
    assert not any(x.told for of in study.told({"a": [one], "b": [one, one]}).values() for x in of)


def test_tables_state_every_number_and_verdict(tmp_path, monkeypatch):
    def tables(names, better):
        runs = made_up(4, better)
        monkeypatch.setattr(pool, "run_all", lambda tasks, *_: runs.results)
        arguments = ["--seeds=4", f"--out={tmp_path}", "--only", *names]
        return runs, mechanisms.measure(harness.parse("mechanisms", mechanisms, arguments))

    names = ["overlong_filter", "clip_higher"]
    runs, (verdicts, measures, _) = tables(names, 0.1)
    wanted = [
        (studies.ALL[name].name, x) for name in names for x in studies.ALL[name].compare(runs)
    ]
    assert [row[:2] for row in verdicts.rows] == [[studies.ALL[n].name, "**shown**"] for n in names]
    for row, (name, x) in zip(measures.rows, wanted, strict=True):
        assert row[:2] == [name, x.contrast.measure] and row[-2] == f"{x.difference:+.3f}"
        assert (row[-1] == "decides: shown, disjoint") == bool(x.contrast.expected)
    assert tables(["token_mean"], 0.0)[1][0].rows[0][1] == "not shown"


def test_tasks_come_after_what_they_need():
    base_of = mechanisms.base_seeds(6)
    assert base_of == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    made = studies.tasks(list(studies.ALL), base_of)
    folders = [t.folder for t in made]
    assert len(set(folders)) == len(folders)
    assert bases.lineage("rambling") == ["skill", "careful", "rambling"]
    after = {t.folder: t.after for t in made}
    assert after["base_rambling_1"] == ("base_careful_1",) and after["base_skill_1"] == ()
    for task in made:
        assert all(folders.index(a) < folders.index(task.folder) for a in task.after)
    for arm in (bandit.LOW, bandit.POSITIVE):  # the plain arm, of two techniques, once
        played = [t for t in made if t.folder.startswith(bandit.folder(arm, 0)[:-1])]
        assert sorted(s for t in played for s in t.arguments[3]) == list(range(12))
    only = studies.tasks(["clip_higher"], base_of)
    assert {t.work for t in only} == {bandit.make, bandit.play}


@pytest.mark.parametrize("arguments", [["--only=luck"], ["--write", "--only=clip_higher"]])
def test_bad_arguments_end_in_one_line(arguments, monkeypatch):
    monkeypatch.setattr(pool, "run_all", None)
    with pytest.raises(SystemExit):
        mechanisms.measure(harness.parse("mechanisms", mechanisms, arguments))
