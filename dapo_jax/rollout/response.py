"""What sampling gives: responses and counts; and who may observe it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.schedule import Request


class Response(NamedTuple):
    """Token ids with the stop token, if there was one; lengths are numbers, never inferred."""

    tokens: np.ndarray  # int32 [n]
    logps: np.ndarray  # float32 [n], at temperature, before any nucleus cut; inf: a reply's token
    entropies: np.ndarray  # float32 [n], nats
    truncated: bool  # ended by the length limit and not by a stop token
    # Of a response that several steps drew:
    versions: np.ndarray | None = None  # int32 [n], the step whose weights drew each token
    ended: bool = True  # False: the next step goes on with it
    grade: Any = None  # where a reply ended it: the grade, or why there is none
    note: bytes = b""  # of one of several turns and steps: what was said (variants/turns.py)

    # Which tokens the policy drew, bool [n] (the others are replies to its turns), how many these
    # are, and the tokens behind the last reply, which are judged
    drawn = property(lambda self: self.logps != np.inf)
    length = property(lambda self: int(np.count_nonzero(self.drawn)))
    last_turn = property(lambda s: s.tokens[max(np.flatnonzero(~s.drawn), default=-1) + 1 :])


class Part(NamedTuple):
    """What a chunk drew of one response."""

    index: int  # of the request
    start: int  # tokens drawn of it before, without the request's prefix
    tokens: np.ndarray  # int32 [n]
    logps: np.ndarray  # float32 [n]
    entropies: np.ndarray  # float32 [n]
    ended: bool
    note: bytes = b""  # `Response.note` with these tokens


class Stats(NamedTuple):
    tokens: int  # response tokens drawn and kept
    slot_steps: int  # slot x decode step, busy or idle
    chunks: int
    evicted: int  # rows that had to be made again because the pages ran out
    peak_cache: float  # largest share of the pool in use
    replayed: int = 0  # of `tokens`: not drawn now, but found in `Watch.store`
    drafts: Any = 0  # `drafts.Counts`; 0 = of an engine without

    @property
    def occupancy(self) -> float:
        return (self.tokens - self.replayed) / max(self.slot_steps, 1)


class Store:
    """Finished responses, which a run that was cut off need not draw again. This one keeps none."""

    def open(self, params) -> None:
        """From here on `get` and `put` are about the policy with these weights. A collective."""

    def get(self, requests: Sequence[Request], draw: Draw) -> list[Response | None]:
        """The response to each request, None where there is none."""
        return [None] * len(requests)

    def put(self, request: Request, draw: Draw, response: Response) -> None:
        """Keep a finished response."""

    def recall(self, name: bytes) -> bytes | None:
        """What `keep` had for this name, which is what else a step would have to ask for again."""

    def keep(self, said: Mapping[bytes, bytes]) -> None:
        """Keep these, name -> payload, for the open policy: they are on disk when it returns."""


class Watch(NamedTuple):
    """Who observes `Engine.generate`, and between which calls a run may be ended."""

    # Called after each chunk with the number of newly finished requests
    progress: Callable[[int], None] = lambda finished: None
    # Called after each chunk before `progress`, and between two updates; raises to end the run
    check: Callable[[], None] = lambda: None
    store: Store = Store()

    def between(self, running) -> None:
        """Call it before a step's next device program: waits until the arrays `running` of the one
        before are computed, so that programs do not pile up. Raises what `check` raises."""
        jax.block_until_ready(running)
        self.check()


UNWATCHED = Watch()


def total(stats: Sequence[Stats]) -> Stats:
    """Stats of several calls: everything adds up but `peak_cache`."""
    sums = {name: sum(getattr(s, name) for s in stats) for name in Stats._fields}
    return Stats(**sums | {"peak_cache": max((s.peak_cache for s in stats), default=0.0)})
