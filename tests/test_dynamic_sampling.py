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
        right_G = np.arange(4) < n
        return ds.Group(position, [position], right_G.tolist(), judged(right_G))

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


@given(outcomes, st.integers(1, 5), st.lists(rates, min_size=2, max_size=6))
def test_steps_lose_no_problem_and_use_none_twice(correct, need, step_rates):
    """Over many steps, with any accept rates, both ways of treating a surplus use the first mixed
    groups of the stream, in its order. Carrying never samples a problem again; dropping leaves the
    cursor right behind the last group used."""
    expected = list(itertools.islice(Stream(correct).mixed(0), need * len(step_rates)))
    for surplus in ("drop", "carry"):
        stream, cursor, carried, used = Stream(correct), 0, [], []
        for rate in step_rates:
            got = collect(
                stream, start=cursor, need=need, accept_rate=rate, surplus=surplus, carried=carried
            )
            used += positions(got.groups)
            assert positions(got.drawn) == list(range(cursor, cursor + len(got.drawn)))
            assert surplus == "carry" or (got.carried, got.next_position) == ([], used[-1] + 1)
            cursor, carried = got.next_position, got.carried
        assert used == expected
        if surplus == "carry":
            asked = [p for r in stream.asked for p in r]
            assert asked == list(range(len(asked)))


CASES = {  # outcomes, changes -> rounds asked for, positions used and carried, the next one
    # At a rate that nobody knows the guess counts as one problem: 3 of 5. Two are missing, and a
    # tenth of the batch is spare: ceil(2.4 / 0.6) = 4 are drawn, of which 6 and 7 are not needed.
    "refill": ([1, 0, 1, 4, 1, 1, 1, 1], {}, [(0, 4), (4, 8)], [0, 2, 4, 5], [], 6),
    "more carried over than needed": (
        [1], dict(start=9, need=3, accept_rate=0.3, surplus="carry", carried=[4, 5, 6, 7, 8]), [],
        [4, 5, 6], [7, 8], 9,
    ),
    "carried shrink the first round": (
        [1], dict(start=9, need=7, surplus="carry", carried=[4, 5, 6, 7, 8]), [(9, 11)],
        [4, 5, 6, 7, 8, 9, 10], [], 11,
    ),
    # The config was 'carry' before: a batch that needs no round leaves the cursor where it is.
    "carried, now dropped": ([1], dict(start=9, carried=[4, 5, 6, 7, 8]), [], [4, 5, 6, 7], [], 9),
    # AReaL's dynamic_bs: one round, however many are lost; the next step begins behind all of them
    "no refill": (
        [1, 0, 4, 2, 0, 0, 0, 0], dict(accept_rate=0.5, refill=False), [(0, 4)], [0, 3], [], 4,
    ),
    # The stream goes on, hopeless problems behind
    "hopeless thrice": (
        [0, 4], dict(start=7, max_rounds=3), [(7, 11), (11, 27), (27, 43)], [], [], 43,
    ),
    "disabled": (
        [0, 1, 4], dict(start=3, need=5, accept_rate=0.1, enabled=False), [(3, 8)],
        [3, 4, 5, 6, 7], [], 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rounds_by_hand(case):
    correct, changes, asked, used, carried, next_position = CASES[case]
    stream = Stream(correct)
    if "carried" in changes:
        changes = changes | dict(carried=[stream.group(p) for p in changes["carried"]])
    got = collect(stream, **changes)
    assert [(r[0], r[-1] + 1) for r in stream.asked] == asked and got.rounds == len(asked)
    assert (positions(got.groups), positions(got.carried)) == (used, carried)
    assert positions(got.drawn) == [p for r in stream.asked for p in r]
    assert got.next_position == next_position
    rates = {"refill": 7 / 9, "more carried over than needed": 0.3}
    assert got.accept_rate == rates.get(case, got.accept_rate)


@pytest.mark.parametrize(
    ("correct", "scores", "mixed"),
    [
        ([False, False, False], [-1.0, -1.5, -2.0], False),  # differ by the length penalty alone
        ([True, True, True], [1.0, 0.25, 0.0], False),
        ([True, False, False], [-1.0, -1.0, -1.0], True),
        (None, [0.1, 0.2, 0.9], True),  # no right and wrong: the spread of raw scores
        (None, [0.5, 0.5, 0.5], False),
        (None, [0.3, 0.3 + 1e-9, 0.3], False),
    ],
)
def test_the_filter_sees_correctness_and_only_without_it_scores(correct, scores, mixed):
    grades = Grades(np.array(scores), None if correct is None else np.array(correct))
    sample = lambda positions: [ds.Group(p, [0], [None] * 3, grades) for p in positions]
    assert len(collect(sample, need=2, max_rounds=2).groups) == (2 if mixed else 0)


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


@given(outcomes, st.integers(1, 5), rates, st.booleans(), st.integers(0, 99), st.booleans())
def test_ending_what_no_batch_can_use_keeps_the_batch(correct, need, rate, scored, seed, together):
    """That of 'drop', whichever responses end first and are graded together; what is told of the
    step is the same whether its other responses were ended or not. together: a judge of groups is
    given whole ones."""
    rng, stream = np.random.default_rng(seed), Stream(correct)
    graded = lambda g: judged(g.responses)._replace(**{"right_G": None} if scored else {})

    def grade(groups):
        groups = [g._replace(grades=graded(g)) for g in groups]
        assert not together or all(len(g.responses) == 4 for g in groups)
        return groups

    whole = lambda positions: grade(stream.group(p) for p in positions)
    missing = need

    def sample(positions):
        nonlocal missing
        drawn = [r for g in whole(positions) for r in g.responses]
        asked, so_far = [ds.Group(p, [p], ()) for p in positions], [None] * len(drawn)
        wanted = ds.needed(asked, missing, grade, ds.Group.mixed, together)
        most = len(drawn)
        for i in rng.permutation(len(drawn)):
            so_far[i] = drawn[i] if i < most else None
            if rng.random() < 0.5:
                most, before = wanted(so_far), most
                assert most <= before
        groups = whole(positions[: wanted(so_far) // 4])
        missing -= sum(map(ds.Group.mixed, groups))
        return groups

    asked = dict(need=need, accept_rate=rate, start=seed)
    drop = collect(whole, **asked, surplus="drop")
    got, full = (collect(draw, **asked, surplus="end") for draw in (sample, whole))
    assert [*map(repr, got)] == [*map(repr, full)]
    assert repr(got.groups) == repr(drop.groups) and got.next_position == drop.next_position
    assert positions(got.drawn) == [*range(seed, got.next_position)]
    assert repr(drop.drawn[: len(got.drawn)]) == repr(got.drawn) and got.rounds == drop.rounds


def test_round_size():
    sizes = {(1, 1.0, 4): 1, (4, 1.0, 4): 4, (1, 1 / 64, 4): 16, (512, 0.05, 512): 2048}
    sizes |= {(512, 0.6, 512): 913, (5, 0.3, 512): 33}  # 512 + 2.5 x 14.3 accepted, 5 + 2.5 x 1.87
    sizes |= {(32, 0.5, 32): 71}  # 32 + 3.2: a tenth of the batch
    assert {of: ds.round_size(*of) for of in sizes} == sizes


def test_what_teaches_is_the_callers_to_say():
    """Here only groups at even positions teach, among those with right and wrong responses."""
    stream = Stream([1])
    even = lambda g: g.mixed() and g.position % 2 == 0
    got = collect(stream, need=3, accept_rate=0.5, accept=even)
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
