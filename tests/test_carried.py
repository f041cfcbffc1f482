"""Responses that outlive steps: parked and continued, killed and resumed, the same bits."""

import contextlib
import json
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import stubbed_train
from test_engine import DRAW, make_engine, params, requests  # noqa: F401
from test_train import assert_same_bits, run, saved, small, without_clocks

from dapo_jax import build, config, train
from dapo_jax.checkpoint import groups
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.state import State
from dapo_jax.log import tags
from dapo_jax.rollout.engine import Part, Response, total
from dapo_jax.variants import choose, staleness
from dapo_jax.variants.clock import Run


@pytest.fixture(scope="module")
def engine():
    return make_engine(staleness=1)


@pytest.fixture(scope="module")
def whole(engine, params, requests):  # noqa: F811
    return engine.generate(engine.decode_params(params), requests, DRAW)[0]


@pytest.mark.parametrize("cache", [{}, dict(page_tokens=8, cache_fraction=0.4, chunk=3, slots=4)])
def test_a_row_goes_on_where_it_was_parked(cache, engine, whole, params, requests):  # noqa: F811
    """Under the same weights: the same tokens, and log-probs but for the rounding of a prefill;
    whatever its neighbours and the cache."""
    other = make_engine(staleness=1, **cache) if cache else engine
    cuts = [min(1 + i % 4, len(r.tokens) - 1) for i, r in enumerate(whole)]
    rest = [
        q._replace(prefix=r.tokens[:n].tolist())
        for q, r, n in zip(requests, whole, cuts, strict=True)
    ]
    got, stats = other.generate(other.decode_params(params), rest[::-1], DRAW)
    assert sum(cuts) > 40 and (stats.evicted > 0 or not cache)
    for a, b, n in zip(got[::-1], whole, cuts, strict=True):
        assert a.tokens.tolist() == b.tokens[n:].tolist() and a.truncated == b.truncated
        np.testing.assert_allclose(a.logps, b.logps[n:], atol=2e-5)


def test_a_call_is_fed_and_ended_from_outside(engine, whole, params, requests):  # noqa: F811
    waiting, told = list(requests[4:]), {i: [] for i in range(len(requests))}

    def feed(parts):
        for part in parts:
            assert part.start == len(told[part.index])
            told[part.index] += part.tokens.tolist()
        return [waiting.pop(0) for _ in range(min(2, len(waiting)))]

    weights = engine.decode_params(params)
    got, _ = engine.generate(weights, requests[:4], DRAW, feed=feed)
    assert [r.tokens.tolist() for r in got] == [r.tokens.tolist() for r in whole]
    assert list(told.values()) == [r.tokens.tolist() for r in whole]
    got, _ = engine.generate(weights, requests, DRAW, feed=lambda parts: None)
    assert any(r is None for r in got)
    assert engine.generate(weights, requests[:2], DRAW)[0][1].tokens.tolist() == told[1]


def test_a_prefix_that_does_not_fit_is_refused(engine, params, requests):  # noqa: F811
    long = requests[0]._replace(prefix=[1] * 20)
    with pytest.raises(ValueError, match="prefix of 20 tokens, at most 19"):
        engine.generate(engine.decode_params(params), [long], DRAW)
    plain = make_engine()
    with pytest.raises(ValueError, match="prefix of 1 tokens, at most 0"):
        plain.generate(params, [requests[0]._replace(prefix=[1])], DRAW)


LIMIT = 24


class Known:
    """As an engine: draws the tokens of (position, sample), two in a chunk, and stops by token 0,
    if not by the limit."""

    slots, chunk, stop_ids = 6, 2, (0,)

    def truth(self, position: int, sample: int) -> list[int]:
        n = LIMIT if position % 4 == 1 else 3 + (position + sample) % 4
        tokens = [1 + (7 * position + 3 * sample + t) % 30 for t in range(n)]
        return tokens if n == LIMIT else [*tokens[:-1], 0]

    def generate(self, weights, new, draw, watch, feed):
        asked, drawn = list(new), [0] * len(new)
        while new is not None:
            parts = []
            for i, r in enumerate(asked):
                rest = self.truth(r.stream, r.sample)[len(r.prefix) + drawn[i] :]
                if rest:
                    two = np.array(rest[:2], np.int32)
                    parts.append(Part(i, drawn[i], two, -two / 8, two / 4, len(rest) <= 2))
                    drawn[i] += len(two)
            if (new := feed(parts)) is not None:
                asked, drawn = asked + new, drawn + [0] * len(new)
        return [], total([])._replace(replayed=10**6)


def steps_of(n, monkeypatch, state=None, teaches=lambda position: position % 3 > 0, max_rounds=10):
    """[(step, batch, stats, what stays)] of `n` steps with S = 2 and two groups of two."""
    c = config.base()
    c.rollout.groups, c.rollout.group_size, c.rollout.staleness = 2, 2, 2
    c.rollout.max_response_tokens, c.dynamic_sampling.max_rounds = LIMIT, max_rounds

    def grade(tokenizer, judge, groups, problems):
        assert all(r.ended for g in groups for r in g.responses)
        right = lambda g: np.array([True, not teaches(g.position)])
        return [g._replace(grades=Grades(np.zeros(2), right(g))) for g in groups]

    monkeypatch.setattr(staleness.grading, "grade_groups", grade)
    train_set = SimpleNamespace(ids=[[1, 2]] * 80, problems=[None] * 80)
    text = SimpleNamespace(tokenizer=None, judge=None, train=train_set)
    machine = SimpleNamespace(engine=Known(), decode_params=lambda _: None, watch=None)
    method, state, out = choose.of(c), state or State(None, None), []
    for _ in range(n):
        step = state.counters.step
        got, stats = method.sample(method, text, machine, range(80), state)
        state = state._replace(carried=got.carried)
        state = state.count(step=step + 1, position=got.next_position)
        out.append((step, got, stats, got.carried))
    return out


def test_no_trained_token_is_too_old(monkeypatch):
    """Every response has all its tokens, of the versions of the steps that drew them."""
    seen, ages, several = {}, set(), 0
    for step, got, stats, stays in steps_of(14, monkeypatch):
        assert len(got.groups) == 2 and len(stays) <= 4
        grown = 0
        for group in [*got.groups, *stays, *(g for g in got.drawn if g.position % 3 == 0)]:
            for g, r in enumerate(group.responses):
                before = seen.get((group.position, g), [])
                truth = Known().truth(group.position, g)
                assert r.tokens.tolist() == truth[: len(r.tokens)]
                np.testing.assert_array_equal(r.logps, -r.tokens / np.float32(8))
                np.testing.assert_array_equal(r.entropies, r.tokens / np.float32(4))
                new = len(r.tokens) - len(before)
                assert r.versions.tolist() == before + [step] * new
                assert r.ended == (len(r.tokens) == len(truth))
                assert r.truncated == (r.ended and len(truth) == LIMIT)
                seen[group.position, g] = r.versions.tolist()
                grown += new
        assert stats.tokens == grown and stats.replayed <= stats.tokens  # no more than were drawn
        for r in (r for group in got.groups for r in group.responses):
            ages |= {step - v for v in r.versions.tolist()}
            several += len(set(r.versions.tolist())) == 3
    assert ages == {0, 1, 2} and several


def test_groups_of_a_run_without_staleness_are_a_step_old(monkeypatch):
    tokens = np.array([5, 0], np.int32)
    row = Response(tokens, tokens / 8, tokens / 4, False)
    carried = [Group(1, [1, 2], [row, row], Grades(np.zeros(2), np.array([True, False])))]
    state = State(None, None, carried=carried).count(step=5, position=2)
    ((_, got, _, _),) = steps_of(1, monkeypatch, state)
    assert got.groups[0].position == 1
    assert [r.versions.tolist() for r in got.groups[0].responses] == [[4, 4]] * 2


def test_a_step_that_finds_nothing_ends_after_its_rounds(monkeypatch):
    ((_, got, _, _),) = steps_of(1, monkeypatch, teaches=lambda position: False, max_rounds=3)
    assert got.groups == [] and got.rounds == 3 and len(got.drawn) == 6


def test_a_reply_comes_with_the_last_token_of_its_turn():
    """Cut at any tick, a row has the reply whole or not at all, and the note that goes with it."""

    def part(start: int, drawn: int, reply: int = 0, **how) -> Part:
        tokens = np.arange(start, start + drawn + reply, dtype=np.int32)
        logps = np.array([-1.0] * drawn + [np.inf] * reply, np.float32)
        return Part(0, start, tokens, logps, np.zeros_like(logps), **{"ended": False} | how)

    run, before = Run(), staleness._NONE
    row = staleness._Row(run, before)
    for one in (
        part(0, 2),
        part(0, 1),
        part(2, 1, 3, note=b"1"),
        part(6, 2, note=b"2", ended=True),
    ):
        row.add(one)
    assert run.known == 5
    for at, n, note in ((1, 1, b""), (2, 2, b""), (3, 6, b"1"), (4, 7, b"1"), (5, 8, b"2")):
        run.at = at
        r = row.row(7, (0,))
        assert r.tokens.tolist() == [*range(n)] and r.versions.tolist() == [7] * n
        assert (r.length, r.note, r.ended) == (at, note, at == 5)
        assert staleness._flight(Group(0, [1], [r])).runs == [Run(at, at == 5, at)]
        (again,) = groups.unflatten(groups.flatten([Group(0, [1], [r])]))
        assert again.responses[0].note == note
    run.at = 3
    row = staleness._Row(run := Run(3, False, 3), row.row(7, (0,)))
    row.add(part(0, 2, 4, note=b"2"))
    for at, n, note in ((3, 6, b"1"), (4, 7, b"1"), (5, 12, b"2")):
        run.at = at
        r = row.row(8, (0,))
        assert (len(r.tokens), r.note, r.versions.tolist()) == (n, note, [7] * 6 + [8] * (n - 6))


class Cut(Exception):
    pass


def cut_after(chunks: int) -> train.Hooks:
    return stubbed_train.at(train.QUIET, "chunk", chunks + 1, Mock(side_effect=Cut))


def numbers(workdir) -> list[str]:
    rows = without_clocks(workdir)
    beside = ("perf/", "sampling/evicted")
    return [json.dumps({k: v for k, v in r.items() if not k.startswith(beside)}) for r in rows]


def aged(steps: int, staleness: int = 1):
    fields = dict(rollout__slots=24, rollout__chunk=4, rollout__max_response_tokens=32)
    return small(steps, rollout__staleness=staleness, loss__importance_cap=5.0, **fields)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Six steps without interruption, and what `train` told of each."""
    workdir, told = tmp_path_factory.mktemp("whole"), []
    run(aged(6), workdir, hooks=train.Hooks(step=lambda *step: told.append(step)))
    return workdir, told


@pytest.mark.slow
def test_rows_go_on_in_later_steps(whole_run):
    workdir, told = whole_run
    records = without_clocks(workdir)
    assert {n for n, t in tags.TAGS.items() if t.when == "aged"} <= records[1].keys()
    for (_, step), r in zip(told, records[1:], strict=True):
        rows = [x.versions for g in step.batch.groups for x in g.responses]
        age = r["step"] - 1 - np.concatenate(rows)
        assert r["staleness/age_mean"] == pytest.approx(age.mean())
        assert r["staleness/age_max"] == age.max()
        assert r["staleness/in_flight"] == 4 and 0.5 < r["policy/importance_ess"] < 1.0001
    assert {r["staleness/age_max"] for r in records[1:]} == {0, 1}
    assert max(r["staleness/parked_tokens"] for r in records[1:]) > 0
    assert [r["spent/tokens"] for r in records[1:]] == [s.counters.tokens for s, _ in told]


@pytest.mark.slow
def test_cut_off_anywhere_it_ends_with_the_same_bits(whole_run, tmp_path):
    """After so many chunks of decoding, again and again: within a step, before an update, between
    two checkpoints. What had been finished is not drawn again."""
    c, replayed = aged(6), []
    c.checkpoint.every = 3
    for chunks in (3, 9, 14, 1, 23, 30, 400):
        note = lambda state, record: replayed.append(record.stats.replayed)
        hooks = cut_after(chunks)._replace(step=note)
        try:
            run(c, tmp_path, hooks=hooks)
        except Cut:
            continue
        break
    assert without_clocks(tmp_path)[-1]["step"] == 6 and max(replayed) > 0
    assert numbers(tmp_path) == numbers(whole_run[0])
    assert_same_bits(*(saved(w, 6) for w in (tmp_path, whole_run[0])))


@pytest.mark.slow
def test_what_is_in_flight_is_not_lost_by_another_staleness(whole_run, tmp_path):
    c = aged(4, staleness=2)
    run(c, tmp_path)
    c.steps, c.rollout.staleness, told = 7, 1, []
    with pytest.raises(config.ConfigError, match=r"config\.rollout\.staleness: 2 -> 1"):
        run(c, tmp_path)
    hooks = train.Hooks(step=lambda *step: told.append(step))
    run(c, tmp_path, hooks=hooks, allow_config_change=True)
    trained = [g.position for _, record in told for g in record.batch.groups]
    assert len(trained) == 12 and len(told[-1][0].carried) <= 4
    c.steps, c.rollout.staleness = 8, 0
    with pytest.raises(config.ConfigError, match=". groups are in flight; set 1"):
        run(c, tmp_path, allow_config_change=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, ""),
        ({"rollout.staleness": 0}, "rollout.staleness: 0, and 1 groups are in flight; set 1"),
        ({"rollout.group_size": 4}, "rollout.group_size: 4, and groups of 2 wait; set 2"),
        ({"rollout.max_response_tokens": 5}, "5, and responses wait that need 6; set 6 or more"),
        ({"data.max_prompt_tokens": 2}, "2, and a prompt of 3 waits; set 3 or more"),
        ({"seed": 1}, "data: 1 groups are in flight of other problems"),  # another stream
    ],
)
def test_groups_that_wait_fit_or_the_run_is_refused(fields, says):
    c = small(1, rollout__staleness=1, rollout__group_size=2)
    c.update(fields)
    one = Response(np.arange(5), np.zeros(5), np.zeros(5), False, ended=False)
    text = SimpleNamespace(train=SimpleNamespace(ids=[[7, 8, 9], [7, 8]]))
    stream, state = [c.seed % 2], State({}, None, carried=[Group(0, [7, 8, 9], [one, one])])
    refused = pytest.raises(config.ConfigError, match=f"^config.*{says}.*, or begin another run")
    with refused if says else contextlib.nullcontext():
        choose.resumed(c, text, stream, state)


@pytest.mark.slow
def test_other_slots_are_another_run(whole_run, tmp_path):
    c = aged(7)
    c.rollout.slots = 8
    with pytest.raises(config.ConfigError, match=r"config\.rollout\.slots: 24 -> 8"):
        run(c, whole_run[0])


def test_no_staleness_compiles_no_more():
    c = config.base()
    c.loss.importance_cap = 5.0
    for S in (0, 1):
        c.rollout.staleness = S
        machine = build.build_machine(c, 48, [0], None)
        assert machine.engine.resumes == (S > 0)
        # A prompt of one chunk looks at no page; a prompt with a prefix may be as long as a row.
        assert machine.engine.prefill_tokens == (64 if S else 32)
        sums = jax.eval_shape(machine.trainer.update, *build.calls(c, machine)["update"].arguments)
        assert ("importance_square" in sums[-1]) == choose.older_responses(c) == (S > 0)
    c.rollout.staleness, c.dynamic_sampling.surplus = 0, "carry"
    assert choose.older_responses(c)
