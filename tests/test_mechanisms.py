"""The mechanism experiments: what each arm switches, the bases' examples, statistics on made-up
runs with known answers, the report, and (slow) all of it once on tiny runs."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from dapo_jax import config as config_lib
from dapo_jax.data import arithmetic
from dapo_jax.lab.experiments import (
    arms,
    bandit,
    bases,
    credit,
    effects,
    mechanism_report,
    mechanisms,
    pool,
    snr,
    stats,
    techniques,
)
from dapo_jax.lab.experiments.techniques import dynamic_sampling
from dapo_jax.run import warmup

HOME = pathlib.Path("somewhere")


# --- arms -----------------------------------------------------------------------------------------


def settings(arm, seed=0, base_seed=0):
    return arms.settings(techniques.ARMS[arm], seed, HOME, base_seed)


@pytest.mark.parametrize(
    ("after", "before", "switch"),
    [
        ("mean_sample", "mean_token", "loss.normalizer"),
        ("filter_loss", "filter_off", "loss.overlong_filter"),
        ("filter_group", "filter_off", "loss.overlong_filter"),
        ("filter_group_soft", "filter_group", "reward.overlong_penalty"),
        ("ramble_group_soft", "ramble_group", "reward.overlong_penalty"),
        ("dynamic_on", "dynamic_off", "dynamic_sampling.enabled"),
    ],
)
def test_arms_that_are_compared_differ_in_one_switch(after, before, switch):
    a, b = (config_lib.leaves(settings(arm, 3, 1)) for arm in (after, before))
    assert [name for name in a if a[name] != b[name]] == [switch]
    assert techniques.ARMS[after].base == techniques.ARMS[before].base


@pytest.mark.parametrize("arm", techniques.ARMS)
def test_arms_are_valid(arm):
    c = settings(arm, 3, 1)
    config_lib.validate(c, 1)
    assert c.seed == 3 and f"base_{techniques.ARMS[arm].base}_1" in c.init_from


def test_off_arm_keeps_the_checkpoints_that_snr_wants():
    c = settings("dynamic_off")
    assert all(step % c.checkpoint.keep_every == 0 for step in snr.STEPS)
    assert c.checkpoint.every == c.checkpoint.keep_every and snr.STEPS[-1] == c.steps


def test_level_measures():
    rows = [
        {"correct": [True, True, False, False], "tokens": [10, 30, 3, 64]},
        {"correct": [True, False, False, False], "tokens": [3, 3, 3, 3]},
    ]
    assert arms.level_measures(rows, cap=24) == {
        "accuracy": 3 / 8,
        "fit": 2 / 8,
        "length": (10 + 30 + 3 + 64 + 12) / 8,
        "worked_share": 3 / 8,
    }


# --- bases ----------------------------------------------------------------------------------------


def test_lineage_has_parents_first_and_each_once():
    assert bases.lineage(["rambling", "hasty", "careful"]) == [
        "skill",
        "careful",
        "rambling",
        "hasty",
    ]


def test_usual_warm_up_is_skill_then_habit():
    c = config_lib.base()
    c.seed, c.supervised_warmup.skill_steps, c.supervised_warmup.habit_steps = 3, 5, 0
    skill, habit = warmup.usual(c)
    assert (skill.steps, skill.seed, habit.steps, habit.seed) == (5, 6, 0, 7)
    direct = arithmetic.traces(20, seed=6, style=arithmetic.SKILL, cap=32)
    assert list(warmup.examples(skill, 20)) == list(direct)


def test_examples_give_each_level_its_style():
    """`careful` is mostly careful where it will fit, and half the time where it will not."""
    mix = bases.HABITS["careful"].mix
    phase = warmup.Phase("careful", 0, 0.0, mix, 5, 40)
    made = list(warmup.examples(phase, 4000))
    assert len(made) == 4000
    share = {}
    for k in (2, 3, 4, 5):
        mine = [t for t in made if len(t.prompt.split()) == arithmetic.prompt_length(k)]
        assert len(mine) == 1000
        share[k] = np.mean([t.response.startswith(arithmetic.WAIT) for t in mine])
    np.testing.assert_allclose([share[2], share[3]], 0.85, atol=0.05)
    np.testing.assert_allclose([share[4], share[5]], 0.45, atol=0.06)
    first = [len(t.prompt) > len(made[0].prompt) for t in made[:50]]
    assert any(first) and not all(first[1:])  # shuffled


def test_styles_by_hand():
    wait = 9
    rows = [[response([wait, 1, 2]), response([3, 4])], [response([3]), response([wait])]]
    scores = Scores(np.array([[True, False], [True, False]]), np.zeros((2, 2), bool), rows)
    assert bases.styles(scores, wait) == {
        "accuracy": 0.5,
        "length": 7 / 4,
        "truncated": 0.0,
        "careful_share": 0.5,
        "careful_accuracy": 0.5,
        "careful_length": 2.0,
        "careful_truncated": 0.0,
        "other_accuracy": 0.5,
        "other_length": 1.5,
        "other_truncated": 0.0,
    }


@dataclasses.dataclass
class Scores:
    correct_PxK: np.ndarray
    truncated_PxK: np.ndarray
    responses: list


@dataclasses.dataclass
class response:
    tokens: list


def test_problem_files_hold_their_levels_and_stay_apart(tmp_path):
    bases.write_problems(tmp_path)

    def read(path):
        return [json.loads(line) for line in path.read_text().splitlines()]

    train = read(bases.train_file(tmp_path, (2, 3, 4)))
    assert {row["extra_info"]["k"] for row in train} == {2, 3, 4} and len(train) == 4096
    test = read(tmp_path / "heldout_k4.jsonl")
    assert {row["extra_info"]["k"] for row in test} == {4} and len(test) == bases.TEST_PROBLEMS
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert not prompts[0] & prompts[1]


# --- gradient noise -------------------------------------------------------------------------------


def test_noise_recovers_known_signal_and_variance():
    rng = np.random.default_rng(0)
    signal = np.zeros(2000)
    signal[0] = 3.0
    g = (signal + 0.5 * rng.standard_normal((40, 8, 2000))).astype(np.float32)
    out = snr.noise(g)
    assert out["noise"] == pytest.approx(0.25 * 2000, rel=0.02)
    assert out["signal"] == pytest.approx(9, rel=0.1)
    assert out["snr"] == pytest.approx(9 / 500, rel=0.1)
    assert out["cosine"] == pytest.approx(9 / (9 + 500 / 8), rel=0.1)
    assert out["empty"] == 0


def test_noise_counts_empty_updates():
    g = np.ones((2, 4, 3), np.float32)
    g[0, 1] = 0
    assert snr.noise(g)["empty"] == 1 / 8


# --- statistics -----------------------------------------------------------------------------------


def test_curve_statistics():
    values = [1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 2, 2]
    assert effects.peak(values) == pytest.approx(6)
    assert effects.last(values) == pytest.approx((6 * 3 + 2 * 2) / 5)
    assert effects.steps_mean([1, None, 3]) == 2
    run = {"evaluations": {s: {"heldout": {"accuracy": float(s)}} for s in ("65", "70", "80")}}
    assert dynamic_sampling.late_accuracy(run) == 75


@pytest.mark.parametrize(
    ("after", "before", "expected", "shown", "disjoint"),
    [
        ([2, 3, 4], [1, 2.1, 2.9], +1, True, False),  # paired sees what intervals hide
        ([2, 3, 4], [1, 2.1, 2.9], -1, False, False),
        ([2, 3, 4], [2.5, 2.5, 3.4], +1, False, False),
        ([9, 9.1, 9.2], [1, 1.1, 1.3], +1, True, True),
    ],
)
def test_contrast(after, before, expected, shown, disjoint):
    x = effects.Contrast("m", "a", "b", after, before, expected)
    assert (x.shown, x.disjoint) == (shown, disjoint)
    assert x.difference.mean == pytest.approx(np.mean(after) - np.mean(before))


def credit_run(trained: float, adaptive: float, noisy) -> dict:
    third = {"explained": 0.1 + trained, "error": 0.5 - trained, "advantage": 0.5 - trained}
    levels = {f"k{k}": {"accuracy": 0.5 + adaptive + float(noisy(()))} for k in credit.LEVELS}
    return {
        "before": {"slope": 0.3 - trained + float(noisy(()))}
        | {t: {k: v + float(noisy(())) for k, v in third.items()} for t in credit.THIRDS},
        "series": {tag: (0.5 + noisy(credit.STEPS)).tolist() for tag in credit.SERIES},
        "levels": levels,
    }


def made_up(seeds: int, better: float):
    """Results in which the deciding side of every contrast is better by about `better`."""
    rng = np.random.default_rng(0)
    base_of = mechanisms.base_seeds(seeds, 0)
    high = {  # arm -> (length and truncation, accuracy), in units of `better`
        "mean_sample": (1, 0), "mean_token": (0, 0), "filter_off": (0, -1), "filter_loss": (0, 0),
        "filter_group": (2, 0), "filter_group_soft": (0, 0), "ramble_group": (1, 0),
        "ramble_group_soft": (0, 0), "dynamic_off": (0, 0), "dynamic_on": (0, 1),
    }  # fmt: skip

    def noisy(n):
        return 0.01 * rng.standard_normal(n)

    results = {}
    for task in mechanisms.tasks(list(techniques.ALL), base_of):
        name, *_ = task.arguments
        if task.work is bases.make:
            level = {"accuracy": 0.5, "length": 9.0}
            results[task.folder] = {"levels": {f"k{k}": level for k in bases.TEST_LEVELS}}
        elif task.work is techniques.run:
            long, right = high[name]
            steps = settings(name).steps
            series = {tag: (0.3 + better * long + noisy(steps)).tolist() for tag in arms.SERIES}
            level = {
                k: float(0.5 + better * right + noisy(()))
                for k in ("accuracy", "fit", "length", "worked_share")
            }
            sets = {"heldout": level} | {f"k{k}": level for k in bases.TEST_LEVELS}
            results[task.folder] = {"series": series, "evaluations": {"0": sets, "80": sets}}
        elif task.work is dynamic_sampling.measure_noise:
            ways = {
                way: {
                    k: float(0.1 + better * (way == "on") + 0.01 * rng.random())
                    for k in ("snr", "cosine", "empty")
                }
                for way in ("off", "on")
            }
            results[task.folder] = {"steps": {str(s): ways for s in snr.STEPS}}
        elif task.work is bandit.play:
            _, bound, played, *positive = task.arguments
            gain = better * (bandit.CLIP_HIGH.index(bound) + bool(positive))
            rate = 1.4 + gain + 0.01 * rng.random(len(played))
            results[task.folder] = {
                "curves": {
                    str(s): {
                        "rare": [min(0.01 * float(r) ** i, 1.0) for i in range(21)],
                        "entropy": [1.0] * 21,
                        "positive": [10] * 20,
                        "clipped": [1] * 20,
                    }
                    for s, r in zip(played, rate, strict=True)
                }
            }
        elif task.work is credit.make_reward_model:
            results[task.folder] = {"explained": 0.6}
        elif task.work is credit.play:
            _, changes, played = task.arguments
            trained = better * bool(changes["critic.pretrain_steps"])
            adaptive = better * bool(changes["critic.length_alpha"])
            results[task.folder] = {
                "runs": {str(s): credit_run(trained, adaptive, noisy) for s in played}
            }
        else:
            results[task.folder] = {}
        results[task.folder]["cpu_s"] = 1.0
    return effects.Runs(results, base_of)


@pytest.mark.parametrize("better", [0.1, 0.0])
def test_verdicts_follow_the_numbers(better):
    runs = made_up(6, better)
    verdicts = {name: t.effect(runs).shown for name, t in techniques.ALL.items()}
    assert verdicts == dict.fromkeys(techniques.ALL, better > 0)


def test_every_deciding_contrast_is_needed():
    for technique in techniques.ALL.values():
        found = technique.effect(made_up(6, 0.1))
        for i, x in enumerate(found.contrasts):
            if x.expected:
                broken = list(found.contrasts)
                broken[i] = x._replace(after=x.before)
                assert not found._replace(contrasts=broken).shown


def test_report_states_every_number_and_verdict(tmp_path):
    runs = made_up(4, 0.1)
    found = {name: technique.effect(runs) for name, technique in techniques.ALL.items()}
    found["token_mean"] = techniques.ALL["token_mean"].effect(made_up(4, 0.0))
    said = mechanism_report.write(tmp_path, found, runs, 60.0)
    assert said.count("shown") == 8 and said.count("NOT shown") == 1
    text = (tmp_path / "mechanisms.md").read_text()
    assert "## Token-level loss: not shown" in text and "## Dynamic Sampling: shown" in text
    data = json.loads((tmp_path / "mechanisms.json").read_text())
    for name, effect in found.items():
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert data["effects"][name]["shown"] == effect.shown
        for x, there in zip(effect.contrasts, data["effects"][name]["contrasts"], strict=True):
            assert there["after"]["seeds"] == x.after and there["before"]["seeds"] == x.before
            assert there["paired"]["mean"] == x.difference.mean
            assert mechanism_report.signed(x.difference) in text
    for name, technique in techniques.ALL.items():
        for ax in technique.figure(runs).axes:
            assert ax.get_xlabel() and ax.get_ylabel(), name


def test_interval_of_the_report_is_the_paired_one():
    x = effects.Contrast("m", "a", "b", [1.0, 2.0, 4.0], [0.5, 1.0, 2.5], 0)
    assert x.difference == stats.paired(x.after, x.before)


# --- command --------------------------------------------------------------------------------------


def test_seeds_alternate_over_two_bases():
    assert mechanisms.base_seeds(5, 100) == {100: 100, 101: 101, 102: 100, 103: 101, 104: 100}


def test_tasks_come_after_what_they_need():
    made = mechanisms.tasks(list(techniques.ALL), mechanisms.base_seeds(6, 0))
    folders = [t.folder for t in made]
    assert len(set(folders)) == len(folders)
    for task in made:
        assert all(folders.index(a) < folders.index(task.folder) for a in task.after)
        json.dumps(task.arguments)
    for coef in ([], [0.1]):  # the plain arm at .2, of two techniques, once
        played = [
            t.arguments[2]
            for t in made
            if t.work is bandit.play and [t.arguments[1], *t.arguments[3:]] == [0.2, *coef]
        ]
        assert sorted(s for seeds in played for s in seeds) == list(range(12))
    only = mechanisms.tasks(["clip_higher"], mechanisms.base_seeds(6, 0))
    assert {t.work for t in only} == {bandit.make, bandit.play}


@pytest.mark.parametrize("arguments", [["--only=luck"], ["--seeds=1"]])
def test_bad_arguments_end_in_one_line(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        mechanisms.main([f"--out={tmp_path}", *arguments])
    assert capsys.readouterr().err.strip().splitlines()[-1].count("error:") == 1


def test_a_run_that_was_cut_off_is_no_result(tmp_path, monkeypatch):
    """SIGTERM lets a training return normally, short of its last step."""

    def cut(c, where):
        where.mkdir()
        (where / "metrics.jsonl").write_text('{"step": 7}\n')

    monkeypatch.setattr(arms.train, "train", cut)
    with pytest.raises(RuntimeError, match="cut off after step 7"):
        techniques.run(tmp_path / "x", "mean_token", 0, 0)


@pytest.mark.slow
def test_end_to_end(tmp_path, monkeypatch):
    """Two effects, tiny, in this process: bases, arms, gradients, bandit, report; then once more,
    from the kept results alone."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    tiny = {name: habit._replace(steps=20) for name, habit in bases.HABITS.items()}
    monkeypatch.setattr(bases, "HABITS", tiny)
    monkeypatch.setattr(bases, "TEST_PROBLEMS", 4)
    monkeypatch.setattr(snr, "STEPS", (0, 2))
    monkeypatch.setattr(snr, "BATCHES", 2)
    monkeypatch.setattr(arms, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(bandit, "ROLLOUTS", 10)
    monkeypatch.setattr(bandit, "CLIP_HIGH", (0.2, 10.0))
    whole = arms.settings

    def short(*arguments):
        c = whole(*arguments)
        c.steps, c.rollout.groups, c.eval.max_problems = 2, 8, 8
        c.dynamic_sampling.max_rounds = 2
        return c

    monkeypatch.setattr(arms, "settings", short)
    argv = [f"--out={tmp_path}", "--seeds=2", "--jobs=1", "--only=dynamic_sampling,clip_higher"]
    mechanisms.main(argv)
    data = json.loads((tmp_path / "mechanisms.json").read_text())
    assert list(data["effects"]) == ["dynamic_sampling", "clip_higher"]
    (half,) = (x for x in data["effects"]["clip_higher"]["contrasts"] if x["decides"])
    assert len(half["after"]["seeds"]) == 4 and half["paired"]["mean"] < 0
    monkeypatch.setattr(pool, "_work", None)  # nothing is made again
    mechanisms.main(argv)
