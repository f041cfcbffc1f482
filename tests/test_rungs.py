"""The task of `benchmarks rungs`: its config, what is read off its base, and what is compared."""

import itertools
import json
import re
import types

import numpy as np
import pytest
import test_configs
import test_ladder
from tables import write_rows

from benchmarks import credit, harness, paired, rungs, rungs_recipes, score, tables
from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.data import arithmetic
from dapo_jax.lab.dynamics import scaling
from dapo_jax.lab.experiments import pool

PROMPT = "f 4 g + 2 h - 3 ?"


@pytest.mark.parametrize("name", rungs.DAPO.cumulative + rungs.DAPO.leave_one_out)
def test_a_rung_changes_its_fields_and_no_other(name):
    full = config.leaves(test_configs.load("rungs"))
    made = test_configs.load("rungs", name)
    changed = {f for f, value in config.leaves(made).items() if value != full[f]}
    assert changed <= {field for field, *_ in test_ladder.FIELDS.values()}
    assert (made.loss.overlong_filter == "group") == (name not in ("grpo", "-overlong_filtering"))
    config.validate(made, devices=1)


def test_the_limits_are_in_the_ratios_that_others_have():
    """The ramp is the paper's fifth of the limit; evaluation has JustRL's double of it."""
    c, paper = test_configs.load("rungs"), presets.paper()
    ramp = lambda c: c.reward.overlong_buffer_tokens / c.rollout.max_response_tokens
    assert ramp(c) == pytest.approx(ramp(paper), abs=0.02)
    just_rl = presets.RECIPES["just_rl"]()
    room = lambda c: c.eval.max_response_tokens / c.rollout.max_response_tokens
    assert room(c) == 2 and room(c) == pytest.approx(room(just_rl), abs=0.1)
    assert c.rollout.max_response_tokens == rungs.LIMIT
    vapo = test_configs.load("rungs", "vapo")
    assert vapo.critic.pretrain_steps == rungs.TASK["VALUE_STEPS"] == vapo.steps - c.steps
    config.validate(vapo, devices=1)
    with pytest.raises(ValueError, match="no rung 'nosuch'; there are grpo, .*, vapo, .*, cispo"):
        test_configs.load("rungs", "nosuch")


def test_the_examples_say_by_their_first_token_how_they_go_on():
    """Nearly all that is worked out is longer than its shortest form, and is never wrong."""
    shares = []
    for steps, _, mix, cap in rungs.PHASES.values():
        [(style, levels)] = mix
        made = list(arithmetic.traces(2000, levels, 3, style, cap))
        worked = [t for t in made if t.response.startswith(arithmetic.WAIT)]
        shares.append(len(worked) / len(made))
        assert steps and levels == rungs.LEVELS
        right = (rungs.values(t.prompt) for t in worked)
        found = (rungs.written(t.response.split(), v) for t, v in zip(worked, right, strict=True))
        assert all(ok for results in found for _, _, ok in results)
    assert shares == pytest.approx([0.5, 0.15, 0.04], abs=0.03)
    assert np.mean([t.ends for t in worked if len(t.prompt.split()) < 9]) > 0.95


def test_a_response_is_read_against_its_problem():
    right = rungs.values(PROMPT)
    assert right == {"f": 4, "g": 6, "h": 3}
    response = "Wait f 4 g 6 Wait g 6 h 2 Wait h 3 Answer: 3 </s>"
    found = list(rungs.written(response.split(), right))
    assert found == [(3, "f", True), (5, "g", True), (8, "g", True), (10, "h", False),
                     (13, "h", True)]  # fmt: skip
    assert list(rungs.written(["Answer:", "3", "</s>"], right)) == []


def drawn(n=60, size=16, seed=0) -> rungs.Samples:
    """Made-up responses, whose outcome the first token decides up to a tenth."""
    rng = np.random.default_rng(seed)
    worked = rng.random((n, size)) < 0.3
    right = worked ^ (rng.random((n, size)) < 0.1)
    length = np.where(worked, rng.integers(10, 40, (n, size)), 3)
    steps = np.minimum(np.array(rungs.AT) // 8, (length[..., None] - 3) // 8)
    mistake = np.where(right | ~worked, rungs.ROOM, rng.integers(5, 30, (n, size)))
    return rungs.Samples(rng.integers(1, 4, n), right, length, worked, mistake, steps)


def oracle(s: rungs.Samples, t: int) -> float:
    """Adjusted R^2 of cell means, by a dictionary of lists."""
    cells, every = {}, []
    for p, k in np.ndindex(s.length_PxK.shape):
        if s.length_PxK[p, k] > rungs.AT[t]:
            key = (s.k_P[p], t > 0 and s.worked_PxK[p, k], s.steps_PxKxT[p, k, t],
                   s.mistake_PxK[p, k] <= rungs.AT[t])  # fmt: skip
            y = float(s.right_PxK[p, k] and s.length_PxK[p, k] <= rungs.LIMIT)
            cells.setdefault(key, []).append(y)
            every.append(y)
    rest = sum(sum((y - sum(c) / len(c)) ** 2 for y in c) for c in cells.values())
    total = sum((y - sum(every) / len(every)) ** 2 for y in every)
    return 1 - (rest / (len(every) - len(cells))) / (total / (len(every) - 1))


def test_what_is_known_of_the_outcome_is_the_oracles():
    s = drawn()
    got = [rungs.known(s, t) for t in range(len(rungs.AT))]
    assert got == pytest.approx([oracle(s, t) for t in range(len(rungs.AT))], rel=1e-12)
    assert abs(got[0]) < 0.02 < 0.2 < got[1]


def test_groups_are_counted():
    right = np.array([[1] * 8 + [0] * 8, [1] + [0] * 15], bool)
    s = drawn()._replace(right_PxK=right, length_PxK=np.full((2, 16), 5), k_P=np.array([1, 1]))
    assert rungs.groups(s, 8).tolist() == [0.5, 0.25, 0.25]
    late = s._replace(length_PxK=np.full((2, 16), rungs.LIMIT + 1))
    assert rungs.groups(late, 8).tolist() == [1, 0, 0]


def test_a_base_is_described_in_json():
    s = drawn()
    found = json.loads(json.dumps(rungs.described(s)))
    every = found["levels"]["0"]
    assert set(found["levels"]) == {"0", "1", "2", "3"}
    assert every["all wrong"] + every["mixed"] + every["all right"] == pytest.approx(1)
    assert every["right"] == pytest.approx(rungs.fits(s).mean())
    assert found["cut"] == pytest.approx((s.length_PxK > rungs.LIMIT).mean())
    first = {rung: [{"step": 0}, {"step": 1, "policy/clip_high_frac": 0.01,
                                  "policy/clip_low_frac": 0.02, "critic/explained_variance": 0.5}]
             for rung in ("grpo", "+dynamic_sampling", "vapo")}  # fmt: skip
    rows = rungs.property_rows(found, first)
    assert {len(row) for row in rows} == {3} and rows[-1][-1] == "0.50"
    assert [
        "tokens clipped in steps 1-5, naive GRPO",
        "Clip-Higher",
        "high 1.00%; low 2.00%",
    ] in rows


def run(level: float, seed: int, steps: int = 6) -> list[dict]:
    """Records of a run whose accuracy comes to `level` at step 6, and stays; within the limit it
    is half of that."""
    beside = {"response/length_mean": 20, "response/truncated_frac": 0.1}
    right = lambda s: level * min(s, 6) / 6 + 0.001 * seed
    return [
        {"step": s, rungs.TAG: right(s), "right/limit": right(s) / 2, rungs.UPDATES: 16 * s,
         rungs.TOKENS: 1e6 * s} | beside
        for s in range(steps + 1)
    ]  # fmt: skip


def test_rungs_are_compared_in_the_papers_order():
    levels = dict(zip(rungs.DAPO.cumulative, (0.3, 0.4, 0.4, 0.5, 0.4, 0.9), strict=True))
    noise = np.random.default_rng(0).normal(0, 0.01, (6, 4))
    runs = {
        name: [run(x + e, s, 12 if name == "grpo" else 6) for s, e in enumerate(by_seed)]
        for (name, x), by_seed in zip(levels.items(), noise, strict=True)
    }
    table = rungs.compared(runs, 96)
    assert table.columns[2:8:3] == ("right with room", "right within the limit")
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == list(levels) and rows["grpo"][2].startswith("0.25")  # 5/6 of .3
    said = {name: row[4::3][:2] for name, row in rows.items()}
    assert said["grpo"] == ["-", "-"] and said["+clip_higher"] == ["not told apart"] * 2
    assert said["+overlong_filtering"] == said["+dynamic_sampling"] == ["ahead"] * 2
    assert said["+token_loss"] == ["behind"] * 2
    assert rows["+dynamic_sampling"][3].startswith("+0.4")  # 5/6 of .5
    assert rows["+dynamic_sampling"][-1] == "6.000"
    # At equal tokens naive GRPO is at its end too, where both are compared at 4/6, 5/6 and 6/6.
    assert "with room: +0.5" in table.notes[0] and table.notes[0].endswith("ahead.")
    assert table.notes[2].startswith("The same after 6.00 M tokens, with room: +0.5")


def test_what_ends_within_the_limit_is_counted_apart(tmp_path):
    """By the rows that an evaluation leaves."""
    (tmp_path / "eval").mkdir()
    asked = [{"correct": [True, True], "tokens": [rungs.LIMIT, rungs.LIMIT + 1]},
             {"correct": [False, True], "tokens": [3, 3]}]  # fmt: skip
    write_rows(tmp_path / "eval" / "step_000004.jsonl", asked)
    kept = [{"step": 3}, {"step": 4, rungs.TAG: 0.75}]
    write_rows(tmp_path / "metrics.jsonl", kept)
    assert rungs.records(tmp_path) == [kept[0], kept[1] | {"right/limit": 0.5}]


def test_records_are_kept_whole(tmp_path):
    runs = {f"{rung}/seed_{s}": run(0.5, s) for rung in rungs.DAPO.cumulative for s in (0, 1)}
    harness.keep(tmp_path / "kept.jsonl.gz", runs, rungs.TAGS)
    found = harness.kept(tmp_path / "kept.jsonl.gz")
    assert found == runs
    assert paired.by_arm(found, rungs.DAPO.cumulative)["grpo"] == [run(0.5, 0), run(0.5, 1)]


def test_what_is_drawn_is_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(rungs, "FIGURES", tmp_path)
    shown = {"policy/entropy": 1.0, "policy/clip_high_frac": 0.1}
    runs = {
        rung: [[r | shown for r in run(0.5, s)] for s in (0, 1)] for rung in ("grpo", rungs.WHOLE)
    }
    assert {tag for r in runs["grpo"][0] for tag in r} <= rungs.TAGS
    rungs.draw(runs, 96, 6)
    assert {f.name for f in tmp_path.iterdir()} == {"rungs.png", "rungs_curves.png"}


CURVE = 0.3, 0.9, np.log(1.8), np.log(300.0)  # start, ceiling, log exponent, log midpoint
AT = np.array([0, 128, 256, 384, 512, 640])


def test_a_score_is_predicted_with_the_spread_of_seeds():
    """Seeds differ by a constant. The mean of S of them says where the curve is, and the mean of m
    others lies about it: the variance is that of one seed times (1/S + 1/m)."""
    exact = scaling.sigmoid(AT, *CURVE)
    ends = [960.0, 1920.0]
    fit, alone = score.predicted(AT, exact[None] + np.zeros((4, 1)), ends, 2, 3)
    for guess, value in zip(alone, scaling.sigmoid(ends, *CURVE), strict=True):
        assert guess == pytest.approx((value,) * 3, abs=1e-6)
    assert fit.ceiling.value == pytest.approx(0.9, abs=1e-5)
    off_S = np.linspace(-0.03, 0.03, 12)
    _, (guess, _) = score.predicted(AT, exact + off_S[:, None], ends, 4, 150)
    half = 1.96 * off_S.std() * np.sqrt(1 / 12 + 1 / 4)
    assert guess.value == pytest.approx(scaling.sigmoid(960.0, *CURVE), abs=1e-5)
    assert (guess.high - guess.low) / 2 == pytest.approx(half, rel=0.2)


def records_of(curve, ends) -> list[dict]:
    place = {rungs.TAG: curve, "right/limit": curve / 2}
    return [{rungs.UPDATES: float(x)} | {tag: float(y[i]) for tag, y in place.items()}
            for i, x in enumerate(ends)]  # fmt: skip


def test_longer_runs_are_judged_by_what_was_predicted():
    noise = np.random.default_rng(0).normal(0, 0.01, (4, len(AT)))
    short = [records_of(scaling.sigmoid(AT, *CURVE) + e, AT) for e in (*noise, *-noise)]
    ends = 640 * np.array([1.5, 2, 3])
    longer = [records_of(scaling.sigmoid(ends, *CURVE) - off, ends) for off in (0.0, 0.3)]
    table = score.compared(short, longer[:1] * 2, 640, 2, 20)
    assert [row[1] for row in table.rows] == ["960", "1,280", "1,920"] * 2
    assert [row[-1] for row in table.rows] == ["yes"] * 6
    below = score.compared(short, longer[1:] * 2, 640, 2, 20)
    assert [row[-1] for row in below.rows[:3]] == ["no"] * 3
    unmeasured = score.compared(short, [], 640, 2, 20)
    assert [row[-2:] for row in unmeasured.rows] == [["-", "-"]] * 6


def test_what_longer_runs_came_to_is_kept():
    asked = types.SimpleNamespace(out="", steps=0, write=False, seeds=8, draws=10)
    cells = [row[1:3] + row[4:5] for row in score.measure(asked)[0].rows]
    assert cells == [row[1:3] + row[4:5] for row in tables.read("score")["rows"]]


@pytest.mark.parametrize("name", rungs_recipes.METHODS)
def test_a_recipe_has_its_sizes_from_the_task_and_the_rest_from_its_source(name, tmp_path):
    """What differs from full DAPO is of the algorithm; only DAPO, by either clip, filters."""
    fields = lambda name: rungs_recipes.task(name, 1e-3, 7, 7, tmp_path, "", 5).arguments[0]
    full, made = fields("full DAPO"), fields(name)
    changed = {field for field, x in made.items() if x != full[field]}
    parts = {"loss", "advantage", "reward", "dynamic_sampling", "curriculum", "model"}
    assert {field.split(".")[0] for field in changed} <= parts
    assert bool(changed) == (name != "full DAPO") and made["optim.lr"] == 1e-3
    assert (made["loss.overlong_filter"] == "group") == (name in rungs_recipes.AGAIN)
    draws = made["dynamic_sampling.enabled"] and made["dynamic_sampling.refill"]
    assert draws == (name in rungs_recipes.AGAIN)
    c = config.base()
    c.update(made)
    config.validate(c, devices=1)


def test_evaluation_and_the_first_step_cost_a_run_nothing(monkeypatch, tmp_path):
    """CPU-seconds: what the hooks hear of a run, told by a clock of one's own."""
    clock = [0.0]
    monkeypatch.setattr(rungs_recipes.time, "process_time", lambda: clock[0])

    def run(c, where, hooks):
        for step in range(3):
            for phase, s in dict(evaluation=50, rollout=2, chunk=1, update=4 + step).items():
                hooks.phase(phase)
                clock[0] += s
            hooks.step(None, None)
            clock[0] += 100  # the record, before the next phase begins
        return bool(c.steps)

    monkeypatch.setattr(rungs_recipes.train, "train", run)
    assert rungs_recipes.clocked(tmp_path, {"steps": 3}) == [0, 8, 17]
    with pytest.raises(RuntimeError, match="cut off"):
        rungs_recipes.clocked(tmp_path, {"steps": 0})


def test_recipes_are_held_against_full_dapo_at_three_budgets(monkeypatch):
    """`grpo` is .2 ahead, and draws half of the tokens, so that these are compared at its end, and
    at the same point of its curve at all three budgets; its CPU-seconds are the others'."""
    noise = np.random.default_rng(0).normal(0, 0.01, (3, 4))
    made = {}
    for (name, x, tokens), by_seed in zip(
        [("full DAPO", 0.5, 1.0), ("grpo", 0.7, 0.5), ("gspo", 0.5, 1.0)], noise, strict=True
    ):
        for seed, e in enumerate(by_seed):
            run_of = made[f"recipes/{name.replace(' ', '_')}/seed_{seed}"] = run(x + e, 0)
            for r in run_of:
                beside = dict.fromkeys(rungs_recipes.TAGS - r.keys(), 0.25)
                r |= beside | {rungs_recipes.CPU_S: 2.0 * r["step"]}
                r[rungs.TOKENS] *= tokens
    runs = paired.by_arm(made, rungs_recipes.METHODS)
    monkeypatch.setattr(rungs_recipes, "RATES", dict.fromkeys(runs, 4.5e-4))
    table, beside = rungs_recipes.compared(runs, 96)
    assert [row[0] for row in table.rows[::3]] == ["96 updates", "3.00 M tokens", "12 CPU-seconds"]
    assert [row[1] for row in table.rows] == ["full DAPO", "grpo", "gspo"] * 3
    said = [[row[5], row[8]] for row in table.rows]
    assert said == [["-"] * 2, ["ahead"] * 2, ["not told apart"] * 2] * 3
    for name, row in zip(runs, table.rows[3:6], strict=True):
        ends = [np.interp(3e6 * np.array([4, 5, 6]) / 6, [r[rungs.TOKENS] for r in of],
                          [r[rungs.TAG] for r in of]).mean() for of in runs[name]]  # fmt: skip
        assert row[3].startswith(f"{np.mean(ends):.3f} +- ")
    assert table.rows[4][4].startswith("+0.3") and table.rows[1][4].startswith("+0.1")
    assert beside.rows[1] == ["grpo", "20.0", "0.100", "3.000", "25.00%", "25.00%", "0.25", "0.25",
                              "12"]  # fmt: skip


def test_the_rates_are_those_that_were_best_of_their_row():
    for name, *scores, chosen in tables.read("rungs_rates")["rows"]:
        assert rungs_recipes.GRID[np.argmax([float(x) for x in scores])] == float(chosen)
        assert rungs_recipes.RATES[name] == float(chosen)


@pytest.mark.parametrize("what, after, before", rungs_recipes.CHANGES)
def test_arms_between_dapo_and_cispo_differ_in_what_is_said(what, after, before, tmp_path):
    """One thing is changed: the rate, the mean, the objective with its bounds, or one of both."""

    def fields(name):
        if name in rungs_recipes.PARTS:
            return rungs_recipes.part(name, 3, tmp_path).arguments[0]
        rate, steps = rungs_recipes.RATES[name], rungs_recipes.STEPS
        return rungs_recipes.task(name, rate, 3, 3, tmp_path, "", steps).arguments[0]

    a, b = fields(after), fields(before)
    bounds = {"loss.clip_low", "loss.clip_high"}
    expected = {
        "the rate": {"optim.lr"},
        "the objective": {"loss.objective"} | bounds,
        "the mean": {"loss.normalizer"},
        "CISPO's bounds": bounds,
        "the clipped tokens' gradient": {"loss.objective"},
    }[re.sub(" (halved|doubled|kept)$", "", what.split(",")[0])]
    assert {field for field in a if a[field] != b[field]} == expected
    assert a["steps"] == rungs_recipes.STEPS and a["seed"] == 3


def test_what_is_changed_alone_is_told_with_its_verdict():
    """The objective gives .2, whichever the mean; the mean and the rate nothing."""
    noise = np.random.default_rng(1).normal(0, 0.01, (8, 5))
    base = dict.fromkeys(("full DAPO", "dapo_half_rate", "dapo_mean"), 0.5)
    base |= dict.fromkeys(("dapo_objective", "cispo"), 0.7)
    runs = {}
    for (name, x), by_seed in zip(base.items(), noise.T, strict=True):
        runs[name] = [run(x + e, 0) for e in by_seed]
        for r in itertools.chain(*runs[name]):
            r |= dict.fromkeys(rungs_recipes.TAGS - r.keys(), 0.25)
    changes, arms, _ = rungs_recipes.changed(runs, rungs_recipes.CHANGES, 96, "of")
    assert [row[0].split(",")[0] for row in changes.rows] == [
        "the rate halved", *["the objective"] * 2, *["the mean"] * 2,
    ]  # fmt: skip
    assert [row[4] for row in changes.rows] == [
        "not told apart", *["ahead"] * 2, *["not told apart"] * 2
    ]  # fmt: skip
    means = {row[0]: float(row[1].split()[0]) for row in arms.rows}
    for _, a, b, change, *_ in changes.rows:
        assert abs(means[a] - means[b] - float(change.split()[0])) < 0.0016  # three roundings


def test_a_response_to_signs_is_decided_by_its_first_twelve_tokens():
    """`credit`: right if every sign is its letter's own; what follows has its form, and no more."""
    rng = np.random.default_rng(5)
    good = []
    for _ in range(500):
        prompt, answer = credit.problem(rng)
        words = credit.response(rng, prompt, 0.7).split()
        letters, numbers = prompt.split()[:-1:2], prompt.split()[1::2]
        assert len(words) == credit.LIMIT - 1 and answer == numbers[-1] and len({*letters}) == 4
        own = [credit.SIGN[x] == sign for x, sign in zip(letters, words[1:12:3], strict=True)]
        said = [n if ok else "?" for n, ok in zip(numbers, own, strict=True)]
        assert words[0:12:3] == letters and words[2:12:3] == said
        assert words[12:-2:3] == [*map(str, reversed(range(16)))] and words[-2] == arithmetic.ANSWER
        assert words[-1] == (answer if all(own) else "?")
        good += own
    assert np.mean(good) == pytest.approx(0.7, abs=0.04)
    assert sorted(credit.SIGN.values()).count("+") == len(credit.SIGN) / 2


def test_values_are_held_against_rewards_by_position(monkeypatch, tmp_path):
    """Values that are right once a token was read, and 0 before: a stand-in for the model."""
    read = lambda params, rows, used: np.where(rows.trained_AxRxT, rows.tokens_AxRxT - 8.0, 0.0)
    critic = types.SimpleNamespace(values=read, row_sharding=None)
    machine = types.SimpleNamespace(others={"critic": critic})
    monkeypatch.setattr(credit.rungs, "machine_of", lambda c, where: (None, machine))
    monkeypatch.setattr(credit.parallel, "to_program", lambda rows, sharding: rows)
    response = lambda ok: types.SimpleNamespace(tokens=np.full(12, 9 if ok else 7))
    right = np.array([True, False, False])
    grades = types.SimpleNamespace(right_G=right)
    group = types.SimpleNamespace(
        prompt=[3, 8], responses=list(map(response, right)), grades=grades
    )
    found = credit.explained(credit.get_config("vapo", tmp_path), tmp_path, None, [group] * 2)
    assert found == pytest.approx([0, 1, 1, 1])


def test_vapo_and_dapo_are_compared_where_values_know():
    """VAPO is .1 ahead within its last steps; the first record of a run has what values knew."""
    found = {}
    for seed, e in enumerate(np.random.default_rng(2).normal(0, 0.004, 6)):
        for method, ahead in (("dapo", 0.0), ("vapo", 0.1), ("vapo_longer", 0.1)):
            of = found[f"{method}/seed_{seed}"] = run(0.5 + ahead + e, seed)
            of[0][credit.KNOWN] = [0.0, 0.3, 0.9, 0.9] if ahead else []
    table = credit.compared(found)
    dapo, vapo, longer = table.rows
    assert vapo[1:] == longer[1:]
    assert [dapo[0], *dapo[-4:]] == ["dapo", *[""] * 4] and vapo[-2:] == ["0.90 +- 0.00"] * 2
    assert [note.split(", ")[-1] for note in table.notes] == ["ahead."] * 6
    assert table.columns[2] == "at 96 updates" and vapo[4] == "6.000"


def test_a_rung_where_values_know_is_held_against_the_one_below():
    """Those with length-adaptive GAE are .1 ahead; all have values that know as much."""
    found, noise = {}, np.random.default_rng(4).normal(0, 0.004, (14, 6))
    of = credit.VAPO
    for name, by_seed in zip(of.rungs, noise, strict=True):
        at = of.cumulative.index(name) if name in of.cumulative else len(of.without)
        ahead = 0.1 * (at > 2 and name != "-length_adaptive_gae")
        for seed, e in enumerate(by_seed):
            made = found[f"{name}/seed_{seed}"] = run(0.5 + ahead + e, seed)
            made[0][credit.KNOWN] = [0.0, 0.3, 0.9, 0.9]
    table = credit.climbed(found)
    assert [row[0] for row in table.rows] == [*of.rungs]
    told = {row[0]: (row[2], row[5]) for row in table.rows}
    assert told.pop("ppo") == ("", "")
    assert told.pop("+length_adaptive_gae") == ("+decoupled_gae", "ahead")
    assert told.pop("-length_adaptive_gae") == (credit.WHOLE, "behind")
    assert {verdict for _, verdict in told.values()} == {"not told apart"}
    assert told["-token_loss"][0] == credit.WHOLE and told["+token_loss"][0] == "+clip_higher"
    assert table.notes[0].startswith("+group_sampling less ppo at 32 updates: +")
    assert table.notes[0].endswith(", ahead.") and table.rows[0][-1] == "0.90 +- 0.00"


def test_rungs_where_values_know_have_as_many_steps_of_the_policy(tmp_path):
    whole = config.leaves(credit.get_config(credit.LONGEST, tmp_path))
    assert config.leaves(credit.get_config(credit.WHOLE, tmp_path)) == whole
    for name in credit.VAPO.rungs:
        c = credit.get_config(name, tmp_path)
        config.validate(c, devices=1)
        assert c.steps - c.critic.pretrain_steps == credit.STEPS and c.critic.enabled
        assert bool(c.critic.pretrain_steps) == (name not in ("ppo", "-value_pretraining"))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_base_is_made_once_and_a_rung_begins_from_it(tmp_path, monkeypatch):
    mix = rungs.habit(0.5)
    monkeypatch.setattr(rungs, "PHASES", {"skill": (2, 1e-2, mix, 40), "rare": (1, 1e-3, mix, 40)})
    monkeypatch.setattr(rungs, "SAMPLES", 8)
    monkeypatch.setattr(rungs, "ROOM", 16)
    monkeypatch.setattr(rungs, "AT", (0, 1))
    base = rungs.of_base(3)
    small = {"steps": 1, "rollout.groups": 2, "optim.minibatches": 1, "eval.max_problems": 4}
    run = rungs.task("+soft_overlong", 1, 3, tmp_path, **small)
    found = pool.run_all([base, run], tmp_path, jobs=1)
    assert set(found[base.folder]["levels"]) == {"0", *map(str, rungs.LEVELS)}
    assert found[run.folder]["steps"] == 1 and run.folder == "+soft_overlong/seed_1"
    last = rungs.records(tmp_path / run.folder)[-1]
    assert 0 <= last["right/limit"] <= last[rungs.TAG] <= 1
    monkeypatch.setattr(rungs, "write_problems", lambda directory: pytest.fail("made again"))
    assert pool.run_all([base, run], tmp_path, jobs=1) == found
