"""Responses that outlive steps (`rollout.staleness` = S > 0): lines 2 to 8 of Algorithm 1.

A step ends when its batch is there; unfinished responses go on in the next one. clock.py says in
numbers which rows there are, how far each gets and what the batch is; here the numbers get tokens
and grades. A row that has not ended keeps its tokens, their log-probs and the version of the
weights that drew each (the step it was); in the next step the sampler takes them for a part of its
prompt. A batch is a pure function of the state at the start of its step, of `rollout.slots` and of
`rollout.chunk`, which are the clock's lanes and its tick, and of nothing else: neither devices nor
processes, neither pages nor what a killed run had drawn already.

In responses of several turns the clock counts the tokens that the policy drew: a reply comes with
the last one of its turn. A reply to a turn that ended beyond the clock's last tick is not used.
"""

from collections.abc import Sequence

import numpy as np

from dapo_jax import gate, parallel
from dapo_jax.algorithm import Algorithm, training_draw
from dapo_jax.dapo.dynamic_sampling import Collected, Group, fingerprint
from dapo_jax.dapo.state import State
from dapo_jax.reward import grading
from dapo_jax.rollout.engine import Part, Request, Response, Stats, total
from dapo_jax.variants import turns
from dapo_jax.variants.clock import Clock, Flight, Run

_IDS, _NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)
_NONE = Response(_IDS, _NUMBERS, _NUMBERS, False, _IDS, False)


def apply(config, algorithm: Algorithm) -> Algorithm:
    """The algorithm whose responses outlive steps, where `rollout.staleness` is set."""
    if not config.rollout.staleness:
        return algorithm
    return algorithm._replace(sample=sample_batch, remember=(*algorithm.remember, metrics))


def check(config, text, stream: Sequence[int], state: State) -> None:
    """ConfigError: groups that wait in the state would be lost, or do not fit the config."""
    c, groups, most = config.rollout, state.carried, config.data.max_prompt_tokens
    parked = [g for g in groups if g.grades is None]
    other = [g for g in parked if [*g.prompt] != [*text.train.ids[stream[g.position]]]]
    size = max((len(g.responses) for g in groups), default=c.group_size)
    room = max((len(r.tokens) + (not r.ended) for g in groups for r in g.responses), default=0)
    prompt = max((len(g.prompt) for g in groups), default=0)
    for wrong, why in (
        (parked and not c.staleness, f"rollout.staleness: 0, and {len(parked)} groups are in flight"
         "; set 1 or more"),
        (size != c.group_size, f"rollout.group_size: {c.group_size}, and groups of {size} wait; set"
         f" {size}"),
        (room > c.max_response_tokens, f"rollout.max_response_tokens: {c.max_response_tokens}, and"
         f" responses wait that need {room}; set {room} or more"),
        (prompt > most, f"data.max_prompt_tokens: {most}, and a prompt of {prompt} waits; set"
         f" {prompt} or more"),
        (other, f"data: {len(other)} groups are in flight of other problems; give those again"),
    ):  # fmt: skip
        if wrong:
            remedy = "begin another run with the checkpoint's weights (config.init_from)"
            raise gate.ConfigError(f"config.{why}, or {remedy}")


def metrics(text, stream, state: State, batch: Collected) -> tuple[State, dict[str, float]]:
    """The state as it is, and how old the trained tokens are and what is in flight. state: after
    the step."""
    parked = [r for g in batch.carried for r in g.responses if not r.ended]
    log = {
        "staleness/in_flight": len(batch.carried),
        "staleness/parked_tokens": sum(len(r.tokens) for r in parked),
    }
    if rows := [r.versions[r.drawn] for g in batch.groups for r in g.responses]:
        age = state.counters.step - 1 - np.concatenate(rows)
        log |= {
            "staleness/age_mean": age.mean(),
            "staleness/age_max": age.max(),
            "staleness/versions_per_row": np.mean([len(np.unique(v)) for v in rows]),
        }
    return state, log


def sample_batch(
    algorithm: Algorithm, text, machine, stream: Sequence[int], state: State
) -> tuple[Collected, Stats]:
    """As `algorithm.sample_batch`; `carried` is all that stays in flight."""
    config, sampler, version = algorithm.config, machine.engine, state.counters.step
    draw, need = training_draw(algorithm), config.rollout.groups
    decode_params = machine.decode_params(state.params)
    groups: dict[int, Group] = {}  # by position; of responses that go on `_Row`s
    drawn: list[Group] = []
    requests: list[Request] = []
    rows: list[_Row] = []  # of each request

    def enter(flight: Flight, group: Group) -> None:
        """Ask for what a group still has to draw."""
        rows_G = list(group.responses)
        for g, (run, row) in enumerate(zip(flight.runs, group.responses, strict=True)):
            if not run.whole:
                there = dict(prefix=row.tokens.tolist(), note=row.note)
                requests.append(Request(group.prompt, group.position, g, **there))
                rows.append(_Row(run, row))
                rows_G[g] = rows[-1]
        groups[flight.position] = group._replace(responses=rows_G)

    def opened(flights: list[Flight]) -> None:
        for flight in flights:
            ids = text.train.ids[stream[flight.position]]
            enter(flight, Group(flight.position, ids, [_NONE] * config.rollout.group_size))

    def now(flight: Flight) -> Group:
        """A group at the clock's tick."""
        at_tick = lambda r: r.row(version, sampler.stop_ids) if isinstance(r, _Row) else r
        rows_G = [at_tick(r) for r in groups[flight.position].responses]
        graded = [r._replace(grade=turns.grade(r)) if r.ended else r for r in rows_G]
        return groups[flight.position]._replace(responses=graded)

    def judge(flights: list[Flight]) -> list[bool]:
        problems = [text.train.problems[stream[f.position]] for f in flights]
        whole = [now(f) for f in flights]
        graded = grading.grade_groups(text.tokenizer, text.judge, whole, problems)
        groups.update((g.position, g) for g in graded)
        drawn.extend(graded)
        if not config.dynamic_sampling.enabled:
            return [True] * len(graded)
        return [algorithm.teaches(g) for g in graded]

    waiting = [_rows(g, version) for g in sorted(state.carried, key=lambda g: g.position)]
    flights = [_flight(group) for group in waiting]
    fixed = dict(need=need, staleness=config.rollout.staleness, samples=config.rollout.group_size)
    fixed |= dict(lanes=sampler.slots, tick=sampler.chunk)
    fixed |= dict(most=config.dynamic_sampling.max_rounds * need)
    clock = Clock(flights, version=version, position=state.counters.position, **fixed)
    for flight, group in zip(flights, waiting, strict=True):
        enter(flight, group)
    used, stats = clock.run(judge, opened), total([])
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


class _Row:
    """One response in flight: its tokens from earlier steps plus those drawn in this step."""

    def __init__(self, run: Run, before: Response):
        self.run, self.before, self.drawn = run, before, 0  # TOKENS in this step, and replies'
        self.parts: list[Part] = []

    def add(self, part: Part) -> None:
        """A row that is made again brings the same tokens."""
        new = part.start + len(part.tokens) - self.drawn
        if new > 0:
            tail = [x[-new:] for x in (part.tokens, part.logps, part.entropies)]
            self.parts.append(Part(part.index, self.drawn, *tail, part.ended, part.note))
            self.drawn += new
            self.run.known += int(np.count_nonzero(tail[1] != np.inf))
        self.run.ended |= part.ended

    def row(self, version: int, stop_ids: Sequence[int]) -> Response:
        """The response at the clock's tick."""
        old = self.before
        logps = np.concatenate([old.logps, *(part.logps for part in self.parts)])
        # What was drawn up to the tick, and the reply to that, if it is the end of a turn.
        n = int(np.searchsorted(np.cumsum(logps != np.inf), self.run.at, side="right"))

        def joined(name: str) -> np.ndarray:
            new = [getattr(part, name) for part in self.parts]
            return np.concatenate([getattr(old, name), *new])[:n]

        tokens, new = joined("tokens"), n - len(old.tokens)
        whole = (p for p in self.parts if p.note and p.start + len(p.tokens) <= new)
        note = max(whole, key=lambda part: part.start, default=old).note
        versions = np.concatenate([old.versions, np.full(new, version, np.int32)])
        ended = self.run.whole
        truncated = ended and int(tokens[-1]) not in stop_ids
        return Response(
            tokens, logps[:n], joined("entropies"), truncated, versions, ended, note=note
        )


def _rows(group: Group, version: int) -> Group:
    """The group with versions of its responses; those that S = 0 carried over are a step old."""
    before = max(version - 1, 0)
    aged = lambda r: r._replace(versions=np.full(len(r.tokens), before, np.int32))
    rows_G = [aged(r) if r.versions is None else r for r in group.responses]
    return group._replace(responses=rows_G)


def _flight(group: Group) -> Flight:
    """In numbers; a group that has grades was accepted."""
    begun = [int(r.versions[0]) for r in group.responses if len(r.versions)]
    runs = [Run(r.length, r.ended, r.length) for r in group.responses]
    return Flight(group.position, runs, min(begun, default=None), bool(group.grades))


def bounds(config, log: dict) -> list[tuple]:
    """Rows of `log.guards.Bound`."""
    advice = (
        "lower rollout.staleness, optim.lr or optim.minibatches: the policy moves too far while"
        " responses are on their way"
    )
    name = "effective sample size of the importance weights"
    return [("policy/importance_ess", name, config.guard.ess_min, 0.0, advice, "")]
