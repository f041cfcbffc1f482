"""The schedule of a rollout of assumed lengths: no model, no device, no time.

Responses get lengths from a distribution; everything else is decided by the code that decides it in
a run: slots, pages, refill and eviction by `rollout.schedule.Schedule`, rounds by
`dapo.dynamic_sampling.collect`, rows by `dapo.packing.best_fit`. step.py puts seconds to it.

Dims: C chunks, S slots, N problems, G samples of a problem. Lengths in TOKENS.
"""

import functools
import math
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from dapo_jax.dapo import packing
from dapo_jax.dapo.dynamic_sampling import Group, collect, needed, round_size
from dapo_jax.dapo.reward import Grades
from dapo_jax.model.attention_kernels import BLOCK
from dapo_jax.rollout import balance
from dapo_jax.rollout.schedule import Request, Schedule


class Traffic(NamedTuple):
    """What no config knows. Lengths are log-normal, cut at the cap; `alike` of the variance of
    their logarithm is between problems and the rest within a group."""

    prompt: int  # mean; every prompt has it
    response: int  # mean, after the cut
    sigma: float = 0.9  # of the logarithm
    accept: float = 0.6  # share of groups with right and wrong responses
    alike: float = 0.5
    eval_problems: int = 30  # of an evaluation set, at most: AIME 2024


def cut(mu: float, sigma: float, z: np.ndarray, cap: int) -> np.ndarray:
    """int, 1 to cap: log-normal lengths by their standard normal numbers."""
    return np.clip(np.rint(np.exp(mu + sigma * z)), 1, cap).astype(int)


@functools.cache
def log_mean(mean: float, sigma: float, cap: int, n: int = 4096) -> float:
    """Mean of the logarithm for which the n quantiles of lengths cut at `cap` have this mean.
    ValueError: none has."""
    if not 1 <= mean <= (most := max(cap - 1, 1)):
        said = f"a mean response of {mean:,} tokens: wants 1 to {most:,}"
        raise ValueError(f"{said}, as responses have at most {cap:,}")
    low, high, z = -20.0, 2 * math.log(cap) + 20, ndtri((np.arange(n) + 0.5) / n)
    for _ in range(60):
        mu = (low + high) / 2
        low, high = (mu, high) if cut(mu, sigma, z, cap).mean() < mean else (low, mu)
    return mu


def lengths(traffic: Traffic, cap: int, problems: int, samples: int, seed: int = 0) -> np.ndarray:
    """int [N, G], 1 to cap."""
    rng = np.random.default_rng(seed)
    between, within = math.sqrt(traffic.alike), math.sqrt(1 - traffic.alike)
    z_NxG = between * rng.normal(size=(problems, 1)) + within * rng.normal(size=(problems, samples))
    return cut(log_mean(traffic.response, traffic.sigma, cap), traffic.sigma, z_NxG, cap)


def ends(config, traffic: Traffic, problems: int) -> tuple[np.ndarray, int] | None:
    """Right answers (bool [N, G]) of a round's N problems and the groups that it is short of, where
    surplus='end' ends what no batch can use; else None. Of a group that teaches 1 to G - 1 are
    right, each number as often, the short answers as often as the long."""
    settings, need, G = config.dynamic_sampling, config.rollout.groups, config.rollout.group_size
    if settings.surplus != "end" or not (settings.enabled and settings.refill):
        return None
    asked = [round_size(m, max(traffic.accept, 1 / 64), need) for m in range(1, need + 1)]
    rng = np.random.default_rng(2)
    right_N = rng.integers(1, max(G, 2), problems) * (rng.random(problems) < traffic.accept)
    right_NxG = rng.permuted(np.arange(G) < right_N[:, None], axis=1)
    return right_NxG, max(int(np.searchsorted(asked, problems, "right")), 1)


class Sizes(NamedTuple):
    """Sizes of a sampler, as `rollout.engine.Engine` has them."""

    slots: int
    shards: int
    chunk: int
    pages: int  # of a shard
    page_tokens: int
    prefill_rows: int  # prompts per call and shard
    even: bool = True  # whether rows may move between shards (balance.py)


class Trace(NamedTuple):
    """What the slots did, chunk by chunk; the slots of a shard lie side by side."""

    position_CxS: np.ndarray  # int32, tokens in the cache when the chunk begins; 0 = idle
    count_CxS: np.ndarray  # int32, tokens drawn; 0 = idle
    queued_C: np.ndarray  # bool, whether requests were waiting behind these
    prefills_C: np.ndarray  # int32, calls of the prefill program, of one width
    evicted: int
    pages: int  # most in use at a time, of the fullest shard
    moved: int = 0  # pages copied between shards

    @property
    def steps_C(self) -> np.ndarray:
        """Tokens of the chunk: it ends early when all rows have ended."""
        return self.count_CxS.max(1, initial=0)

    @property
    def occupancy(self) -> float:
        return self.count_CxS.sum() / max(self.steps_C.sum() * self.count_CxS.shape[1], 1)


def sample(length_NxG, prompt: int, cap: int, sizes: Sizes, ends=None, first_PxK=()) -> Trace:
    """The responses of N problems on their way through the slots, as `Engine.generate` takes
    them. ends: as the function `ends`. first_PxK: lengths of other problems' responses, asked for
    before these. ValueError: the pages hold no row of the longest length."""
    (N, G), before = length_NxG.shape, np.ravel(first_PxK).astype(int).tolist()
    if sizes.pages * sizes.page_tokens < prompt - 1 + cap:
        raise ValueError(f"{sizes.pages} pages hold no row of {prompt - 1 + cap:,} tokens")
    prompts = [(i,) * prompt for i in range(N)]  # problems differ, so their prompts do
    requests = [Request(prompts[i], i, g) for i in range(N) for g in range(G)]
    (right_NxG, missing), responses = ends or (length_NxG, 0), [None] * len(requests)
    others = [Request((~p,) * prompt, ~p, k) for p, k in np.ndindex(np.shape(first_PxK))]
    call = Sampler(others + requests, before + length_NxG.reshape(-1).tolist(), cap, sizes)
    grade = lambda ones: [g._replace(grades=Grades(np.array(g.responses, float))) for g in ones]
    asked = [Group(i, (), ()) for i in range(N)]  # whose responses are whether they are right
    wanted = needed(asked, missing, grade, Group.mixed) if ends else len
    while call.schedule:
        # By what ended before this chunk.
        for i, _, left in call.chunk(len(before) + wanted(responses)):
            if i >= len(before):
                responses[i - len(before)] = None if left else right_NxG.flat[i - len(before)]
    return call.trace()


class Sampler:
    """A call of the sampler, chunk by chunk."""

    def __init__(self, requests: list[Request], left: list[int], cap: int, sizes: Sizes, T=0):
        """left: tokens that each request has still to draw. T: tokens of a prompt in one call of
        the prefill program; 0 = a prompt is one call."""
        self.left, self._prefill_tokens = left, T
        named = sizes._asdict() | {"chunk": min(sizes.chunk, cap), "limit": cap}
        self._prefill_rows, self._even = named.pop("prefill_rows"), named.pop("even")
        self.schedule = Schedule(requests, **named)
        self._chunks, self._evicted, self._moved = [], 0, 0  # by chunk: `Trace`'s first four

    def chunk(self, most: float = math.inf) -> list[tuple[int, int, int]]:
        """(request, tokens drawn, tokens left) of each row; requests from `most` on end here."""
        schedule = self.schedule
        self._evicted += schedule.grow()
        new, _ = schedule.admit()
        calls = self._prefill_calls(new)
        self._moved += len(balance.moves(schedule)) if self._even else 0
        position_S, count_S = np.zeros((2, schedule.slots), np.int32)
        out = []
        for s, row in enumerate(schedule.rows):
            if row:
                left = self.left[row.index] - row.emitted
                n = min(schedule.chunk, left)
                position_S[s], count_S[s] = row.position, n
                row.emitted += n
                out.append((row.index, row.emitted, left - n))
                if n == left or row.index >= most:
                    schedule.release(s)
        self._chunks.append((position_S, count_S, bool(schedule.waiting), calls))
        schedule.waiting = deque(entry for entry in schedule.waiting if entry[0] < most)
        return out

    def _prefill_calls(self, new: list[int]) -> int:
        """As `Engine._prefill` makes them: a call lasts as long as the longest prompt of it."""
        n, T, queues = self._prefill_rows, self._prefill_tokens, defaultdict(list)
        for s in new:
            calls = -(-(len(self.schedule.rows[s].prompt) - 1) // T) if T else 1
            queues[self.schedule.shard(s)].append(calls)
        batches = range(0, max(map(len, queues.values()), default=0), n)
        return sum(max(max(q[i : i + n], default=0) for q in queues.values()) for i in batches)

    def trace(self) -> Trace:
        chunks = map(np.array, zip(*self._chunks, strict=True))
        return Trace(*chunks, self._evicted, self.schedule.peak, self._moved)


def rounds(config, accept: float, steps: int = 64) -> list[list[int]]:
    """Problems of each round of each of `steps` rollout steps in a row, far from the run's first,
    where a group teaches with probability `accept`."""
    rng, teaches = np.random.default_rng(0), {}
    outcomes = {mixed: Grades(np.array([1.0 * mixed, 0.0])) for mixed in (False, True)}

    def draw(positions: range) -> list[Group]:
        out[-1].append(len(positions))
        fresh = [p for p in positions if p not in teaches]
        teaches.update(zip(fresh, (rng.random(len(fresh)) < accept).tolist(), strict=True))
        return [Group(p, (), (), outcomes[teaches[p]]) for p in positions]

    position, rate, carried, out = 0, max(accept, 1 / 64), [], []
    for _ in range(steps):
        out.append([])
        batch = dict(start=position, need=config.rollout.groups, carried=carried)
        got = collect(draw, config.dynamic_sampling, accept_rate=rate, **batch)
        position, rate, carried = got.next_position, got.accept_rate, got.carried
    return out


class Packed(NamedTuple):
    """The packed rows of one rollout step."""

    micro_batches: int
    short: int  # of those, in rows of `optim.last_row_tokens`
    cells: int  # of those micro-batches, filled or not
    pairs: float  # of a query and a key that attention computes in a mean micro-batch
    fill: float  # share of cells in use


@functools.cache
def pack(
    traffic: Traffic, cap: int, groups: int, samples: int, minibatches: int, *layout: int
) -> list[list[list[tuple[int, int]]]]:
    """A batch as mini-batches of whole groups: rows of micro-batches, of each row its `blocks` and
    cells in use. layout: as `fill_rows`."""
    out, micro_rows = [], layout[1]
    for part in np.array_split(lengths(traffic, cap, groups, samples, seed=1), minibatches):
        cells = (part.reshape(-1) + traffic.prompt - 1).tolist()
        rows = ([cells[i] for i in members] for members in packing.fill_rows(cells, *layout))
        rows = [(blocks(x), sum(x)) for x in rows]
        out.append([rows[i : i + micro_rows] for i in range(0, len(rows), micro_rows)])
    return out


def blocks(cells: list[int], block: int = BLOCK) -> int:
    """Pairs of a block of queries and one of keys with a sequence in common, on and below the
    diagonal. cells: of each sequence of a row, in order."""
    count, start, last = 0, 0, -1
    for n in cells:
        first, shared = start // block, start // block == last
        start += n
        last = (start - 1) // block
        count += (last - first + 1) * (last - first + 2) // 2 - shared
    return count


def packed(config, traffic: Traffic, row_tokens: int, micro_rows: int) -> Packed:
    """Attention computes blocks with two cells of one sequence, on and below the diagonal. All
    devices wait for the row of a micro-batch that has most of them."""
    r, minibatches, last = config.rollout, config.optim.minibatches, config.optim.last_row_tokens
    batch = r.max_response_tokens, r.groups, r.group_size, minibatches
    parts = pack(traffic, *batch, row_tokens, micro_rows, last)
    passes = [rows for part in parts for rows in part]
    short = sum(max(cells for _, cells in part[-1]) <= last for part in parts)
    cells = micro_rows * ((len(passes) - short) * row_tokens + short * last)
    own = sum(max(blocks for blocks, _ in rows) for rows in passes) * micro_rows * BLOCK**2
    pairs = min(own, cells * row_tokens / 2) / len(passes)
    used = sum(cells for rows in passes for _, cells in rows)
    return Packed(len(passes), short, cells, pairs, used / cells)
