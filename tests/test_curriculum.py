"""Curricula: what is drawn and kept is what a book of pass rates, kept by hand, says; and a config
without one has nothing of it."""

import itertools

import hypothesis
import numpy as np
import pages
import pytest
import test_train
from hypothesis import given, strategies as st
from scripts import ROOT
from test_train import run

from dapo_jax import algorithm, config, train
from dapo_jax.config import presets
from dapo_jax.dapo import dynamic_sampling as ds
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.settings import DynamicSampling
from dapo_jax.dapo.state import Counters, State
from dapo_jax.data import problems
from dapo_jax.log import guards, metrics
from dapo_jax.rollout.engine import Response
from dapo_jax.variants import choose, curriculum
from dapo_jax.variants.curriculum import Rates

NINE = DynamicSampling(max_rounds=9)


def settings(**fields):
    c = config.base()
    c.curriculum.update(fields)
    config.validate(c, 1)
    return c


ROW = Response(np.zeros(1, int), np.zeros(1), np.zeros(1), False)


def group(right_G, position=0, score_G=None) -> ds.Group:
    right_G = None if right_G is None else np.array(right_G, bool)
    score_G = np.where(right_G, 1.0, -1.0) if score_G is None else np.array(score_G)
    return ds.Group(position, [1], [ROW] * len(score_G), Grades(score_G, right_G))


def of(right: int, G: int, position=0) -> ds.Group:
    return group(np.arange(G) < right, position)


def unknown(problems) -> Rates:
    return curriculum.rates_of(State(None, None), problems)


def retired(P, epoch) -> Rates:
    return Rates(np.ones(P), np.ones(P, np.int32), np.full(P, epoch, np.int32))


@pytest.mark.parametrize(("cap", "G", "fewest"), [(0.9, 16, 15), (0.9, 8, 8), (0.875, 8, 7)])
def test_the_fewest_right_responses_that_retire_a_problem(cap, G, fewest):
    c = settings(pass_rate_cap=cap)
    drawn = [of(n, G, position=n) for n in range(G + 1)]
    batch = ds.Collected([], [], drawn, G + 1, 1, 1.0)
    rates, _ = curriculum.record(range(G + 1), G + 1, unknown(G + 1), batch)
    assert curriculum.due(c.curriculum, rates, 0).all()
    left_out = (~curriculum.due(c.curriculum, rates, 1)).nonzero()[0]
    assert left_out.tolist() == [*range(fewest, G + 1)]
    log = curriculum.metrics(c.curriculum, State({}, ()), rates, [], 1.0)
    tenths = np.bincount(-(-10 * np.arange(G + 1) // G), minlength=11)
    assert log["curriculum/by_pass_rate"] == tenths.tolist()


@pytest.mark.parametrize(
    ("band", "kept"), [({}, {5, 8, 10, 20, 32, 35}), (dict(band_low=0.2, band_high=0.8), {10, 20})]
)
def test_an_open_band(band, kept):
    """Without one, groups of zero variance alone are filtered."""
    teaches = choose.of(settings(**band)).teaches
    assert {n for n in (0, 5, 8, 10, 20, 32, 35, 40) if teaches(of(n, 40))} == kept


def test_a_pass_rate_is_raw():
    """The judge's verdicts count where it gives any, whatever the scores; else the mean score."""
    assert curriculum.pass_rate(group([1, 0, 0, 0], score_G=[5.0, -1.0, -1.0, 0.0])) == 0.25
    assert curriculum.pass_rate(group(None, score_G=[0.5, 0.0, 1.0, 0.3])) == 0.45


def by_hand(c, stream, P, book, start):
    """The positions that a step draws from `start` on, if it is long enough: each problem once.
    book: row -> (rate, epoch)."""
    cap, sits_out, drawn = c.curriculum.pass_rate_cap, c.curriculum.revisit_epochs, set()
    for position in range(start, start + 10 * P):
        rate, drawn_in = book.get(stream[position], (-1.0, 0))
        epochs = position // P - drawn_in
        left_out = rate >= cap and epochs > 0 and (not sits_out or epochs <= sits_out)
        if not left_out and stream[position] not in drawn:
            drawn.add(stream[position])
            yield position


outcomes = st.lists(st.integers(0, 4), min_size=2, max_size=9).filter(
    lambda counts: any(0 < n < 4 for n in counts)
)


@hypothesis.settings(max_examples=50)
@given(
    outcomes,
    st.sampled_from([0.5, 0.75, 1.0]),
    st.integers(0, 3),
    st.sampled_from(["drop", "carry"]),
    st.lists(st.floats(1 / 64, 1.0), min_size=6, max_size=6),
)
def test_steps_draw_what_is_due_whatever_the_rounds(correct, cap, sits_out, surplus, accept_rates):
    """Right responses change with the epoch. Over six steps the book by hand gives the positions;
    neither they nor the rates depend on how many problems a round asks for."""
    P = len(correct)
    c = settings(pass_rate_cap=cap, revisit_epochs=sits_out)
    rng = np.random.default_rng(P)
    stream = np.concatenate([rng.permutation(P) for _ in range(400)]).tolist()
    outcome = lambda position: of((correct[stream[position]] + position // P) % 5, 4, position)
    rates, book, draws, cursor, carried = unknown(P), {}, np.zeros(P, int), 0, []
    for accept_rate in accept_rates:
        got = ds.collect(
            lambda positions: [outcome(p) for p in positions],
            DynamicSampling(max_rounds=1000, surplus=surplus),
            start=cursor,
            need=2,
            accept_rate=accept_rate,
            carried=carried,
            ahead=curriculum.ahead(c.curriculum, stream, P, rates),
        )
        due = by_hand(c, stream, P, book, cursor)
        assert [g.position for g in got.drawn] == list(itertools.islice(due, len(got.drawn)))
        rates, known = curriculum.record(stream, P, rates, got)
        before = dict(book)
        counted = [g for g in got.drawn if g.position < got.next_position]
        for g in counted:
            book[stream[g.position]] = (g.grades.right_G.mean(), g.position // P)
            draws[stream[g.position]] += 1
        rows = [stream[g.position] for g in counted]
        assert known == [before[row][0] for row in rows if row in before]
        if surplus == "drop":
            used = [g.position for g in got.groups]
            due = list(by_hand(c, stream, P, before, cursor))
            assert used == [p for p in due if outcome(p).mixed()][:2]
            end = used if len(used) == 2 else due or [cursor - 1]
            assert got.next_position == end[-1] + 1
        seen = {int(i): (rates.rate_P[i], rates.epoch_P[i]) for i in rates.draws_P.nonzero()[0]}
        assert seen == book and (rates.draws_P == draws).all()
        cursor, carried = got.next_position, got.carried


def test_epochs_without_a_due_problem_are_not_looked_through():
    """A thousand of them; of 17,917 problems each took half a second."""
    c, last = settings(pass_rate_cap=0.9, revisit_epochs=1000).curriculum, range(4004, 4008)
    stream = dict(zip(last, range(4), strict=True))  # another look-up fails
    assert curriculum.ahead(c, stream, 4, retired(4, 0))(4, 3) == [*last[:3]]


def test_a_few_problems_left_are_drawn_once_a_step_which_says_so():
    """One of four is left: it is not the whole batch, however many that wants."""
    c, stream, rates = settings(pass_rate_cap=0.9), problems.stream(range(4), 0), retired(4, 0)
    rates.rate_P[2] = 0.5
    (left,) = (p for p in range(8, 12) if stream[p] == 2)
    sample = lambda positions: [of(2, 4, p) for p in positions]
    ahead = curriculum.ahead(c.curriculum, stream, 4, rates)
    got = ds.collect(sample, NINE, start=8, need=8, accept_rate=0.1, ahead=ahead)
    assert [g.position for g in got.drawn] == [left] and got.next_position == left + 1
    log = {"sampling/batch_groups": 1, "sampling/rounds": 1, "curriculum/left_out": 3}
    assert guards.shortage(c, log) == (
        "1 of 32 groups have right and wrong responses after 1 rounds (0% of the problems all"
        " wrong, 0% all right), having drawn once all but the 3 problems that"
        " config.curriculum.pass_rate_cap leaves out; training on them"
    )
    assert "drawn once" not in guards.shortage(settings(), log)
    c.dynamic_sampling.on_exhausted = "stop"
    stop = lambda rounds: guards.why_stop(c, Counters(), log | {"sampling/rounds": rounds})
    assert "drawn every problem that" in stop(1) and "used up its 10 rounds" in stop(10)


def test_without_a_curriculum_nothing_is_kept_or_looked_up():
    method = choose.of(settings())
    assert method.remember == () and method.positions(None, None, None)(7, 3) == range(7, 10)
    for name, make in presets.RECIPES.items():
        assert curriculum.is_on(make().curriculum) == (name == "scale_rl")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_temperature_goes_from_one_to_the_other(schedule):
    c = settings(temperature_schedule=schedule, temperature_steps=4, temperature_end=0.5)
    c.rollout.temperature = 1.5
    share = np.minimum(np.arange(7) / 4, 1)
    share = share if schedule == "linear" else (1 - np.cos(np.pi * share)) / 2
    drawn = [algorithm.training_draw(choose.of(c), step).temperature for step in range(7)]
    np.testing.assert_allclose(drawn, 1.5 - share, rtol=1e-6)


def small(steps, **fields):
    """Eight problems, of which half a dozen epochs pass in six steps; everything is on."""
    on = dict(
        pass_rate_cap=0.75, revisit_epochs=1, band_low=0.1, band_high=0.6,
        temperature_schedule="linear", temperature_steps=4, temperature_end=1.3,
    )  # fmt: skip
    c = test_train.small(steps)
    c.curriculum.update(on | fields)
    c.mesh.update(config.base().mesh.to_dict())
    c.data.embedded_problems, c.log.tensorboard = 8, False
    c.model.hidden_size, c.model.intermediate_size, c.model.num_layers = 16, 32, 1
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 2, 1, 8
    return c


@pytest.mark.slow
def test_a_run_draws_what_is_due_and_logs_its_rates(tmp_path):
    """Killed within a step: tests/faults/test_kill.py."""
    c, steps, before, start, left_out = small(6), [], unknown(8), 0, 0
    keep = lambda state, record: steps.append((record.batch, Rates(**state.by_problem)))
    run(c, tmp_path, hooks=train.Hooks(step=keep))
    stream = problems.stream(range(8), c.seed)
    records = metrics.read(tmp_path / "metrics.jsonl")[1:]
    for (batch, rates), logged in zip(steps, records, strict=True):
        ahead = curriculum.ahead(c.curriculum, stream, 8, before)(start, len(batch.drawn))
        assert [g.position for g in batch.drawn] == ahead
        assert all(g.grades.right_G.sum() in (1, 2) for g in batch.groups)
        counted = [g.position for g in batch.drawn if g.position < batch.next_position]
        left_out += batch.next_position - start - len(counted)
        again = [before.rate_P[stream[p]] for p in counted if before.draws_P[stream[p]]]
        known = pytest.approx(np.mean(again)) if again else None
        assert logged.get("curriculum/known_rate") == known
        rate_P = rates.rate_P[rates.draws_P > 0]
        assert logged["curriculum/pass_rate"] == pytest.approx(rate_P.mean())
        tenths = np.ceil(np.round(10 * rate_P, 9)).astype(int)
        assert logged["curriculum/by_pass_rate"] == np.bincount(tenths, minlength=11).tolist()
        start, before = batch.next_position, rates
        age_P = start // 8 - rates.epoch_P
        out_P = (rates.rate_P >= 0.75) & (age_P > 0) & (age_P <= 1)
        assert logged["curriculum/left_out"] == out_P.sum()
        step = logged["step"] - 1
        assert logged["curriculum/temperature"] == pytest.approx(1 + 0.3 * min(step / 4, 1))
        assert logged["policy/sampler_trainer_logprob_gap"] < 1e-4  # both at that temperature
    assert left_out >= 3 and start > 3 * 8 and (rates.draws_P > 0).all()


def test_what_was_kept_is_left_behind_where_it_is_off():
    state = State(None, None, by_problem=retired(4, 0)._asdict())
    assert choose.resumed(settings(pass_rate_cap=0.5), None, [], state) is state
    assert choose.resumed(settings(), None, [], state).by_problem == {}


@pytest.mark.slow
def test_a_run_with_nothing_left_to_draw_says_so_and_stops(tmp_path, capsys):
    """Everything is right from the first epoch on."""
    c = test_train.small(9, curriculum__pass_rate_cap=0.9, dynamic_sampling__enabled=False)
    c.data.embedded_problems = 8
    assert train.train(c, tmp_path, score=lambda problem, response: True)
    said = capsys.readouterr().out
    assert "stopped after step 5, saved: no problem is left to draw: all of them came to" in said
    last = metrics.read(tmp_path / "metrics.jsonl")[-1]
    assert (last["curriculum/left_out"], last["sampling/rounds"], last["data/epochs"]) == (8, 0, 1)


@pytest.mark.slow
def test_the_page_s_run_and_figures(tmp_path, shell):
    """A short one: after no warm-up the problems are all wrong, which is a difficulty too."""
    (_, command), (_, code) = pages.blocks("curriculum.md")
    brief = ["steps=2", "eval.every=0", "eval.max_problems=4", "dynamic_sampling.max_rounds=2"]
    brief += ["supervised_warmup.skill_steps=20", "supervised_warmup.habit_steps=0"]
    train_it = pages.words(command.replace("configs/", f"{ROOT}/configs/"))
    for words in ([*train_it, *(f"--config.{field}" for field in brief)], ["-c", code]):
        done = shell.python(*words, cwd=tmp_path, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1")
        assert done.returncode == 0, done.stderr[-2000:]
    for name in ("curriculum", "difficulty"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
