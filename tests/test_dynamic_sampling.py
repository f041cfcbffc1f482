"""Dynamic sampling (paper Eq. 11): the batch is the first N mixed groups of the problem stream."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dapo_jax.dapo import dynamic_sampling as ds
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.settings import DynamicSampling
from dapo_jax.rollout.engine import Response


def judged(right_G) -> Grades:
    return Grades(np.where(right_G, 1.0, -1.0), np.array(right_G))


class Stream:
    """A policy of which we know the outcome: position -> how many of G=4 responses are correct,
    repeating. Keeps the ranges it was asked for."""

    def __init__(self, correct):
        self.correct, self.asked = correct, []

    def group(self, position):
        n = self.correct[position % len(self.correct)]
        return ds.Group(position, [position], [None] * 4, judged(np.arange(4) < n))

    def __call__(self, positions):
        self.asked.append(positions)
        return [self.group(p) for p in positions]

    def mixed(self, start):
        for p in itertools.count(start):
            if 0 < self.correct[p % len(self.correct)] < 4:
                yield p


def positions(groups):
    return [g.position for g in groups]


def collect(stream, **changes):
    """changes: of the call, and of config.dynamic_sampling."""
    fields = {f.name for f in dataclasses.fields(DynamicSampling)}
    named = {name: changes.pop(name) for name in [*changes] if name in fields}
    settings = DynamicSampling(**(dict(max_rounds=1000) | named))
    return ds.collect(stream, settings, **(dict(start=0, need=4, accept_rate=1.0) | changes))


outcomes = st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(
    lambda counts: any(0 < n < 4 for n in counts)
)
rates = st.floats(1 / 64, 1.0)


@given(outcomes, st.integers(0, 50), st.integers(1, 8), rates)
def test_first_mixed_groups_of_the_stream(correct, start, need, rate):
    """The expected batch is computed without the accept rate, so it cannot depend on it. The cursor
    ends right behind the last group used, and draws go through the stream without a gap."""
    stream = Stream(correct)
    got = collect(stream, start=start, need=need, accept_rate=rate)
    expected = list(itertools.islice(stream.mixed(start), need))
    assert positions(got.groups) == expected
    assert got.next_position == expected[-1] + 1
    assert got.carried == []
    asked = [p for r in stream.asked for p in r]
    assert asked == positions(got.drawn) == list(range(start, start + len(asked)))
    assert got.rounds == len(stream.asked)


@given(outcomes, st.integers(1, 5), st.lists(rates, min_size=2, max_size=6))
def test_steps_lose_no_problem_and_use_none_twice(correct, need, step_rates):
    """Over many steps, with any accept rates, both ways of treating a surplus use the same groups
    in the same order; carrying never samples a problem again."""
    expected = list(itertools.islice(Stream(correct).mixed(0), need * len(step_rates)))
    for surplus in ("drop", "carry"):
        stream, cursor, carried, used = Stream(correct), 0, [], []
        for rate in step_rates:
            got = collect(
                stream, start=cursor, need=need, accept_rate=rate, surplus=surplus, carried=carried
            )
            used += positions(got.groups)
            cursor, carried = got.next_position, got.carried
        assert used == expected
        if surplus == "carry":
            asked = [p for r in stream.asked for p in r]
            assert asked == list(range(len(asked)))


def test_refill_asks_for_what_is_missing_and_a_little_more():
    """Two of four accepted at a rate that nobody knows. The guess counts as one problem: 3 of 5.
    Two are missing, and a tenth of the batch is spare: ceil(2.4 / 0.6) = 4 are drawn."""
    stream = Stream([1, 0, 1, 4, 1, 1, 1, 1])
    got = collect(stream, need=4, accept_rate=1.0)
    assert stream.asked == [range(0, 4), range(4, 8)]
    assert positions(got.groups) == [0, 2, 4, 5]
    assert got.next_position == 6  # problems 6 and 7 were accepted and not needed
    assert got.accept_rate == 7 / 9


def test_carried_groups_shrink_the_first_round():
    stream = Stream([1])
    first = collect(stream, need=4, accept_rate=0.5, surplus="carry")
    assert stream.asked == [range(0, 9)] and positions(first.carried) == [4, 5, 6, 7, 8]
    again = collect(
        stream, start=9, need=7, accept_rate=1.0, surplus="carry", carried=first.carried
    )
    assert stream.asked[1:] == [range(9, 11)]
    assert positions(again.groups) == [4, 5, 6, 7, 8, 9, 10] and again.carried == []
    assert positions(again.drawn) == [9, 10]  # what this step sampled


def test_enough_carried_groups_need_no_round():
    stream = Stream([1])
    carried = [stream.group(p) for p in range(5)]
    got = collect(stream, start=9, need=3, surplus="carry", carried=carried, accept_rate=0.3)
    assert stream.asked == [] and got.rounds == 0 and got.accept_rate == 0.3
    assert positions(got.groups) == [0, 1, 2] and positions(got.carried) == [3, 4]
    assert got.next_position == 9


def test_without_refill_what_does_not_teach_leaves_a_hole():
    """AReaL's dynamic_bs: one round of as many problems as the batch has, however many are lost;
    the next step begins behind all of them."""
    stream = Stream([1, 0, 4, 2, 0, 0, 0, 0])
    got = collect(stream, need=4, accept_rate=0.5, refill=False)
    assert stream.asked == [range(0, 4)]
    assert positions(got.groups) == [0, 3] and got.next_position == 4 and got.rounds == 1
    got = collect(stream, start=4, need=4, accept_rate=got.accept_rate, refill=False)
    assert got.groups == [] and got.next_position == 8


@pytest.mark.parametrize("rounds", [1, 3])
def test_max_rounds_with_nothing_to_learn(rounds):
    stream = Stream([0, 4])
    got = collect(stream, start=7, need=4, accept_rate=1.0, max_rounds=rounds)
    assert got.rounds == len(stream.asked) == rounds
    assert got.groups == []
    assert got.next_position == stream.asked[-1].stop  # the stream goes on, hopeless ones behind


def test_max_rounds_leaves_a_short_batch():
    got = collect(Stream([1, 0, 0, 0]), need=4, accept_rate=1.0, max_rounds=1)
    assert positions(got.groups) == [0] and got.next_position == 4


def test_without_dynamic_sampling_one_round_takes_everything():
    stream = Stream([0, 1, 4])
    got = collect(stream, start=3, need=5, accept_rate=0.1, enabled=False)
    assert stream.asked == [range(3, 8)]
    assert positions(got.groups) == [3, 4, 5, 6, 7] and got.next_position == 8


@pytest.mark.parametrize(
    ("correct", "rewards", "mixed"),
    [
        ([False, False, False], [-1.0, -1.5, -2.0], False),  # differ by the length penalty alone
        ([True, True, True], [1.0, 0.25, 0.0], False),
        ([True, False, False], [-1.0, -1.0, -1.0], True),
    ],
)
def test_the_filter_sees_correctness_never_shaped_rewards(correct, rewards, mixed):
    def sample(stream_positions):
        return [
            ds.Group(p, [0], [None] * 3, Grades(np.array(rewards), np.array(correct)))
            for p in stream_positions
        ]

    got = collect(sample, need=2, max_rounds=2)
    assert len(got.groups) == (2 if mixed else 0)


@pytest.mark.parametrize(
    ("scores", "mixed"),
    [([0.1, 0.2, 0.9], True), ([0.5, 0.5, 0.5], False), ([0.3, 0.3 + 1e-9, 0.3], False)],
)
def test_without_right_and_wrong_the_filter_sees_the_spread_of_raw_scores(scores, mixed):
    def sample(stream_positions):
        return [ds.Group(p, [0], [None] * 3, Grades(np.array(scores))) for p in stream_positions]

    got = collect(sample, need=2, max_rounds=2)
    assert len(got.groups) == (2 if mixed else 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 8), rates)
def test_estimate_stays_a_share_and_rounds_stay_bounded(correct, need, rate):
    """However hopeless the stream, no round asks for more than a few problems a missing group."""
    stream = Stream(correct)
    got = collect(stream, need=need, accept_rate=rate, max_rounds=6)
    assert 1 / 64 <= got.accept_rate <= 1.0
    assert max(len(r) for r in stream.asked) <= ds.MOST_AHEAD * need
    drawn = [0 < correct[p % len(correct)] < 4 for p in positions(got.drawn)]
    low, high = sorted((float(np.mean(drawn)), rate))
    assert low - 1e-9 <= got.accept_rate <= max(high, 1 / 64) + 1e-9  # between prior and evidence


@pytest.mark.parametrize(
    ("missing", "rate", "need", "size"),
    [
        (1, 1.0, 4, 1),
        (4, 1.0, 4, 4),
        (512, 0.6, 512, 913),  # 512 + 2.5 x 14.3 accepted
        (5, 0.3, 512, 33),  # 5 + 2.5 x 1.87
        (32, 0.5, 32, 71),  # 32 + 3.2: a tenth of the batch
        (1, 1 / 64, 4, 16),
        (512, 0.05, 512, 2048),
    ],
)
def test_round_size(missing, rate, need, size):
    assert ds.round_size(missing, rate, need) == size


def whole_batches(teaches, start, need=512, size=1536):
    """(rounds, problems) where each round draws `size`, from `start` on until `need` teach."""
    rounds = 0
    while teaches[start : start + rounds * size].sum() < need:
        rounds += 1
    return rounds, rounds * size


OUTCOMES = {teaches: Grades(np.array([1.0 * teaches, 0.0])) for teaches in (True, False)}


@pytest.mark.parametrize("rate", [0.05, 0.08, 0.125, 0.3, 0.6])
def test_a_batch_of_the_paper_is_full_in_no_more_rounds_than_whole_batches_take(rate):
    """30 steps in a row from where the rate is known, each against rounds of 1,536 problems from
    the same place: full, in at most their rounds (at .6, where one of theirs is enough: in one of
    its own in 95% of steps), from fewer problems. In a first step, where nobody knows the rate, one
    round more may be needed."""
    rng = np.random.default_rng(0)
    teaches = rng.random(500_000) < rate

    def step(start, estimate):
        draw = lambda ids: [ds.Group(p, (), (), OUTCOMES[bool(teaches[p])]) for p in ids]
        got = collect(draw, start=start, need=512, accept_rate=estimate, max_rounds=10)
        assert len(got.groups) == 512
        rounds, drawn = whole_batches(teaches, start)
        return got, (got.rounds - rounds, len(got.drawn) - drawn, got.rounds)

    position, estimate, known = 0, rate, []
    for _ in range(30):
        got, more = step(position, estimate)
        position, estimate = got.next_position, got.accept_rate
        known.append(more)
    known = np.array(known)
    if rate == 0.6:
        assert (known[:, 2] == 1).mean() >= 0.95
    else:
        assert known[:, 0].max() <= 0
    first = np.array([step(start, 1.0)[1] for start in range(0, 250_000, 50_000)])
    assert first[:, 0].max() <= 1
    assert known[:, 1].sum() < 0 and first[:, 1].sum() < 0


def test_what_teaches_is_the_callers_to_say():
    """Of groups with right and wrong responses those at even positions have a signal left."""
    stream = Stream([1])
    got = collect(stream, need=3, accept_rate=0.5, accept=lambda g: g.mixed and g.position % 2 == 0)
    assert positions(got.groups) == [0, 2, 4] and got.next_position == 5
    assert got.accept_rate == pytest.approx((4 + 0.5 * 3) / (7 + 3))
    got = collect(stream, need=3, enabled=False, accept=lambda g: False)
    assert positions(got.groups) == [0, 1, 2]


@pytest.mark.parametrize(("choice", "teaches"), [("off", True), ("loss", True), ("group", False)])
def test_a_group_whose_only_miss_is_truncated_teaches_where_that_one_counts(choice, teaches):
    """The loss leaves it out under 'loss', the mean of its group only under 'group'."""
    group = ds.Group(0, [0], drawn(first_truncated=True), judged([False, True, True, True]))
    assert ds.teaches(group, choice) == teaches


def drawn(logp=0.0, first_truncated=False):
    x = np.full(1, logp)
    return [Response(x, x, x, truncated=first_truncated and i == 0) for i in range(4)]


def test_a_fingerprint_sees_all_that_is_decided():
    one, other = judged([True] * 4), judged([True, True, True, False])
    groups = [ds.Group(0, [0], drawn(), one), ds.Group(1, [0], drawn(), one)]
    groups += [ds.Group(0, [1], drawn(), one), ds.Group(0, [0], drawn(), other)]
    groups += [ds.Group(0, [0], drawn()), ds.Group(0, [0], drawn(logp=-1.0), one)]
    groups += [ds.Group(0, [0], drawn(first_truncated=True), one)]
    assert len({b"".join(ds.fingerprint([g])) for g in groups}) == len(groups)
