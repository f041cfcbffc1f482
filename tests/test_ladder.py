"""The ladder: the fields of each rung, what is compared, what is said of it, and a small run."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.lab.experiments import figures, ladder
from dapo_jax.log import metrics

ROOT = Path(__file__).parent.parent
TAG = "eval/heldout/avg@k"

# --- Rungs ----------------------------------------------------------------------------------------

FIELDS = (
    "loss.overlong_filter", "loss.clip_high", "reward.overlong_penalty", "loss.normalizer",
    "dynamic_sampling.enabled",
)  # fmt: skip
ORACLE = {
    "grpo": ("off", 0.2, 0.0, "sequence", False),
    "+overlong_filtering": ("loss", 0.2, 0.0, "sequence", False),
    "+clip_higher": ("loss", 0.28, 0.0, "sequence", False),
    "+soft_overlong": ("loss", 0.28, 1.0, "sequence", False),
    "+token_loss": ("loss", 0.28, 1.0, "batch_tokens", False),
    "+dynamic_sampling": ("loss", 0.28, 1.0, "batch_tokens", True),
    "-overlong_filtering": ("off", 0.28, 1.0, "batch_tokens", True),
    "-clip_higher": ("loss", 0.2, 1.0, "batch_tokens", True),
    "-soft_overlong": ("loss", 0.28, 0.0, "batch_tokens", True),
    "-token_loss": ("loss", 0.28, 1.0, "sequence", True),
    "-dynamic_sampling": ("loss", 0.28, 1.0, "batch_tokens", False),
}


def get_config(*argument):
    return runpy.run_path(str(ROOT / "configs" / "ladder.py"))["get_config"](*argument)


@pytest.mark.parametrize("size", ["", "@7B"])
@pytest.mark.parametrize("name", ORACLE)
def test_a_rung_changes_these_fields_and_no_other(name, size):
    got = config.leaves(get_config(name + size))
    assert tuple(got[f] for f in FIELDS) == ORACLE[name]
    full = config.leaves(presets.dapo_math("7B") if size else presets.ladder_task())
    assert {f for f in got if got[f] != full[f]} <= set(FIELDS)
    config.validate(get_config(name), devices=1)


def test_the_ladder_is_the_papers_table():
    assert tuple(ORACLE) == presets.CUMULATIVE + presets.LEAVE_ONE_OUT
    assert tuple(ORACLE)[:-1] == presets.RUNGS  # the last one is +token_loss
    assert list(ladder.DAPO.paper.values()) == [30, 36, 38, 41, 42, 50]
    assert get_config() == get_config("+dynamic_sampling")
    assert get_config("grpo") == config.grpo(get_config())


VAPO = presets.LADDERS["vapo"]
VAPO_FIELDS = {  # technique -> field -> without it, with it
    "value_pretraining": {"critic.pretrain_steps": (0, 20)},
    "decoupled_gae": {"critic.lambda_value": (0.5, 1.0)},
    "length_adaptive_gae": {"critic.length_alpha": (0.0, 1.5)},
    "clip_higher": {"loss.clip_high": (0.2, 0.28)},
    "token_loss": {"loss.normalizer": ("sequence", "batch_tokens")},
    "positive_lm": {"loss.positive_coef": (0.0, 0.1)},
    "group_sampling": {"rollout.groups": (256, 32), "rollout.group_size": (1, 8)},
}


@pytest.mark.parametrize("name", VAPO.cumulative + VAPO.leave_one_out)
def test_a_rung_of_vapo_changes_its_fields_and_no_other(name):
    """The paper's seven, each a switch; a rung has what stands before it, or all but one."""
    full = config.leaves(presets.vapo_ladder_task())
    got = config.leaves(presets.rung(presets.vapo_ladder_task(), name, VAPO))
    order = list(VAPO_FIELDS)
    has = order[: VAPO.cumulative.index(name)] if name in VAPO.cumulative else order
    has = [technique for technique in has if name != f"-{technique}"]
    want = {f: v[t in has] for t, fields in VAPO_FIELDS.items() for f, v in fields.items()}
    assert {f: got[f] for f in want} == want
    assert {f for f in got if got[f] != full[f]} <= set(want)
    config.validate(presets.rung(presets.vapo_ladder_task(), name, VAPO), devices=1)


def test_vapo_s_ladder_is_the_papers_table():
    assert VAPO.cumulative == ("ppo", *(f"+{name}" for name in VAPO_FIELDS))
    assert (VAPO.paper["ppo"], VAPO.paper[VAPO.cumulative[-1]]) == (5, 60)
    left_out = [VAPO.paper[name] for name in VAPO.leave_one_out[:-1]]
    assert [*left_out, VAPO.paper["+positive_lm"]] == [11, 33, 45, 46, 53, 54, 55]
    assert presets.rung(presets.vapo_ladder_task(), "-group_sampling", VAPO) == presets.rung(
        presets.vapo_ladder_task(), "+positive_lm", VAPO
    )
    with pytest.raises(ValueError, match="starts from VAPO, and this config is without value_pre"):
        presets.rung(presets.ladder_task(), "ppo", VAPO)


def test_steps_of_vapo_count_behind_its_pretraining(tmp_path):
    """Updates of the policy are equal, with and without pre-training; its tokens are spent."""
    c = presets.vapo_ladder_task()
    c.steps, c.critic.pretrain_steps = 70, 10
    base, with_it, without = ladder.tasks(
        c, ["+group_sampling", "-value_pretraining"], [0], 0, 2.5, VAPO
    )
    assert [t.arguments[0]["steps"] for t in (base, with_it, without)] == [0, 70, 60]
    for name, before in (("+group_sampling", 10), ("-value_pretraining", 0)):
        for seed in range(2):
            rows = [
                {"step": s, TAG: 0.2 + max(s - before, 0) / 100, "spent/tokens": 1000 * s}
                | {"critic/explained_variance": (s > before) / 4}
                for s in range(0, before + 61, 5)
            ]
            put(tmp_path, name, seed, rows)
    text = ladder.report(c, tmp_path, VAPO.rungs, range(2), 2.5, VAPO)
    assert "against VAPO (+group_sampling)" in text and "after 480 updates" in text
    row = next(x for x in text.splitlines() if x.startswith("| -value_pretraining | 11 |"))
    # Means at 4/6, 5/6 and 6/6 of 60 steps, and of 60,000 tokens: there 10 steps fewer.
    assert "| 0.700 +- 0.000 | +0.000 +- 0.000 | 0.700 +- 0.000 | +0.100 +- 0.000 |" in row
    assert row.endswith("| 0.25 |") and "| M tokens | explained |" in text
    assert [p.name for p in tmp_path.glob("*.png")] == ["ladder.png"]


def test_base_configs_keep_what_they_say():
    c = config.verl()
    c.loss.overlong_filter, c.dynamic_sampling.surplus = "group", "carry"
    top, below = (presets.rung(c, name) for name in ("+dynamic_sampling", "+token_loss"))
    assert (top.loss.overlong_filter, top.loss.normalizer) == ("group", "chunk_tokens")
    assert (top.dynamic_sampling.surplus, below.dynamic_sampling.surplus) == ("carry", "drop")
    assert c.dynamic_sampling.enabled and not below.dynamic_sampling.enabled  # c stays as it is


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: get_config("+luck"), r"no rung '\+luck'; there are grpo, \+overlong_filtering,"),
        (lambda: get_config("grpo@8B"), "no size '8B' of Qwen; there are 0.5B, 1.5B, 3B, 7B"),
        (lambda: presets.rung(config.grpo(), "grpo"), "this config is without clip_higher"),
    ],
)
def test_mistakes_are_one_line_that_says_what_there_is(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_tasks_share_a_base_and_go_on_for_equal_tokens():
    c = presets.ladder_task()
    base, *runs = ladder.tasks(
        c, ["grpo", "+dynamic_sampling"], range(3, 5), base_seed=7, longer=2.5
    )
    assert (base.folder, base.arguments[0]["seed"], base.arguments[0]["steps"]) == ("base", 7, 0)
    assert [(t.folder, t.arguments[0]["steps"], t.after) for t in runs] == [
        ("grpo/seed_3", c.steps * 5 // 2, ("base",)),
        ("+dynamic_sampling/seed_3", c.steps, ("base",)),
        ("grpo/seed_4", c.steps * 5 // 2, ("base",)),
        ("+dynamic_sampling/seed_4", c.steps, ("base",)),
    ]
    assert [t.arguments[0]["seed"] for t in runs] == [3, 3, 4, 4]
    pod = ladder.tasks(presets.dapo_math("7B"), ["grpo"], [0], base_seed=0, longer=1.0)
    assert [(t.folder, t.after) for t in pod] == [("grpo/seed_0", ())]


def test_a_run_that_was_cut_off_is_not_finished(tmp_path):
    with pytest.raises(RuntimeError, match="cut off by SIGTERM; the same command goes on"):
        ladder.run(tmp_path, {"steps": 0}, train=lambda c, where: False)


# --- What is compared, on made-up curves ----------------------------------------------------------


def made_up(accuracy, tokens_a_step: int, steps: int = 60, every: int = 10) -> list[dict]:
    """Records of a run whose held-out accuracy after step n is accuracy(n)."""
    records = [{"step": 0, TAG: accuracy(0)}]
    for n in range(1, steps + 1):
        r = {"step": n, "spent/tokens": n * tokens_a_step, "optim/updates": 8 * n}
        r |= {"policy/entropy": 0.5 - n / 1000, "policy/mean_prob": 0.8, "reward/mean": 0.1}
        r |= {"response/length_mean": 12.0, "response/truncated_frac": 0.01}
        r |= {"sampling/accept_frac": 0.4, "alarms": ["a text"]}
        records.append(r | ({TAG: accuracy(n)} if n % every == 0 else {}))
    return records


def test_accuracy_is_the_mean_at_four_five_and_six_sixths():
    run = made_up(lambda n: n / 100, tokens_a_step=1000)
    assert ladder.accuracy(run, TAG, "step", 60) == pytest.approx((0.4 + 0.5 + 0.6) / 3)
    # Over tokens: 45,000 tokens are step 45, between two evaluations.
    assert ladder.accuracy(run, TAG, "spent/tokens", 45_000) == pytest.approx(
        (0.30 + 0.375 + 0.45) / 3
    )
    # Beyond the end of a run that stopped early it stays where it was.
    assert ladder.accuracy(run, TAG, "step", 120) == pytest.approx(0.6)


def example(seeds: int = 4):
    """DAPO is .05 ahead of token_loss at equal updates and spends three times the tokens; grpo is
    like token_loss up to seed noise."""
    noise = np.random.default_rng(0).normal(0, 0.004, (3, seeds))
    curves = {
        "grpo": (0.0, 1, 120),
        "+token_loss": (0.0, 1, 120),
        "+dynamic_sampling": (0.05, 3, 60),
    }
    return {
        name: [
            made_up(lambda n, d=gain + noise[i, s]: 0.2 + d + n / 200, 1000 * per, steps)
            for s in range(seeds)
        ]
        for i, (name, (gain, per, steps)) in enumerate(curves.items())
    }


WANTED = {"grpo": 120, "+token_loss": 120, "+dynamic_sampling": 60}


def summarize(runs):
    return ladder.summarize(runs, TAG, 60, WANTED, range(len(runs["grpo"])))


def test_summary_compares_at_equal_updates_and_at_equal_tokens():
    s = summarize(example())
    assert s["budget_tokens"] == 120_000 and s["stopped_early"] == []
    updates, tokens = (ladder.by_seed(s[of]) for of in ("equal_updates", "equal_tokens"))
    assert updates["+dynamic_sampling"] - updates["grpo"] == pytest.approx(0.05, abs=0.015)
    # 120,000 tokens are 120 steps of grpo and 40 of DAPO: means at 100 and at 33.3 steps.
    assert tokens["grpo"].mean() == pytest.approx(0.2 + 100 / 200, abs=0.005)
    assert tokens["+dynamic_sampling"].mean() == pytest.approx(0.25 + 33.3 / 200, abs=0.005)
    assert s["beside"]["M tokens"]["+dynamic_sampling"] == pytest.approx(0.18)
    assert s["beside"]["entropy, nats"]["grpo"] == pytest.approx(0.5 - 50.5 / 1000)
    assert "explained" not in s["beside"]  # no value model
    assert len(s["changes_equal_updates"]) == 2 and json.dumps(s, allow_nan=False)


def test_a_run_that_stopped_early_is_named_and_does_not_set_the_budget():
    runs = example()
    runs["grpo"][1] = runs["grpo"][1][:31]
    s = summarize(runs)
    assert s["stopped_early"] == ["grpo/seed_1"] and s["budget_tokens"] == 120_000
    assert "Stopped before their last step: grpo/seed_1." in ladder.markdown(s, "x", 8)


def put(out, name, seed, records):
    folder = out / ladder.folder(name, seed)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_report_reads_back_what_is_there_and_trains_nothing(shell, tmp_path):
    for seed, records in enumerate(example(2)["grpo"], 100):
        put(tmp_path, "grpo", seed, records[:99])
    ask = ("-m", "dapo_jax.lab", "ladder", "--report", "--seeds=2", f"--out={tmp_path}")
    done = shell.python(*ask, "--first_seed=100", "--only=grpo", "--steps=60")
    assert "Stopped before their last step: grpo/seed_100, grpo/seed_101." in done.stdout
    done = shell.python(*ask, "--only=grpo")
    assert done.returncode == 1 and "no rung of grpo has all of seeds 0 to 1" in done.stderr


def test_verdicts_follow_the_numbers():
    values = {
        "a": np.array([0.80, 0.81, 0.82, 0.81]),
        "b": np.array([0.70, 0.71, 0.72, 0.71]),
        "c": np.array([0.60, 0.95, 0.50, 0.80]),
        "d": np.array([0.59, 0.93, 0.48, 0.78]),
    }
    assert re.fullmatch(
        r"a is ahead of b: 0.810 \+- 0.013 against 0.710 \+- 0.013, paired difference"
        r" \+0.100 \+- 0.000, disjoint 95% intervals",
        ladder.verdict("a", "b", values),
    )
    assert ladder.verdict("b", "a", values).startswith("b is behind a: ")
    assert ladder.verdict("c", "d", values).endswith("overlapping 95% intervals")
    assert ladder.verdict("a", "c", values).startswith("a and c are not told apart: ")
    one = ladder.verdict("a", "b", {n: v[:1] for n, v in values.items()})
    assert "nan" not in one and one.endswith("one seed tells nothing of seed noise")


def test_report_writes_table_json_and_figures(tmp_path):
    c = presets.ladder_task()
    for name, runs in example().items():
        for seed, records in enumerate(runs):
            put(tmp_path, name, seed, records)
    c.steps = 60
    text = ladder.report(c, tmp_path, presets.RUNGS, range(4), 2.0)
    assert text == (tmp_path / "table.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [r[0].lstrip("| ") for r in rows] == ["rung", *WANTED]
    assert [r[1] for r in rows] == ["paper", "30", "42", "50"]
    assert "after 480 updates" in rows[0][2] and "after 0.12 M tokens" in rows[0][4]
    assert "101,952 parameters" in text and "Qwen2.5-32B, AIME 2024" in text
    equal_updates, equal_tokens = text.split("After 0.12 M tokens")
    assert "- +dynamic_sampling is ahead of +token_loss" in equal_updates
    assert "- +dynamic_sampling is behind +token_loss" in equal_tokens
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["equal_updates"] == summarize(example())["equal_updates"]
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "ladder.png", "accuracy.png", "dynamics.png",
    }  # fmt: skip
    with pytest.raises(ValueError, match="no rung of grpo has all of seeds 0 to 8"):
        ladder.report(c, tmp_path, ["grpo"], range(9), 2.0)


def test_every_axis_of_every_figure_is_labelled():
    runs = example(2) | {"-clip_higher": example(2)["grpo"]}
    values = {n: np.array([0.5, 0.6]) for n in runs}
    drawn = figures.curves(runs, TAG, 60)
    assert list(drawn) == ["accuracy", "dynamics", "clip_higher"]
    for figure in (figures.bars(values, values, ladder.DAPO), *drawn.values()):
        for axes in figure.axes:
            assert axes.get_xlabel() and (axes.get_ylabel() or axes.get_yticklabels())
            assert axes.lines or axes.patches
    x, y = drawn["accuracy"].axes[0].lines[0].get_data()
    assert x[-1] == 480 and y[-1] == pytest.approx(0.5, abs=0.01)  # grpo's mean after 60 steps


# --- All of it ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_rungs_end_to_end_and_again(shell, tmp_path):
    small = [
        "--config.supervised_warmup.skill_steps=4", "--config.supervised_warmup.habit_steps=2",
        "--config.rollout.groups=4", "--config.rollout.slots=8", "--config.optim.minibatches=2",
        "--config.dynamic_sampling.max_rounds=2", "--config.dynamic_sampling.max_empty_steps=9",
        "--config.eval.max_problems=4", "--config.eval.every=1",
    ]  # fmt: skip
    ask = ("-m", "dapo_jax.lab", "ladder", "--seeds=1", "--steps=2", "--longer=2", "--jobs=2",
           f"--out={tmp_path}", "--only=grpo,+dynamic_sampling", *small)  # fmt: skip
    done = shell.python(*ask)
    assert done.returncode == 0, done.stderr
    assert "# The ladder, 1 seed\n" in done.stdout and "one seed tells nothing" in done.stdout
    steps = {"grpo": 4, "+dynamic_sampling": 2}
    for name, last in steps.items():
        records = metrics.read(tmp_path / name / "seed_0" / "metrics.jsonl")
        assert records[-1]["step"] == last and [TAG in r for r in records] == [True] * (last + 1)
    first = [metrics.read(tmp_path / name / "seed_0" / "metrics.jsonl")[0][TAG] for name in steps]
    assert first[0] == first[1]  # one base model
    written = (tmp_path / "grpo" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns
    again = shell.python(*ask)
    assert again.returncode == 0 and again.stdout == done.stdout
    assert (tmp_path / "grpo" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns == written
    other = shell.python(*ask, "--config.optim.lr=1e-2")
    assert other.returncode == 1
    assert (
        f"optim.lr {presets.ladder_task().optim.lr}, now 0.01"
        in other.stderr.strip().splitlines()[-1]
    )


@pytest.mark.slow
def test_rungs_of_vapo_end_to_end(shell, tmp_path):
    """PPO has a response per problem and no pre-training; VAPO a step of it before the two."""
    small = [
        "--config.supervised_warmup.skill_steps=4", "--config.supervised_warmup.habit_steps=2",
        "--config.rollout.groups=4", "--config.rollout.group_size=4", "--config.rollout.slots=16",
        "--config.optim.minibatches=2", "--config.critic.pretrain_steps=1",
        "--config.eval.max_problems=4", "--config.eval.every=1",
    ]  # fmt: skip
    done = shell.python(
        "-m", "dapo_jax.lab", "ladder", "--method=vapo", "--seeds=1", "--steps=2", "--jobs=1",
        f"--out={tmp_path}", "--only=ppo,+group_sampling,-group_sampling", *small,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| ppo \| 5 \| .*^\| \+group_sampling \| 60 \| ", done.stdout, re.M | re.S)
    runs = {
        n: metrics.read(tmp_path / n / "seed_0" / "metrics.jsonl")
        for n in ("ppo", "+group_sampling")
    }
    assert [r.get("optim/updates", 0) for r in runs["ppo"]] == [0, 2, 4]
    assert [r.get("optim/updates", 0) for r in runs["+group_sampling"]] == [0, 0, 2, 4]
    drawn = {n: of[-1]["spent/samples"] / (len(of) - 1) for n, of in runs.items()}
    assert drawn == {"ppo": 16, "+group_sampling": 16}
    assert (tmp_path / "+positive_lm").exists()  # what -group_sampling is
