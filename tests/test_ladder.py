"""The ladder: the fields of each rung, what is compared, what is said of it, and a small run."""

import functools
import json

import numpy as np
import pytest
import test_configs

from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.lab.experiments import figures, ladder

TAG = "eval/heldout/avg@k"

FIELDS = {  # technique -> its field, without it, with it
    "overlong_filtering": ("loss.overlong_filter", "off", "loss"),
    "clip_higher": ("loss.clip_high", 0.2, 0.28),
    "soft_overlong": ("reward.overlong_penalty", 0.0, 1.0),
    "token_loss": ("loss.normalizer", "sequence", "batch_tokens"),
    "dynamic_sampling": ("dynamic_sampling.enabled", False, True),
}
VAPO_FIELDS = {
    "value_pretraining": ("critic.pretrain_steps", 0, 20),
    "decoupled_gae": ("critic.lambda_value", 0.5, 1.0),
    "length_adaptive_gae": ("critic.length_alpha", 0.0, 1.5),
    "clip_higher": ("loss.clip_high", 0.2, 0.28),
    "token_loss": ("loss.normalizer", "sequence", "batch_tokens"),
    "positive_lm": ("loss.positive_coef", 0.0, 0.1),
    "group_sampling": ("rollout.group_size", 1, 8),
}
DAPO, VAPO = ladder.DAPO, presets.LADDERS["vapo"]
get_config = functools.partial(test_configs.load, "ladder")
LADDERS = {  # the ladder, its techniques, the config of the whole
    "dapo": (DAPO, FIELDS, presets.ladder_task),
    "7B": (DAPO, FIELDS, lambda: presets.dapo_math("7B")),
    "vapo": (VAPO, VAPO_FIELDS, presets.vapo_ladder_task),
}
RUNGS = [(key, n) for key, (of, *_) in LADDERS.items() for n in of.cumulative + of.leave_one_out]


@pytest.mark.parametrize("method, name", RUNGS)
def test_a_rung_changes_its_fields_and_no_other(method, name):
    """The techniques up to this one, or all but one."""
    of, fields, whole = LADDERS[method]
    made, full = presets.rung(whole(), name, of), config.leaves(whole())
    has = [t for t in fields if name != f"-{t}"]
    if name in of.cumulative:
        has = has[: of.cumulative.index(name)]
    want = {field: on if t in has else off for t, (field, off, on) in fields.items()}
    if method == "vapo":
        want["rollout.groups"] = 256 // want["rollout.group_size"]
    got = config.leaves(made)
    assert {f: got[f] for f in want} == want
    assert {f for f in got if got[f] != full[f]} <= set(want)
    if method != "7B":
        config.validate(made, devices=1)


def test_the_ladders_are_the_papers_tables():
    assert ("grpo", *(f"+{name}" for name in FIELDS)) == DAPO.cumulative
    assert tuple(f"-{name}" for name in FIELDS) == DAPO.leave_one_out
    assert DAPO.cumulative + DAPO.leave_one_out[:-1] == DAPO.rungs  # that is +token_loss
    assert list(DAPO.paper.values()) == [30, 36, 38, 41, 42, 50]
    assert get_config("-clip_higher@7B") == presets.rung(presets.dapo_math("7B"), "-clip_higher")
    assert get_config("grpo") == config.grpo(get_config())
    left_out = [VAPO.paper[name] for name in VAPO.leave_one_out[:-1]]
    assert [*left_out, VAPO.paper["+positive_lm"]] == [11, 33, 45, 46, 53, 54, 55]
    assert (VAPO.paper["ppo"], VAPO.paper[VAPO.cumulative[-1]]) == (5, 60)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: get_config("+luck"), r"no rung '\+luck'; there are grpo, \+overlong_filtering,"),
        (lambda: get_config("grpo@8B"), "^no size '8B' of Qwen; there are 0.5B, 1.5B, 3B, 7B"),
        (lambda: presets.rung(config.grpo(), "grpo"), "this config is without clip_higher"),
        (lambda: presets.rung(presets.ladder_task(), "ppo", VAPO), "without value_pre"),
    ],
)
def test_mistakes_are_one_line_that_says_what_there_is(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_tasks_share_a_base_and_go_on_for_equal_tokens():
    c = presets.ladder_task()
    base, *runs = ladder.tasks(c, ["grpo", "+dynamic_sampling"], range(3, 5))
    assert (base.folder, base.arguments[0]["seed"], base.arguments[0]["steps"]) == ("base", 0, 0)
    found = [(t.folder, t.arguments[0]["seed"], t.arguments[0]["steps"], t.after) for t in runs]
    steps = {"grpo": c.steps * 5 // 2, "+dynamic_sampling": c.steps}
    assert found == [(f"{n}/seed_{s}", s, steps[n], ("base",)) for s in (3, 4) for n in steps]
    pod = ladder.tasks(presets.dapo_math("7B"), ["grpo"], [0])
    assert [(t.folder, t.after) for t in pod] == [("grpo/seed_0", ())]


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


WANTED = {"grpo": 150, "+token_loss": 150, "+dynamic_sampling": 60}


def example(seeds: int = 4):
    """DAPO is .05 ahead of token_loss at equal updates and spends three times the tokens; grpo is
    like token_loss up to seed noise."""
    noise = np.random.default_rng(0).normal(0, 0.004, (3, seeds))
    gains, tokens = (0.0, 0.0, 0.05), (1000, 1000, 3000)
    line = lambda start: lambda n: start + n / 200
    return {
        name: [made_up(line(0.2 + gains[i] + x), tokens[i], steps) for x in noise[i]]
        for i, (name, steps) in enumerate(WANTED.items())
    }


def summarize(runs):
    return ladder.summarize(runs, TAG, 60, WANTED, range(len(runs["grpo"])))


def put(out, name, seed, records):
    folder = out / ladder.folder(name, seed)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_summary_compares_at_equal_updates_and_at_equal_tokens():
    s = summarize(example())
    assert s["budget_tokens"] == 150_000 and s["stopped_early"] == []
    by_name = lambda place: {name: np.array(values) for name, values in s[place].items()}
    updates, tokens = by_name("equal_updates"), by_name("equal_tokens")
    assert updates["+dynamic_sampling"] - updates["grpo"] == pytest.approx(0.05, abs=0.015)
    # 150,000 tokens are 150 steps of grpo and 50 of DAPO: means at 125 and at 41.7 steps.
    assert tokens["grpo"].mean() == pytest.approx(0.2 + 125 / 200, abs=0.005)
    assert tokens["+dynamic_sampling"].mean() == pytest.approx(0.25 + 41.7 / 200, abs=0.005)
    assert s["beside"]["M tokens"]["+dynamic_sampling"] == pytest.approx(0.18)
    assert s["beside"]["entropy, nats"]["grpo"] == pytest.approx(0.5 - 50.5 / 1000)
    assert "explained" not in s["beside"]  # no value model
    assert json.dumps(s, allow_nan=False)
    runs = example()
    runs["grpo"][1] = runs["grpo"][1][:31]  # stopped early: it does not set the budget
    s = summarize(runs)
    assert s["stopped_early"] == ["grpo/seed_1"] and s["budget_tokens"] == 150_000
    assert "Stopped before their last step: grpo/seed_1." in ladder.markdown(s, "x", 8)


def test_verdicts_follow_the_numbers():
    values = {
        "a": np.array([0.80, 0.81, 0.82, 0.81]), "b": np.array([0.70, 0.71, 0.72, 0.71]),
        "c": np.array([0.60, 0.95, 0.50, 0.80]), "d": np.array([0.59, 0.93, 0.48, 0.78]),
    }  # fmt: skip
    assert ladder.verdict("a", "b", values, True) == (
        "a is ahead of b: 0.810 +- 0.013 against 0.710 +- 0.013, paired difference"
        " +0.100 +- 0.000, disjoint 95% intervals"
    )
    assert ladder.verdict("b", "a", values, True).startswith("b is behind a: ")
    assert ladder.verdict("c", "d", values, True).endswith("overlapping 95% intervals")
    assert ladder.verdict("a", "c", values, False).startswith("a and c are not told apart: ")
    one = ladder.verdict("a", "b", {n: v[:1] for n, v in values.items()}, False)
    assert "nan" not in one and one.endswith("one seed tells nothing of seed noise")


def test_report_writes_table_json_and_figures(tmp_path):
    c = presets.ladder_task()
    for name, runs in example().items():
        for seed, records in enumerate(runs):
            put(tmp_path, name, seed, records)
    c.steps = 60
    text = ladder.report(c, tmp_path, DAPO.rungs, range(4))
    assert text == (tmp_path / "table.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [r[0].lstrip("| ") for r in rows] == ["rung", *WANTED]
    assert [r[1] for r in rows] == ["paper", "30", "42", "50"]
    assert "after 480 updates" in rows[0][2] and "101,952 parameters" in text
    equal_updates, equal_tokens = text.split("After 0.15 M tokens")
    assert "- +dynamic_sampling is ahead of +token_loss" in equal_updates
    assert "- +dynamic_sampling is behind +token_loss" in equal_tokens
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["equal_updates"] == summarize(example())["equal_updates"]
    drawn = {p.name for p in tmp_path.glob("*.png")}
    assert drawn == {"ladder.png", "accuracy.png", "dynamics.png"}
    with pytest.raises(ValueError, match="^no rung of grpo has all of seeds 3 to 4$"):
        ladder.report(c, tmp_path, ["grpo"], range(3, 5))


def test_steps_of_vapo_count_behind_its_pretraining(tmp_path):
    """Updates of the policy are equal, with and without pre-training; its tokens are spent."""
    c = presets.vapo_ladder_task()
    c.steps, c.critic.pretrain_steps = 70, 10
    tasks = ladder.tasks(c, ["+group_sampling", "-value_pretraining"], [0], VAPO)
    assert [t.arguments[0]["steps"] for t in tasks] == [0, 70, 60]
    for name, before in (("+group_sampling", 10), ("-value_pretraining", 0)):
        rows = [
            {"step": s, TAG: 0.2 + max(s - before, 0) / 100, "spent/tokens": 1000 * s}
            | {"critic/explained_variance": (s > before) / 4}
            for s in range(0, before + 61, 5)
        ]
        for seed in range(2):
            put(tmp_path, name, seed, rows)
    text = ladder.report(c, tmp_path, VAPO.rungs, range(2), VAPO)
    assert "against VAPO (+group_sampling)" in text and "after 480 updates" in text
    row = next(x for x in text.splitlines() if x.startswith("| -value_pretraining | 11 |"))
    # Means at 4/6, 5/6 and 6/6 of 60 steps, and of 60,000 tokens: there 10 steps fewer.
    assert "| 0.700 +- 0.000 | +0.000 +- 0.000 | 0.700 +- 0.000 | +0.100 +- 0.000 |" in row
    assert row.endswith("| 0.25 |") and "| M tokens | explained |" in text
    assert [p.name for p in tmp_path.glob("*.png")] == ["ladder.png"]


def test_every_axis_of_every_figure_is_labelled():
    runs = example(2) | {"-clip_higher": example(2)["grpo"]}
    drawn = figures.curves(runs, TAG, 60)
    assert list(drawn) == ["accuracy", "dynamics", "clip_higher"]
    every = [axes for figure in drawn.values() for axes in figure.axes]
    assert all(axes.get_xlabel() and axes.get_ylabel() and axes.lines for axes in every)
    assert [ax.lines[0].get_xdata()[-1] for ax in drawn["accuracy"].axes] == [480, 150_000]


def test_the_command_reads_back_what_is_there_and_trains_nothing(shell, tmp_path):
    for seed, records in enumerate(example(2)["grpo"]):
        put(tmp_path, "grpo", seed, records[:99])
    ask = ("--report", "--seeds=2", "--only=grpo", "--config.steps=60")
    done = shell.python("-m", "dapo_jax.lab", "ladder", f"--out={tmp_path}", *ask)
    assert "Stopped before their last step: grpo/seed_0, grpo/seed_1." in done.stdout
