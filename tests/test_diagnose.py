"""`lab diagnose`: each rule on series made for it, both ways; the command; what is no run."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from scripts import ROOT

from dapo_jax import config
from dapo_jax.lab import causes, diagnose
from dapo_jax.lab.dynamics.browse import Sample
from dapo_jax.lab.evidence import Answer, Curve, Evidence, follows, share, states

N = 20
UP = np.linspace(0.2, 0.8, N)


def flat(x: float) -> np.ndarray:
    return np.full(N, float(x))


def line(a: float, b: float) -> np.ndarray:
    return np.linspace(a, b, N)


HEALTHY = {
    "reward/accuracy": UP, "policy/entropy": line(0.4, 0.15), "policy/loss": flat(0),
    "policy/clip_low_frac": flat(0.01), "policy/clip_high_frac": flat(0.002),
    "policy/approx_kl": flat(0.001), "policy/ratio_max": flat(1.5), "optim/skipped": flat(0),
    "policy/sampler_trainer_logprob_gap": flat(2e-6), "optim/lr": flat(3e-4),
    "response/length_mean": line(10, 13), "response/truncated_frac": flat(0.01),
    "sampling/accept_frac": flat(0.7), "sampling/all_wrong_frac": line(0.3, 0.05),
    "sampling/all_correct_frac": line(0, 0.25), "sampling/parse_fail_frac": flat(0.02),
    "sampling/shadow_gain": flat(0), "data/epochs": line(0.01, 0.4),
    "eval/heldout/avg@k": (np.array([0, 10, 20]), np.array([0.15, 0.5, 0.75])),
}  # fmt: skip


def sample(step, response, answer, correct=None, **fields) -> Sample:
    cut, prompt = fields.pop("truncated", False), fields.pop("prompt", "q")
    return Sample(step, "p", prompt, response, answer, 5, cut, 0.1, correct, **fields)


def rows(right: str, wrong: str, answer: str = "9") -> list[Sample]:
    """Four right and four wrong samples for each of 12 steps."""
    made = []
    for step in [*range(1, 13)] * 4:
        made.append(sample(step, right, answer, True, extracted=right.split()[-1]))
        made.append(sample(step, wrong, answer, False, extracted=wrong.split()[-1]))
    return made


def evidence(samples=(), fields=None, answers=(), **series) -> Evidence:
    """A healthy run with these tags (a/b written a__b) in place of its own; None: not logged."""
    made = HEALTHY | {k.replace("__", "/"): v for k, v in series.items()}
    at = lambda v: v if isinstance(v, tuple) else (np.arange(1, len(v) + 1), np.asarray(v, float))
    found = {tag: at(v) for tag, v in made.items() if v is not None}
    leaves = config.leaves(config.base()) | (fields or {})
    return Evidence(found, leaves, list(samples) or rows("Answer: 9", "Answer: 8"), answers)


def evaluated(*values):
    return np.linspace(0, N, len(values)).astype(int), np.array(values)


EVAL = "eval/heldout/avg@k"
STALE, ALONE = {"rollout.staleness": 4}, {"rollout.group_size": 1}
FALLS, SEEN = line(0.3, 0.1), {"data__problems_seen": flat(99)}
NEAR = [Answer(0, str(i), str(i + 1), False) for i in range(40)]  # of a gold answer each
ANY = [Answer(0, str(i), str(17 * i % 40), False) for i in range(40)]
PAID = [sample(9, "Answer: 7", "9", True, extracted="7")] * 5  # of 48 more: 9%
TURNED = [s for s in rows("x = 9.", "Answer: 10") if s.step < 7]  # paid for what is right, and
TURNED += [s for s in rows("Answer: 0", "Answer: 10") if s.step > 6]  # then for what is wrong
GONE = np.array([0.2, *[0.0] * (N - 1)])  # all that was there after a step
# rule -> (what makes it fire, what nearly does)
CASES = {
    causes.log_probs_apart: (
        dict(policy__sampler_trainer_logprob_gap=flat(0.4)),
        dict(policy__sampler_trainer_logprob_gap=flat(0.4), fields=STALE),
    ),
    causes.weights_apart: (
        dict(policy__importance_mean=flat(1.3)), dict(policy__importance_mean=flat(1.04)),
    ),
    causes.unknown_words: (
        dict(samples=[sample(2, "9", "9", True, prompt=" \u2047 f 3 ?")] * 3),
        dict(samples=[sample(2, "9", "9", True, prompt="what is f?")] * 3),
    ),
    causes.never_stops: (
        dict(
            response__truncated_frac=flat(1),
            samples=[sample(1, "Answer: 9 Answer:", "9", True, extracted="9", truncated=True)] * 8,
        ),
        dict(
            response__truncated_frac=flat(1),
            samples=[sample(1, "f 4 g 6", "9", False, truncated=True)] * 8,
        ),
    ),
    causes.no_answer_found: (
        dict(sampling__parse_fail_frac=flat(0.9)), dict(sampling__parse_fail_frac=line(0.9, 0.05)),
    ),
    causes.reward_fails: (
        dict(reward__missed_frac=flat(0.3)), dict(reward__missed_frac=flat(0.01)),
    ),
    causes.other_verifier: (
        dict(sampling__shadow_gain=flat(0.2)), dict(sampling__shadow_gain=flat(-0.2)),
    ),
    causes.gold_marked_wrong: (
        dict(samples=rows("Answer: 8", "Answer: 9", "9 apples")),
        dict(samples=rows("Answer: 9", "Answer: 90", "9 apples")),
    ),
    causes.wrong_marked_right: (
        dict(samples=rows("Answer: 8", "Answer: 7")),
        dict(samples=rows("Answer: 9", "Answer: 7") + PAID),
    ),
    causes.guesses: (
        dict(reward__accuracy=flat(0.02), answers=NEAR),
        dict(reward__accuracy=flat(0.02), answers=ANY),
    ),
    causes.evaluation_ahead: (
        {"reward__accuracy": flat(0.05), EVAL: evaluated(0.5, 0.5)},
        {"reward__accuracy": line(0.05, 0.6), EVAL: evaluated(0.5, 0.5)},
    ),
    causes.too_old: (
        dict(policy__importance_ess=flat(0.3), reward__accuracy=FALLS, fields=STALE),
        dict(policy__importance_ess=flat(0.95), reward__accuracy=FALLS, fields=STALE),
    ),
    causes.not_finite: (
        dict(optim__skipped=flat(1)), dict(optim__skipped=np.eye(N)[3]),
    ),
    causes.moves_too_far: (
        dict(policy__clip_low_frac=flat(0.3), reward__accuracy=FALLS),
        dict(policy__clip_low_frac=flat(0.3)),
    ),
    causes.scatters: (
        dict(policy__entropy=line(0.4, 6), reward__accuracy=FALLS),
        dict(policy__entropy=line(0.4, 1.3), reward__accuracy=FALLS),
    ),
    causes.runs_away: (
        dict(response__length_mean=line(10, 30), response__truncated_frac=line(0, 0.8)),
        dict(response__length_mean=line(10, 30)),
    ),
    causes.limit_too_short: (
        dict(response__truncated_frac=flat(0.7)), dict(response__truncated_frac=line(0.7, 0.05)),
    ),
    causes.pays_for_wrong: (
        dict(samples=TURNED), dict(samples=rows("x = 9.", "Answer: 10")),
    ),
    causes.pays_for_form: (
        dict(reward_part__form=line(0.2, 0.9), reward_part__right=line(0.3, 0.2)),
        dict(reward_part__form=line(0.2, 0.9), reward_part__right=line(0.3, 0.6)),
    ),
    causes.evaluation_stands: (
        {EVAL: evaluated(0.2, 0.2, 0.15)},
        {EVAL: evaluated(0.2, 0.1, 0.5), "eval/b/avg@k": evaluated(0.2, 0.2, 0.2)},
    ),
    causes.all_learned: (
        dict(data__epochs=line(0, 8), sampling__all_correct_frac=line(0, 1)),
        dict(data__epochs=line(0, 0.5), sampling__all_correct_frac=line(0, 1)),
    ),
    causes.by_heart: (
        {"data__epochs": line(0, 8), EVAL: evaluated(0.2, 0.25, 0.2)},
        {"data__epochs": line(0, 8), EVAL: evaluated(0.2, 0.5, 0.7)},
    ),
    causes.none_left: (
        dict(curriculum__left_out=line(0, 95), data__epochs=line(0, 4), **SEEN),
        dict(curriculum__left_out=line(0, 50), data__epochs=line(0, 4), **SEEN),
    ),
    causes.collapses: (
        dict(policy__entropy=line(0.4, 0.001) ** 3, reward__accuracy=flat(0.3)),
        dict(policy__entropy=line(0.4, 0.001) ** 3),
    ),
    causes.starts_collapsed: (
        dict(policy__entropy=flat(0.01), sampling__accept_frac=flat(0.2)),
        dict(policy__entropy=flat(0.01)),
    ),
    causes.no_signal: (
        dict(sampling__accept_frac=flat(0.02), reward__accuracy=flat(0.01)),
        dict(sampling__accept_frac=line(0.7, 0.02)),
    ),
    causes.rate_is_zero: (
        dict(optim__lr=[3e-4, *[0.0] * (N - 1)]), dict(optim__lr=line(3e-4, 0)),
    ),
    causes.does_not_move: (
        dict(policy__ratio_max=flat(1.001), reward__accuracy=flat(0.3)),
        dict(policy__ratio_max=flat(1.001)),
    ),
}  # fmt: skip


# What else makes a rule fire, and what nearly does
MORE = [
    (causes.no_answer_found, dict(sampling__parse_fail_frac=flat(0.9)),
     dict(sampling__parse_fail_frac=[0.03, *[0.9] * (N - 1)])),  # after an update
    (causes.guesses, dict(reward__accuracy=flat(0.02), answers=NEAR),
     dict(reward__accuracy=flat(0.04), answers=NEAR)),  # guessing has .024
    (causes.guesses, dict(reward__accuracy=flat(0.02), answers=NEAR),
     dict(reward__accuracy=flat(0.02), answers=NEAR, response__truncated_frac=flat(0.2))),
    (causes.evaluation_ahead, {"reward__accuracy": flat(0.05), EVAL: evaluated(0.15, 0.15)},
     {"reward__accuracy": GONE, EVAL: evaluated(0.15, 0)}),  # it was there before the updates
    (causes.too_old, {"policy__importance_ess": flat(0.8), EVAL: evaluated(0.3, 0.4, 0.2),
                      "fields": STALE},
     {"policy__importance_ess": flat(0.8), EVAL: evaluated(0.3, 0.2, 0.28), "fields": STALE}),
    (causes.moves_too_far, dict(policy__approx_kl=[2.0], reward__accuracy=GONE),
     dict(policy__approx_kl=[0.4], policy__clip_low_frac=[0.1], policy__clip_high_frac=[0.1],
          reward__accuracy=GONE)),  # what a single step has is no share of the steps
    (causes.moves_too_far, dict(policy__approx_kl=[2.0, *flat(0)], reward__accuracy=GONE),
     dict(policy__approx_kl=[2.0, *flat(0)], reward__accuracy=line(0.2, 0.15))),
    (causes.limit_too_short, dict(response__truncated_frac=flat(0.2), reward__accuracy=FALLS),
     dict(response__truncated_frac=flat(0.2))),
    (causes.all_learned,
     dict(data__epochs=line(0, 8), sampling__all_correct_frac=line(0, 0.6)),
     dict(data__epochs=line(0, 8), sampling__all_correct_frac=line(0, 0.5))),
    (causes.by_heart, {"data__epochs": line(1, 20), EVAL: evaluated(0.2, 0.35, 0.52)},
     {"data__epochs": line(1, 20), EVAL: evaluated(0.2, 0.4, 0.6)}),
    (causes.none_left, dict(curriculum__left_out=line(0, 70), data__epochs=line(0, 4),
                            reward__accuracy=UP[:-2], **SEEN),
     dict(curriculum__left_out=line(0, 70), data__epochs=line(0, 4), **SEEN)),
    (causes.no_signal, dict(sampling__accept_frac=flat(0), reward__accuracy=flat(0.3)),
     dict(sampling__accept_frac=flat(0), reward__accuracy=flat(0.3), fields=ALONE)),
    (causes.collapses, dict(sampling__accept_frac=flat(0), policy__entropy=line(1, 0.01) ** 2),
     dict(sampling__accept_frac=flat(0), policy__entropy=line(1, 0.01) ** 2, fields=ALONE)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "fires", "near"), MORE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_rule_s_other_figures(rule, fires, near):
    assert np.isfinite(rule(evidence(**fires)).value) and rule(evidence(**near)) is None


def test_answers_that_follow_their_gold_answers():
    """Pair by pair; what has no number, or two gold ones, is left out."""
    rng = np.random.default_rng(3)
    pairs = [(g, g + int(rng.integers(-6, 7))) for g in rng.integers(0, 21, 50).tolist()]
    more = [Answer(0, "a", "3", False), Answer(0, "3", "none", False), Answer(0, "1, 2", "1", None)]
    found = follows([Answer(0, str(g), f"x = {s}.", g == s) for g, s in pairs] + more)
    told = [(a > b) == (c > d) for a, c in pairs for b, d in pairs if a != b and c != d]
    assert found.alike == pytest.approx(np.mean(told)) and 0.6 < found.alike < 0.95
    assert found.chance == pytest.approx(np.mean([s == g for g, _ in pairs for _, s in pairs]))
    assert all(np.isnan(follows(NEAR[:31]))) and follows(NEAR[:32]).alike == 1.0


def test_every_rule_has_its_two_cases():
    assert {rule.judge for rule in causes.RULES} == CASES.keys()
    assert {rule.cause for rule in causes.RULES} == diagnose.CAUSES.keys()


@pytest.mark.parametrize("rule", causes.RULES, ids=lambda r: r.judge.__name__)
def test_a_rule_fires_on_its_figure_and_not_near_it(rule):
    fires, near = CASES[rule.judge]
    found, e = rule.judge(evidence(**fires)), evidence(**fires)
    assert found and not diagnose.lacks(e, rule)
    assert 0 <= found.step <= N and np.isfinite(found.value) and found.why
    assert rule.judge(evidence(**near)) is None and not diagnose.lacks(evidence(**near), rule)
    first = diagnose.diagnose(e)
    assert rule.cause in [s.cause for s in first.suspects] and first.status == diagnose.FOUND


def test_what_the_cases_beside_do_not_ask():
    """Pay for what was right at no time; a run without staleness; one evaluation that rises."""
    assert causes.pays_for_wrong(evidence(samples=rows("Answer: 0", "Answer: 10")))
    of_fresh = evidence(policy__importance_ess=flat(0.3), reward__accuracy=FALLS)
    assert causes.too_old(of_fresh) is None
    assert causes.evaluation_stands(evidence(**{EVAL: evaluated(0.2, 0.3, 0.5)})) is None


def test_a_healthy_run_has_no_suspect():
    d = diagnose.diagnose(evidence())
    assert d.suspects == [] and d.status == diagnose.NOTHING and d.learns
    assert next(diagnose.report("runs/a", d)) == "nothing found"
    assert any("reward_part/" in line for line in d.untold)  # what it does not log is said


def test_what_comes_first_is_told_first():
    """A learning rate that is too high also makes entropy collapse: the cause is named, the other
    is a suspect."""
    d = diagnose.diagnose(
        evidence(
            policy__clip_low_frac=flat(0.3), reward__accuracy=FALLS, policy__entropy=line(0.4, 0)
        )
    )
    assert [s.cause for s in d.suspects] == ["lr high", "entropy"]
    said = "\n".join(diagnose.report("runs/a", d))
    assert said.startswith("cause: the learning rate is too high (lr high)")
    assert "other suspects" in said and "entropy has collapsed" in said
    plain = json.loads(json.dumps(diagnose.as_json(d), allow_nan=False))
    assert plain["first"] == "lr high" and plain["suspects"][0]["figures"][0]["bound"] == 0.1


def test_a_run_s_steps_are_those_that_it_trained():
    """Step 0 of an evaluation is none."""
    tested = np.arange(4), np.full(4, 0.5)
    e = Evidence({"reward/accuracy": (np.arange(1, 4), np.ones(3)), EVAL: tested}, {})
    assert diagnose.steps(e) == 3 and len(e.curve(EVAL).steps) == 4


def test_curve():
    """By hand: 20 steps have windows of 4; noise is the differences' deviation over sqrt 4."""
    c = Curve(np.arange(1, 21), np.arange(20.0))
    assert (c.window, c.start, c.late, c.median, c.noise) == (4, 1.5, 17.5, 9.5, 0.0)
    up_and_down = Curve(np.arange(1, 21), np.tile([0.0, 1.0], 10))
    assert up_and_down.noise == pytest.approx(np.std([1, -1] * 9 + [1]) / 2)
    assert c.since(c.values > 15) == 17 and c.since(c.values > 99) == 20
    assert c.since(c.values % 2 == 0) == 1  # most steps never are: the first
    holds = np.array([1, 0, 0, 1, 0, 1], bool)  # in half of all, and in two of the last three
    assert Curve(np.arange(1, 7), np.zeros(6)).since(holds) == 4
    assert Curve(np.arange(5), np.array([0, 1, 0, 0.2, 0.3])).gained() is False  # noise
    assert np.isnan(Curve(np.zeros(0, int), np.zeros(0)).late)
    up = Curve(np.arange(20), np.linspace(0, 0.1, 20))  # by .084
    assert up.gained() and up.gained(0.5) and not up.gained(2.0)
    assert share([True, None, True, False], 3) == 2 / 3 and np.isnan(share([True, None], 2))


def test_an_evaluation_that_still_rises_may_lag_behind():
    """By .2 where training gained .5: less than .6 of it, more than a quarter."""
    lags = lambda *values: evidence(data__epochs=line(0, 8), **{EVAL: evaluated(*values)})
    assert causes.by_heart(lags(0.2, 0.3, 0.4)) is None
    assert causes.by_heart(lags(0.2, 0.4, 0.4)).step == N


@pytest.mark.parametrize(
    ("response", "answer", "is_it"),
    [
        ("Answer: 9", "9", True), ("so x = 9.", "9", True), ("Answer: 9.0", "9 apples", True),
        ("Answer: 1,234", "1234", True), ("9 then 8", "9", False), ("none", "9", False),
        ("Answer: -9", "9", False), ("Answer: 9", "x^2 + 9 y^3", None), ("Answer: a", "a", None),
    ],
)  # fmt: skip
def test_the_gold_answer_as_a_person_reads_it(response, answer, is_it):
    assert states(Answer(1, answer, response, None)) is is_it


def write(folder, e: Evidence, wrong_gold: bool = False) -> str:
    """Evidence as the workdir that it would be read from."""
    records: dict[int, dict] = {}
    for tag, (steps, values) in e.series.items():
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            records.setdefault(step, {"step": step})[tag] = None if np.isnan(value) else value
    folder.mkdir()
    lines = [json.dumps(records[step]) + "\n" for step in sorted(records)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if e.config:
        (folder / "config.json").write_text(json.dumps(e.config))
    for name in ("rollouts", "eval"):
        (folder / name).mkdir()
    rows = [{"set": "a", "gold": "12"}, {"gold": 3}, []]  # the last are none of ours
    rows[0] |= {"extracted": ["12", None, "12"], "correct": [False, False, False]}
    rows[0]["truncated"] = [False, False, True]
    text = "".join(json.dumps(row) + "\n" for row in rows * 12)
    for step in (0, 10):  # the second of three is not read
        (folder / "eval" / f"step_{step:06d}.jsonl").write_text(text if wrong_gold else "")
    (folder / "eval" / "step_000020.jsonl").write_text("no json\n")
    for s in e.samples:
        row = {k: v for k, v in s._asdict().items() if v == v and v != ()}
        with (folder / "rollouts" / f"step_{s.step:06d}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return str(folder)


def test_the_command(tmp_path, capsys):
    gap = flat(0.4)
    gap[3] = np.nan
    sick = write(tmp_path / "a", evidence(policy__sampler_trainer_logprob_gap=gap))
    assert diagnose.main([sick, f"--json={tmp_path}/d.json"]) == diagnose.FOUND == 2
    out = capsys.readouterr().out
    assert out.startswith("cause: sampler and trainer are two policies (apart)\n")
    assert "logprob_gap = 0.4 from step 1 on (bound 0.02)" in out and f"explain {sick}" in out
    assert json.loads((tmp_path / "d.json").read_text())["first"] == "apart"
    assert diagnose.main([write(tmp_path / "b", evidence())]) == diagnose.NOTHING == 0
    assert capsys.readouterr().out.startswith("nothing found\n")


def test_the_command_before_head(tmp_path):
    """Nobody reads on: no traceback, and the same exit status."""
    run = write(tmp_path / "a", evidence())
    nobody, out = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "dapo_jax.lab", "diagnose", run]
    done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
    os.close(out)
    assert (done.returncode, done.stderr) == (diagnose.NOTHING, "")


def test_answers_of_evaluations_count(tmp_path, capsys):
    """Whole answers that the verifier read: one of three, as the others are none or cut off."""
    run = write(tmp_path / "a", evidence(), wrong_gold=True)
    assert diagnose.evaluated(run) == [Answer(0, "12", "12", False)] * 12
    assert diagnose.main([run]) == diagnose.FOUND
    assert "(verifier)\n  samples: wrong, and the gold answer = 0.2" in capsys.readouterr().out


def test_what_another_system_logs(tmp_path, capsys):
    """verl's console log: no samples, no config, other names."""
    log = tmp_path / "verl.log"
    line = "step:{} - actor/entropy:0.4 - actor/grad_norm:0.1 - actor/pg_clipfrac:{} - "
    line += "actor/ppo_kl:0.1 - critic/score/mean:{} - critic/score/max:1 - critic/score/min:0 - "
    line += "response_length/mean:100 - response_length/clip_ratio:0.01"
    score = np.linspace(0.5, 0.1, 12)
    log.write_text("\n".join(line.format(i + 1, 0.3, x) for i, x in enumerate(score)))
    assert diagnose.main([str(log)]) == diagnose.FOUND
    out = capsys.readouterr().out
    assert "(lr high)" in out and "policy/clip_frac = 0.3" in out and "no samples in" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or directory"), ({}, "no metrics.jsonl in it"),
        ({"metrics.jsonl": ""}, "no step in it"), ({"metrics.jsonl": "{\n{}\n"}, "no JSON object"),
        ({"metrics.jsonl": '{"step": 1}', "config.json": "[]"}, "not a run's"),
        ({"metrics.jsonl": '{"step": 1}', "rollouts/step_000001.jsonl": "no\n"}, "no JSON object"),
        ({"metrics.jsonl": '{"step": "x"}'}, "no step (0, 1, 2, ...)"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_one_line(tmp_path, capsys, content, said):
    run = tmp_path / "run"
    for name, text in (content or {}).items() if content is not None else ():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    if content == {}:
        run.mkdir()
    with pytest.raises(SystemExit) as ended:
        diagnose.main([str(run)])
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and out == "" and said in err
    assert err.startswith("error: ") and err.count("\n") == 1 and str(run) in err


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1, "reward/accuracy": 0.1}\n{"step": 2, "rew',  # cut off while it was written
        '{"step": 1, "loss": 3, "mine/score": "high", "x": [1]}\n',  # another's tags
        "".join(json.dumps({"step": i, **dict.fromkeys(HEALTHY)}) + "\n" for i in range(9)),
        "".join(json.dumps({"step": i, "policy/ratio_max": 10**400}) + "\n" for i in range(9)),
    ],
    ids=["half", "others", "null", "huge"],
)
def test_a_run_without_figures_cannot_be_told(tmp_path, capsys, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert diagnose.main([str(tmp_path)]) == diagnose.UNTOLD
    out = capsys.readouterr().out
    assert out.startswith("nothing can be told\n") and out.count("\n") > 20


# --- Logs of real runs of other systems ---

NAMES = {
    "reward_avg": "reward/accuracy", "avg_response_len": "response/length_mean",
    "entropy_avg": "policy/entropy",
}  # fmt: skip
# A public log of a 0.6B model -> the first cause of what its curves show
REAL = {
    "7_4_plus_clip_ratio": None,  # learns: reward .6 to .7, entropy about .1
    "7_3_plus_tracking": "lr high",  # entropy .3 to 7 and a reward of .6 to .1
    "7_5_plus_kl": "lr high",  # entropy to 11.9, that of 151,936 tokens at random, and no reward
    "7_6_plus_format_reward": "hacked",  # paid for a form too: the reward rises, the evaluation not
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_run_by_its_figures(assets, tmp_path, capsys, name):
    """In our tags, as a user would rename his columns; as it stands it has none that is known."""
    (log,) = (assets / "train_logs").glob(f"*{name}_metrics.csv")
    records = [r for r in csv.DictReader(log.read_text().splitlines()) if r["step"].isdigit()]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for r in records:
            row = {"step": int(r["step"])} | {ours: float(r[k]) for k, ours in NAMES.items()}
            row |= {EVAL: float(r["eval_acc"]) / 100} if r["eval_acc"] else {}
            file.write(json.dumps(row) + "\n")
    first = REAL[name]
    status = diagnose.FOUND if first else diagnose.NOTHING
    assert len(records) > 400 and diagnose.main([str(tmp_path), f"--json={tmp_path}/d"]) == status
    assert json.loads((tmp_path / "d").read_text())["first"] == first
    assert diagnose.main([str(log)]) == diagnose.UNTOLD
    assert "nothing can be told\n" in capsys.readouterr().out


def test_real_logs_as_they_are(assets, capsys):
    """verl's: responses go from 30% to 98% truncated. A file of scores by name is no log."""
    logs = assets / "train_logs"
    assert diagnose.main([str(logs / "verl_dapo_rloo_qwen2.5-1.5b_steps.csv")]) == diagnose.FOUND
    assert capsys.readouterr().out.startswith("cause: responses run away from, or do not fit")
    with pytest.raises(SystemExit) as ended:
        diagnose.main([str(logs / "speed_rl_dapo_grpo_rloo_eval_curves.jsonl.gz")])
    err = capsys.readouterr().err
    assert ended.value.code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert "neither JSON lines, nor verl's" in err
