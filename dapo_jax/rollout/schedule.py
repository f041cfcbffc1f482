"""Which request sits in which slot, with which pages: what the host decides between two chunks.
Nothing here touches a device: `plan/simulate.py` runs it at sizes that no machine here holds."""

import dataclasses
import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

NEAR = 2  # rows more than the emptiest shard has, for a prompt that need not be run again


class Request(NamedTuple):
    """One response to draw. (stream, sample) name its random numbers, see rollout/draw.py."""

    prompt: Sequence[int]  # token ids, 1 to prompt_tokens of them
    stream: int  # position of the problem in its stream
    sample: int  # index in its group
    limit: int = 0  # most response tokens; 0 = what the call allows
    top_p: float = 0.0  # nucleus mass; 0 = the call's
    prefix: Sequence[int] = ()  # response tokens that are there already; `limit` counts them too
    note: bytes = b""  # `Response.note` of the prefix
    draw: Any = None  # `Draw` of its own, of the call's temperature; None = the call's


@dataclasses.dataclass
class Row:
    """A response in flight in one slot."""

    index: int  # of the request
    request: Request
    prompt: tuple[int, ...]  # with the request's prefix
    limit: int  # without it, as `emitted`
    pages: list[int]
    slot: int
    token: int  # the last, which the next chunk begins with
    parts: list = dataclasses.field(default_factory=list)  # `Part`s, one a chunk
    emitted: int = 0
    tabled: int = 0  # pages that the engine's table has

    @property
    def position(self) -> int:
        """Tokens in the cache; the next one goes there."""
        return len(self.prompt) - 1 + self.emitted


def rungs(slots: int, shards: int) -> tuple[int, ...]:
    """Slots of the programs for a call's last rows, which TPUs and GPUs have beside the one for all
    slots: of 512, 256, 128, 64 and 16 rows a shard. On a TPU a token of 256 rows of which 16 are
    busy takes three times as long as one of 16, on a GPU one of 1,024 rows of 1.5B four times as
    long as one of 256. None where a shard's rows are no multiple of 32."""
    rows = slots // shards
    return tuple(n * shards for n in (512, 256, 128, 64, 16) if n < rows and rows % 32 == 0)


class Pages:
    """Which of one shard's pages 0..count-1 are free; pages in use are shared by counting."""

    def __init__(self, count: int):
        self._free = list(range(count))  # a heap: low numbers first, so that use stays compact
        self._holders = Counter()  # of a page
        self.count = count
        self.peak = 0  # most pages in use at a time

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n fresh pages, each with one holder. IndexError: there are fewer."""
        pages = self.share([heapq.heappop(self._free) for _ in range(n)])
        self.peak = max(self.peak, self.count - self.free)
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more holder."""
        self._holders.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """One holder less; a page without holders is free."""
        self._holders.subtract(pages)
        for page in pages:
            if not self._holders[page]:
                heapq.heappush(self._free, page)


@dataclasses.dataclass
class Schedule:
    """The requests of one call on their way through the slots, which are spread evenly over
    `shards`, each of which has `pages` pages of `page_tokens` tokens of its own; with `fixed` a
    page is a whole row, and belongs to its slot for good."""

    requests: dataclasses.InitVar[Sequence[Request]]
    slots: int
    shards: int
    chunk: int
    limit: int
    pages: dataclasses.InitVar[int]
    page_tokens: int
    fixed: bool = False

    def __post_init__(self, requests, pages):
        self.waiting = deque(enumerate(requests))
        self.rows: list[Row | None] = [None] * self.slots
        self.shard_pages = [Pages(pages) for _ in range(self.shards)]

    def __bool__(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting) or any(self.rows)

    @property
    def peak(self) -> int:
        """Most pages in use at a time, of the fullest shard."""
        return max(p.peak for p in self.shard_pages)

    def shard(self, slot: int) -> int:
        return slot * self.shards // self.slots

    def places(self, rungs: Sequence[int]) -> tuple[int, list[tuple[Row, int]]]:
        """(rows of the program for the next chunk, the rows in flight with their places in it).
        All slots or, when nothing waits, the smallest of `rungs` with room for every shard."""
        live = [row for row in self.rows if row]
        most = max(Counter(self.shard(row.slot) for row in live).values())
        size = min((n for n in rungs if n >= most * self.shards), default=self.slots)
        if self.waiting or size == self.slots:
            return self.slots, [(row, row.slot) for row in live]
        places = [itertools.count(k * size // self.shards) for k in range(self.shards)]
        return size, [(row, next(places[self.shard(row.slot)])) for row in live]

    def release(self, slot: int) -> None:
        """The row is finished, or gives way."""
        if not self.fixed:
            self.shard_pages[self.shard(slot)].release(self.rows[slot].pages)
        self.rows[slot] = None

    def grow(self) -> int:
        """Pages for the next chunk of all rows in flight, the oldest request first. Where they run
        out, the youngest go back to the head of the queue; returns how many."""
        if self.fixed:
            return 0
        rows, evicted = self.rows, 0
        for s in sorted(filter(rows.__getitem__, range(self.slots)), key=lambda s: rows[s].index):
            row = rows[s]
            if row is None:
                continue  # evicted by an older one
            free = self.shard_pages[self.shard(s)]
            missing = self._needs(len(row.prompt), row.emitted, row.limit) - len(row.pages)
            while missing > free.free:
                mates = [t for t in range(self.slots) if rows[t] and self.shard(t) == self.shard(s)]
                youngest = max(mates, key=lambda t: rows[t].index)
                self.waiting.appendleft((rows[youngest].index, rows[youngest].request))
                self.release(youngest)
                evicted += 1
                if youngest == s:
                    break
            else:
                row.pages += free.take(max(missing, 0))
        return evicted

    def admit(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Waiting requests into free slots, as far as pages allow, each into the shard with the
        fewest rows and, of those, the fewest tokens: a token takes as long as the fullest shard's.
        Before that comes a shard that has the prompt, with at most `NEAR` rows more. Returns (slots
        whose prompt has to be run, page copies (slot, source page, target page))."""
        new, copies = [], []
        if not self.waiting:
            return new, copies
        holders = defaultdict(lambda: [[] for _ in range(self.shards)])  # prompt -> rows, by shard
        free = [deque() for _ in range(self.shards)]  # slots
        load = [[0, 0] for _ in range(self.shards)]  # rows, tokens
        for s, row in enumerate(self.rows):
            shard = self.shard(s)
            if row:
                if not row.request.prefix:  # nobody has the same one
                    holders[row.prompt][shard].append(row)
                load[shard][0] += 1
                load[shard][1] += row.position
            else:
                free[shard].append(s)
        able = [k for k in range(self.shards) if free[k]]
        while self.waiting and able:
            index, request = self.waiting[0]
            prompt = (*request.prompt, *request.prefix)
            by_shard = holders[index if request.prefix else prompt]
            most = min(load[k][0] for k in able) + NEAR
            near = [k for k in able if by_shard[k] and load[k][0] <= most]
            shard = min(near or able, key=load.__getitem__)
            s, pages, held = free[shard][0], self.shard_pages[shard], by_shard[shard]
            limit = (request.limit or self.limit) - len(request.prefix)
            # A row may be young itself, but the first of its siblings was prefilled, or is older.
            sibling = held[0] if held else None
            # The prompt's last token is written again by every row that starts, with what is
            # there already: a page that ends with it can be shared like those before it.
            full = len(prompt) // self.page_tokens
            rest = len(prompt) - 1 - full * self.page_tokens
            if self.fixed:
                table = [s - shard * self.slots // self.shards]
            else:
                shared = sibling.pages[:full] if sibling else []
                fresh = self._needs(len(prompt), 0, limit) - len(shared)
                # One page in hand for every row in flight, or new rows would soon evict others.
                if pages.free < fresh + load[shard][0]:
                    able.remove(shard)
                    continue
                table = pages.share(shared) + pages.take(fresh)
            self.waiting.popleft()
            row = self.rows[s] = Row(index, request, prompt, limit, table, s, prompt[-1])
            held.append(row)
            load[shard][0] += 1
            load[shard][1] += row.position
            free[shard].popleft()
            if not free[shard]:
                able.remove(shard)
            if sibling and rest > 0:
                copies.append((s, sibling.pages[full], table[full]))
            elif not sibling and len(prompt) > 1:
                new.append(s)
        return new, copies

    def _needs(self, prompt_tokens: int, emitted: int, limit: int) -> int:
        """Pages that a row needs to get through the next chunk."""
        last = prompt_tokens - 1 + min(emitted + self.chunk, limit)
        return -(-last // self.page_tokens)
