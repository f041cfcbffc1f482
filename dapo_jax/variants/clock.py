"""The clock of rollouts that never drain: what a step trains on where responses outlive steps.

At most (S + 1) x N groups are in flight, the next problem of the stream coming in as soon as one
leaves. Their rows wait in problem order for L lanes; a lane has its row until that ends, and at
each tick every row in a lane draws up to `tick` tokens. A group is judged at the tick in which its
last row ends, and leaves if it does not teach. The step ends at the first tick at which

    N accepted groups are whole: the first N of them in problem order are the batch; and
    of what stays, at most (S - k) x N groups hold tokens that are k versions old, or older,

so that no trained token is older than S versions. Nobody is dropped for being slow: who would grow
too old is waited for. Rows that have not ended stay as they are and are first in the next step.

All of this is counters. Time has no part in it, nor has the order in which a sampler really draws:
it may be behind with some rows and ahead with others. The clock turns as far as all that it needs
is known, and what was drawn beyond its last tick is not used.
"""

import dataclasses
from collections import deque
from collections.abc import Callable


@dataclasses.dataclass
class Run:
    """One row in flight, in numbers of response tokens."""

    known: int = 0  # drawn, as far as the clock may use them
    ended: bool = False  # whether it has no more than these
    at: int = 0  # at the clock's tick

    @property
    def whole(self) -> bool:
        return self.ended and self.at == self.known


@dataclasses.dataclass
class Flight:
    """A group in flight."""

    position: int  # of its problem in the stream
    runs: list[Run]
    begun: int | None = None  # version of its oldest token; None: it has none yet
    accepted: bool = False  # whole, judged, and to be trained on


@dataclasses.dataclass
class Clock:
    """The clock of one step."""

    flights: list[Flight]  # what is in flight at its tick, in problem order
    _: dataclasses.KW_ONLY
    need: int  # N groups of a batch
    staleness: int  # S
    samples: int  # rows of a group
    lanes: int  # free ones
    tick: int  # TOKENS that a row in a lane draws in a tick
    version: int  # of the weights of this step
    position: int  # the next problem of the stream
    most: int  # groups judged, at which a step looks for no more and ends with what it has found
    judged: int = 0
    tokens: int = 0

    def __post_init__(self):
        self._lanes: list[tuple[Flight, Run]] = []
        self._queue = deque((f, r) for f in self.flights for r in f.runs if not r.whole)

    def admit(self) -> list[Flight]:
        """The problems that come in at this tick."""
        new = []
        while len(self.flights) < (self.staleness + 1) * self.need and self.judged < self.most:
            new.append(Flight(self.position, [Run() for _ in range(self.samples)]))
            self.flights.append(new[-1])
            self.position += 1
        self._queue.extend((f, r) for f in new for r in f.runs)
        return new

    def batch(self) -> list[Flight] | None:
        """What the step trains on, if it ends at this tick."""
        used = [f for f in self.flights if f.accepted][: self.need]
        if not self._lanes and not self._queue:  # nothing is left to wait for
            return used
        if len(used) < self.need and self.judged < self.most:
            return None
        taken = {f.position for f in used}
        staying = [f for f in self.flights if f.begun is not None and f.position not in taken]
        older = lambda k: sum(self.version - f.begun >= k for f in staying)
        fit = (older(k) <= (self.staleness - k) * self.need for k in range(self.staleness + 1))
        return used if all(fit) else None

    def turn(self) -> list[Flight] | None:
        """One tick: the groups that are whole with it, to be judged; None: more has to be drawn."""
        while self.lanes and self._queue:
            self._lanes.append(self._queue.popleft())
            self.lanes -= 1
        if any(not r.ended and r.known < r.at + self.tick for _, r in self._lanes):
            return None
        staying, touched = [], {}
        for f, r in self._lanes:
            drawn = min(self.tick, r.known - r.at)
            r.at += drawn
            self.tokens += drawn
            f.begun = self.version if f.begun is None else f.begun
            if r.whole:
                touched[f.position] = f
            else:
                staying.append((f, r))
        self.lanes += len(self._lanes) - len(staying)
        self._lanes = staying
        return [f for _, f in sorted(touched.items()) if all(r.whole for r in f.runs)]

    def run(
        self, judge: Callable[[list[Flight]], list[bool]], opened: Callable = lambda new: None
    ) -> list[Flight] | None:
        """Turn as far as all is known. judge: whether each of these whole groups teaches; opened:
        hears who came in. Returns the batch, or None where the step has not ended yet."""
        opened(self.admit())
        while (used := self.batch()) is None:
            if (whole := self.turn()) is None:
                return None
            if whole:
                for flight, teaches in zip(whole, judge(whole), strict=True):
                    flight.accepted = teaches
                    self.judged += 1
                    if not teaches:
                        self.flights.remove(flight)
                opened(self.admit())
        return used
