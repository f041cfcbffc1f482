"""Lines 2 to 8 of Algorithm 1 where responses outlive steps (`rollout.staleness` > 0).

`rollout/clock.py` says in numbers which rows there are, how far each gets and what the batch is;
here the numbers get tokens and grades. A row that has not ended keeps its tokens, their log-probs
and the version of the weights that drew each (the step it was); in the next step the sampler takes
them for a part of its prompt. A batch is a pure function of the state at the start of its step, of
`rollout.slots` and of `rollout.chunk`, which are the clock's lanes and its tick, and of nothing
else: neither devices nor processes, neither pages nor what a killed run had drawn already.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax import build, parallel
from dapo_jax.config import schema
from dapo_jax.dapo import overlong_filter
from dapo_jax.dapo.dynamic_sampling import Collected, Group, fingerprint
from dapo_jax.dapo.state import State
from dapo_jax.reward import grading
from dapo_jax.rollout.engine import Part, Request, Response, Stats, total
from dapo_jax.variants.clock import Clock, Flight, Run


class Aged(NamedTuple):
    """A response of as many versions as it took, whole or not: has all that `Response` has."""

    tokens: np.ndarray  # int32 [n]
    logps: np.ndarray  # float32 [n], each as its version had it
    entropies: np.ndarray  # float32 [n], nats
    truncated: bool
    versions: np.ndarray  # int32 [n], the step in which each token was drawn
    ended: bool


_IDS, _NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)
_NONE = Aged(_IDS, _NUMBERS, _NUMBERS, False, _IDS, False)


def wanted(config, state: State) -> bool:
    """Whether a step is one of these. ConfigError: S is 0, and what is in flight would be lost."""
    parked = sum(g.grades is None for g in state.carried)
    if parked and not config.rollout.staleness:
        raise schema.ConfigError(
            f"config.rollout.staleness: 0, and the checkpoint has {parked} groups in flight; set 1"
            " or more, or begin another run with its weights (config.init_from)"
        )
    return config.rollout.staleness > 0


def sample_batch(
    config, text: build.Text, machine: build.Machine, stream: Sequence[int], state: State
) -> tuple[Collected, Stats]:
    """As `algorithm.sample_batch`; `carried` is all that stays in flight."""
    version, sampler = state.counters.step, machine.engine
    draw, need = build.training_draw(config), config.rollout.groups
    decode_params = machine.decode_params(state.params)
    groups = {g.position: _rows(g, version) for g in state.carried}
    drawn: list[Group] = []
    requests: list[Request] = []
    rows: list[_Drawn] = []  # of each request
    at: dict[tuple[int, int], _Drawn] = {}  # by (position, sample)

    def asked(flight: Flight) -> list[Request]:
        """What a group still has to draw."""
        group, out = groups[flight.position], []
        for g, (run, row) in enumerate(zip(flight.runs, group.responses, strict=True)):
            if not run.whole:
                rows.append(_Drawn(run, row))
                at[flight.position, g] = rows[-1]
                out.append(Request(group.prompt, group.position, g, prefix=row.tokens.tolist()))
        return out

    def opened(flights: list[Flight]) -> None:
        for flight in flights:
            ids = text.train.ids[stream[flight.position]]
            rows_G = [_NONE] * config.rollout.group_size
            groups[flight.position] = Group(flight.position, ids, rows_G)
            requests.extend(asked(flight))

    def now(flight: Flight) -> Group:
        """A group at the clock's tick."""
        group = groups[flight.position]
        rows_G = [
            at[flight.position, g].row(version, sampler.stop_ids)
            if (flight.position, g) in at
            else row
            for g, row in enumerate(group.responses)
        ]
        return group._replace(responses=rows_G)

    def judge(flights: list[Flight]) -> list[bool]:
        problems = [text.train.problems[stream[f.position]] for f in flights]
        whole = [now(f) for f in flights]
        graded = grading.grade_groups(text.tokenizer, text.judge, whole, problems)
        groups.update((g.position, g) for g in graded)
        drawn.extend(graded)
        if not config.dynamic_sampling.enabled:
            return [True] * len(graded)
        return [overlong_filter.teaches(g, config.loss.overlong_filter) for g in graded]

    flights = [_flight(groups[p], bool(groups[p].grades)) for p in sorted(groups)]
    clock = Clock(
        flights,
        need=need,
        staleness=config.rollout.staleness,
        samples=config.rollout.group_size,
        lanes=sampler.slots,
        tick=sampler.chunk,
        version=version,
        position=state.counters.position,
        most=config.dynamic_sampling.max_rounds * need,
    )
    requests.extend(r for flight in flights for r in asked(flight))
    used = clock.run(judge, opened)
    stats = total([])
    if used is None:

        def feed(parts: list[Part]) -> list[Request] | None:
            nonlocal used
            for part in parts:
                rows[part.index].add(part)
            requests.clear()
            used = clock.run(judge, opened)
            return None if used is not None else [*requests]

        _, stats = sampler.generate(decode_params, [*requests], draw, machine.watch, feed=feed)
    batch, taken = [now(f) for f in used], {f.position for f in used}
    carried = [now(f) for f in clock.flights if f.position not in taken]
    parallel.same_everywhere(f"step {version + 1}", fingerprint([*batch, *carried]))
    stats = stats._replace(tokens=clock.tokens, replayed=min(stats.replayed, clock.tokens))
    rounds, rate = -(-len(drawn) // need), state.counters.accept_rate
    return Collected(batch, carried, drawn, clock.position, rounds, rate), stats


class _Drawn:
    """A row of this step: what it came with, and what the sampler draws of it."""

    def __init__(self, run: Run, before: Aged):
        self.run, self.before = run, before
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        """A row that is made again brings the same tokens."""
        new = part.start + len(part.tokens) - (self.run.known - len(self.before.tokens))
        if new > 0:
            tail = (x[-new:] for x in (part.tokens, part.logps, part.entropies))
            self.parts.append(Part(part.index, self.run.known, *tail, part.ended))
            self.run.known += new
        self.run.ended |= part.ended

    def row(self, version: int, stop_ids: Sequence[int]) -> Aged:
        """At the clock's tick."""
        old, n = self.before, self.run.at

        def joined(name: str) -> np.ndarray:
            new = [getattr(part, name) for part in self.parts]
            return np.concatenate([getattr(old, name), *new])[:n]

        tokens, new = joined("tokens"), n - len(old.tokens)
        versions = np.concatenate([old.versions, np.full(new, version, np.int32)])
        ended = self.run.whole
        truncated = ended and int(tokens[-1]) not in stop_ids
        return Aged(tokens, joined("logps"), joined("entropies"), truncated, versions, ended)


def _rows(group: Group, version: int) -> Group:
    """A carried group with rows; responses that S = 0 carried over are of the step before."""
    as_row = lambda r: Aged(*r, np.full(len(r.tokens), max(version - 1, 0), np.int32), True)
    rows = [as_row(r) if isinstance(r, Response) else r for r in group.responses]
    return group._replace(responses=rows)


def _flight(group: Group, accepted: bool) -> Flight:
    begun = [int(r.versions[0]) for r in group.responses if len(r.versions)]
    runs = [Run(len(r.tokens), r.ended, len(r.tokens)) for r in group.responses]
    return Flight(group.position, runs, min(begun, default=None), accepted)
