"""Alarms as configured, from the numbers of a run, and the reasons to stop one."""

import json
import pathlib

import numpy as np
import pytest
from tables import cases

from dapo_jax import config
from dapo_jax.dapo.state import Counters, State
from dapo_jax.log import guards, metrics

NONE = guards.History([], [])
RECORDED = json.loads(pathlib.Path(__file__).with_name("recorded_runs.json").read_text())


def settings(**bounds):
    """All alarms off but `bounds`."""
    c = config.base()
    for name in c.guard.to_dict():
        if name.endswith(("_min", "_max", "_rise", "_fall")):
            setattr(c.guard, name, 0.0)
    c.guard.update(bounds)
    return c


LOG = {
    "policy/entropy": 0.5, "policy/sampler_trainer_logprob_gap": 0.01, "sampling/rounds": 1,
    "response/length_mean": 100.0, "response/truncated_frac": 0.3, "sampling/accept_frac": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.03, 0.04, 0.95, 0.96, 1.0])
def test_a_reward_that_fails_is_warned_about_and_ends_a_run_that_learns_nothing(share):
    log = {"reward/missed_frac": share}
    if share > 0.95:
        with pytest.raises(ValueError, match=f"reward: failed on {share:.0%} of the responses"):
            guards.misses(log)
    else:
        assert bool(guards.misses(log)) == (share > 0.03)
    assert not guards.misses({})


@pytest.mark.parametrize("case", cases("alarms"), ids=lambda case: case["alarm"] or "none")
def test_alarms(case):
    said, alarm = guards.alarms(settings(**case["bounds"]), LOG, NONE), case["alarm"]
    assert [s[: len(alarm)] for s in said] == ([alarm] if alarm else [])


def test_a_number_that_is_none_breaks_every_bound():
    for bound in (dict(entropy_min=0.1), dict(entropy_max=9.0)):
        assert len(guards.alarms(settings(**bound), {"policy/entropy": np.nan}, NONE)) == 1


def test_a_collapse_of_acceptance_is_an_alarm_by_default():
    for few, advice in ("wrong", "easier"), ("correct", "harder"):
        log = {"sampling/accept_frac": 0.0, f"sampling/all_{few}_frac": 1.0}
        (said,) = guards.alarms(config.base(), log, NONE)
        assert f"{advice} problems" in said
    assert not guards.alarms(config.base(), {}, NONE)  # nothing was drawn: a warning of its own


@pytest.mark.parametrize(
    ("fields", "gap", "alarm"),
    [
        ({}, 0.3, True),
        ({"rollout.cache_dtype": "int8"}, 0.3, False),
        ({"model.dtype": "bfloat16"}, 0.3, False),
        ({"model.dtype": "bfloat16"}, 1.5, True),
        ({"dynamic_sampling.surplus": "carry"}, 0.3, False),  # groups of an older policy
    ],
)
def test_the_gap_s_bound_follows_what_computes_it(fields, gap, alarm):
    c = config.base()
    c.update(fields)
    assert bool(guards.alarms(c, {"policy/sampler_trainer_logprob_gap": gap}, NONE)) == alarm


def replay(series: dict[str, list], c=None) -> dict[int, list[str]]:
    """Step -> its alarms, of a run whose tags took these values."""
    c, history, out = c or config.base(), NONE, {}
    series = {tag: values for tag, values in series.items() if tag != "config"}
    for step, values in enumerate(zip(*series.values(), strict=True), 1):
        log = {t: v for t, v in zip(series, values, strict=True) if v is not None}
        history = guards.remember(history, log)
        if said := guards.alarms(c, log, history):
            out[step] = said
    return out


def words(said: dict[int, list[str]]) -> str:
    return " ".join(s for alarms in said.values() for s in alarms)


def test_a_healthy_run_is_silent_at_the_defaults():
    """Also where entropy falls to a twentieth, because the policy learns."""
    assert replay(RECORDED["healthy"]) == {}
    assert replay(RECORDED["naive GRPO"]) == {}


def test_broken_runs_are_spoken_of_at_the_defaults():
    said = replay(RECORDED["collapse"])
    assert min(said) <= 5 and "mixed groups 0.00" in words(said)
    said = words(replay(RECORDED["collapse late"]))
    for word in ("(collapse)", "(run-away)", "truncated responses 0.9", "mixed groups 0 is"):
        assert word in said
    said = replay(RECORDED["noise"])
    assert "(explosion)" in words(said) and min(said) <= 30


def test_drifts_speak_only_where_accuracy_stands():
    flat, rising = [0.5] * 60, np.linspace(0.2, 0.8, 60).tolist()
    low = [1.0] * 30 + np.linspace(1.0, 0.01, 30).tolist()
    high = [1.0] * 30 + np.linspace(1.0, 9.0, 30).tolist()
    long = [100.0] * 30 + [100.0 * 1.08**i for i in range(30)]
    for tag, values, word in (
        ("policy/entropy", low, "(collapse)"),
        ("policy/entropy", high, "(explosion)"),
        ("response/length_mean", long, "(run-away)"),
    ):
        said = replay({"reward/accuracy": flat, tag: values})
        assert said and min(said) > 30 and words(said).count(word) == len(said)
        assert replay({"reward/accuracy": rising, tag: values}) == {}
        assert replay({"reward/accuracy": flat, tag: values}, settings()) == {}
        assert replay({"reward/accuracy": flat[:19], tag: values[-19:]}) == {}  # too early to say
    learned = replay({"reward/accuracy": [0.95] * 60, "policy/entropy": low})
    assert learned == {}  # a policy that is right has little entropy, as it should


def test_a_resumed_run_remembers_the_same(tmp_path):
    history, records = NONE, [{"step": 0, "eval/heldout/avg@k": 0.1}]
    rng = np.random.default_rng(0)
    for step in range(1, 40):
        log = {"policy/entropy": np.nan, "reward/accuracy": rng.random()}
        log["response/length_mean"] = np.float32(rng.random())
        log |= {} if step % 5 else {"eval/heldout/avg@k": rng.random()}
        record = {"step": step} | {t: metrics.number(v) for t, v in log.items()}
        records.append(json.loads(json.dumps(record)))
        history = guards.remember(history, log)
    assert [len(part) for part in history[:3]] == [5, 20, 7]
    assert guards.recall(records) == history
    assert guards.recall([]) == NONE
    damaged = [{"step": 1, "alarms": x} for x in (None, 3, [1])]  # JSON, but no run's
    assert guards.recall(damaged).standing == {"": 1}


def test_alarms_in_a_row_stop_the_run_where_configured():
    c, said = settings(entropy_min=0.6, stop_after=3), []
    state, history = State({}, None), NONE
    for step in (1, 2, 3, 4):
        state, history, broken = guards.count_alarms(
            c, state.count(step=step), LOG, history, said.append
        )
        assert len(broken) == 1
        assert bool(guards.why_stop(c, state.counters, {})) == (step >= 3)
    assert "4 steps in a row with an alarm" in guards.why_stop(c, state.counters, {})
    starts = [s.split(": entropy")[0] for s in said]
    assert starts == [f"alarm: step {n} ({n} in a row)" for n in (1, 2, 4)]
    state, _, broken = guards.count_alarms(c, state, {"policy/entropy": 0.7}, NONE, said.append)
    assert broken == [] and state.counters.alarms_in_row == 0
    assert not guards.why_stop(c, state.counters, {})
    c.guard.stop_after = 0
    assert not guards.why_stop(c, state.counters._replace(alarms_in_row=99), {})


def test_what_is_said_of_a_short_batch_counts_whole_responses_where_the_filter_does():
    c, counters = config.base(), Counters(empty_steps=3, samples=96, rounds=6)
    log = {
        "sampling/batch_groups": 0,
        "sampling/rounds": 2,
        "response/truncated_frac": np.float64(0.99),
    }
    for c.loss.overlong_filter in ("loss", "group"):
        said = guards.shortage(c, log), guards.why_stop(c, counters, log)
        whole = ["among responses that are not truncated" in text for text in said]
        assert whole == [c.loss.overlong_filter == "group"] * 2
    assert said[1].endswith("; raise rollout.max_response_tokens, which cut 99% of the responses")


def test_a_new_alarm_is_told_beside_one_that_stands():
    """Also after a restart. Another set of evaluation is another alarm, another number is not."""
    c, said, records = settings(entropy_min=0.6), [], []
    state, history = State({}, None), NONE
    for step in range(1, 9):
        if step == 6:
            c.guard.length_max, history = 90.0, guards.recall(records)
        log = LOG | {"policy/entropy": 0.5 - step / 100}
        state, history, broken = guards.count_alarms(
            c, state.count(step=step), log, guards.remember(history, log), said.append
        )
        records.append({"step": step, "alarms": broken} | log)
    told = [(int(s.split()[2]), s.split(": ")[2].split()[0]) for s in said]
    assert told == [(n, "entropy") for n in (1, 2, 4)] + [(6, "mean"), (7, "mean"), (8, "entropy")]
    fell = [f"eval/{name}/avg@k fell from {x}" for name, x in (("a24", 0.5), ("a25", 2e-5))]
    assert len(guards.stand(NONE, fell).standing) == 2


RISING = [0.4 + 0.01 * i for i in range(25)]


@pytest.mark.parametrize(
    ("training", "scores", "steps"),
    [
        (RISING, [0.4, 0.5, 0.45, 0.42, 0.3], []),  # low enough at one evaluation only
        (RISING, [0.4, 0.5, 0.35, 0.3, 0.5], [20]),
        (RISING, [0.4, 0.5, 0.41, 0.3, 0.3], [25]),
        (RISING, [0.5, 0.3, 0.45, 0.3, 0.42], []),  # it comes back
        (RISING, [0.3, 0.35, 0.4, 0.45, 0.5], []),
        (RISING[::-1], [0.4, 0.5, 0.3, 0.3, 0.3], []),  # training falls too: another trouble
        ([None] * 25, [0.4, 0.5, 0.3, 0.3, 0.3], []),  # a reward without right and wrong
    ],
)
def test_an_alarm_where_evaluation_and_training_part(training, scores, steps):
    """An evaluation at every fifth step."""
    evaluated = [x for score in scores for x in (None, None, None, None, score)]
    run = {"reward/accuracy": training, "eval/aime/avg@k": evaluated}
    said = replay(run, settings(eval_fall=0.1))
    assert list(said) == steps
    for (alarm,) in said.values():
        assert alarm.startswith("eval/aime/avg@k fell from 0.5 to 0.3 while training accuracy rose")
        assert "(they part); try: go back to the best checkpoint" in alarm
    assert replay(run, settings()) == {}  # 0 = off
    cold = {tag.replace("aime", "aime_top_p0.7"): values for tag, values in run.items()}
    assert replay(cold, settings(eval_fall=0.1)) == {}  # another temperature than training's
