"""The clock of rollouts that never drain: counters alone, nobody too old, nobody dropped."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dapo_jax.variants.clock import Clock, Flight, Run

SIZES = dict(need=4, staleness=1, samples=3, lanes=10, tick=4, most=40)


class World:
    """A policy of which the lengths are known, and whether a group teaches. `draw` says how many
    tokens the sampler has drawn of which rows when it next looks at the clock."""

    def __init__(self, length, teaches=lambda position: True):
        self.length, self.teaches = length, teaches
        self.judged: list[tuple[int, int]] = []  # (step, position)

    def step(self, version, flights, position, draw, **sizes) -> tuple[Clock, list[Flight]]:
        clock = Clock(flights, version=version, position=position, **sizes)
        rows = {id(r): (f.position, g) for f in flights for g, r in enumerate(f.runs)}

        def judge(whole):
            self.judged += [(version, f.position) for f in whole]
            return [self.teaches(f.position) for f in whole]

        def opened(new):
            rows.update((id(r), (f.position, g)) for f in new for g, r in enumerate(f.runs))

        while (used := clock.run(judge, opened)) is None:
            assert len(clock.flights) <= (sizes["staleness"] + 1) * sizes["need"]
            open_rows = [r for f in clock.flights for r in f.runs if not r.ended]
            for run, n in draw(open_rows):
                whole = self.length(*rows[id(run)])
                run.known = min(run.known + n, whole)
                run.ended = run.known == whole
        return clock, used


def in_turn(rows):
    """All rows by one chunk."""
    return [(r, 4) for r in rows]


def run(world, steps, draw=in_turn, **changes):
    """[(trained positions, age of the oldest, tokens, what stays)] of each step."""
    sizes, flights, position, out = SIZES | changes, [], 0, []
    for version in range(steps):
        clock, used = world.step(version, flights, position, draw, **sizes)
        taken = {f.position for f in used}
        age = max((version - f.begun for f in used), default=0)
        kept = [f for f in clock.flights if f.position not in taken]
        # What was drawn beyond the last tick is not used; tokens of the tick are there to go on.
        flights = [
            Flight(f.position, [Run(r.at, r.whole, r.at) for r in f.runs], f.begun, f.accepted)
            for f in kept
        ]
        position = clock.position
        stays = [(f.position, f.begun, f.accepted, [r.at for r in f.runs]) for f in flights]
        out.append(([f.position for f in used], age, clock.tokens, stays))
    return out


def lengths(seed):
    """Log-normal, a number for each (position, sample)."""

    @functools.cache
    def of(position, sample):
        z = np.random.default_rng([seed, position, sample]).normal()
        return int(np.clip(np.rint(np.exp(2.3 + 0.9 * z)), 1, 60))

    return of


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 4, 7]))
def test_it_does_not_matter_in_which_order_a_sampler_draws(seed, staleness, lanes, tick):
    teaches = lambda p: np.random.default_rng([seed, p, 99]).random() < 0.7
    world = lambda: World(lengths(seed), teaches)
    changes = dict(staleness=staleness, lanes=lanes, tick=tick)
    rng = np.random.default_rng(seed)

    def any_order(rows):
        some = [r for r in rows if rng.random() < 0.4] or rows
        return [(r, int(rng.integers(1, 30))) for r in some]

    expected = run(world(), 6, **changes)
    assert run(world(), 6, any_order, **changes) == expected
    assert all(age <= staleness for _, age, *_ in expected)
    assert all(len(used) == 4 and used == sorted(used) for used, *_ in expected)


@pytest.mark.parametrize("staleness", [1, 2])
def test_every_group_that_teaches_is_trained_on_once_and_in_time(staleness):
    """Also one that takes as long as fifty others."""
    slow = lambda p, g: 400 if p % 7 == 3 else 8
    world = World(slow, teaches=lambda p: p % 3 > 0)
    steps = run(world, 40, staleness=staleness)
    trained = list(itertools.chain(*(used for used, *_ in steps)))
    assert len(trained) == len(set(trained)) == 160
    stays = {p for p, *_ in steps[-1][-1]}
    assert set(trained) | {p for p in stays} >= {p for p in range(max(trained)) if p % 3}
    assert max(age for _, age, *_ in steps) == staleness
    assert len(world.judged) == len({p for _, p in world.judged})


@pytest.mark.parametrize("begun, ends", [(1, True), (0, False)])
def test_a_step_waits_for_those_that_would_grow_too_old_and_not_for_its_batch(begun, ends):
    old = Flight(0, [Run(known=4, ended=True, at=4)], begun=0, accepted=True)
    slow = Flight(1, [Run(known=4, at=4)], begun)
    clock = Clock([old, slow], **SIZES | dict(need=1, samples=1), version=1, position=2)
    assert clock.batch() == ([old] if ends else None)


def test_nothing_that_teaches_ends_a_step_short():
    world = World(lambda p, g: 5, teaches=lambda p: False)
    (used, _, _, stays), *_ = run(world, 1)
    assert used == [] and len(world.judged) == SIZES["most"]
    assert [p for p, *_ in stays] == [40, 41, 42, 43]  # no more came in than were on their way
