"""Bytes of keys and values that decoding reads, over the ideal, by the kind of cache. No model.

    python -m benchmarks kv_traffic --full               # 8,192 requests, 1,024 slots, 20k cap

The ideal reads each live token of each busy row once a step. Slots, refill, prompt sharing, pages
and evictions are decided by the engine's own schedule, as the planner plays it (plan/simulate.py).
  paged     whole pages, as the TPU kernel reads; an idle slot costs nothing
  bucketed  all slots up to the longest live row, rounded up to a bucket
  dense     all slots at full length
"""

import math
from typing import NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Flag
from benchmarks.sides import log_normal
from dapo_jax.plan import simulate as plan_simulate
from dapo_jax.rollout.schedule import Request


class Sizes(NamedTuple):
    """Lengths in TOKENS."""

    slots: int
    shards: int
    chunk: int
    prompt: int
    room: int  # prompt tokens that a dense row has room for
    group: int  # requests in a row that share a prompt
    cap: int  # longest response
    page_tokens: int
    bucket: int
    pool: float = 1.0  # pages there are, of those of all slots at full length


QUICK = Sizes(32, 1, 16, 32, 128, 16, 2048, 16, 256)
FULL = Sizes(1024, 16, 128, 256, 2048, 16, 20480, 128, 2048)
FLAGS = {
    "requests": Flag(256, 8192),
    "mean": Flag(500, 5000, "mean length in tokens, after the cut"),
    "sigma": Flag((0.9,), (0.6, 0.9, 1.2)),
    **{name: Flag(getattr(QUICK, name), getattr(FULL, name)) for name in Sizes._fields},
}
MEASURES = ("paged", "bucketed", "dense", "slowest", "steps", "occupancy", "peak", "evicted")


def simulate(lengths: np.ndarray, sizes: Sizes) -> dict[str, float]:
    """Key/value tokens read by each kind of cache over the ideal, and what the pool went through.
    lengths: of the responses, int [requests]."""
    slots, shards, chunk, prompt, room, group, cap, page_tokens, bucket, pool = sizes
    full = room + cap
    row_pages = -(-full // page_tokens)
    pages = max(row_pages, math.ceil(pool * slots // shards * row_pages))
    # Groups differ by one token, so that each has a prompt of its own.
    names = [(i // group, *(0,) * (prompt - 1)) for i in range(len(lengths))]
    requests = [Request(name, 0, i) for i, name in enumerate(names)]
    slot_sizes = plan_simulate.Sizes(slots, shards, chunk, pages, page_tokens, prefill_rows=1)
    call = plan_simulate.Sampler(requests, lengths.tolist(), cap, slot_sizes)
    while call.schedule:
        call.chunk()
    trace = call.trace()
    read = dict.fromkeys(("ideal", "paged", "bucketed", "dense"), 0)
    slowest = 0
    for position_S, count_S in zip(trace.position_CxS, trace.count_CxS, strict=True):
        n = int(count_S.max())  # a chunk ends early when all rows have
        busy_SxN = np.arange(n) < count_S[:, None]
        seen_SxN = np.where(busy_SxN, position_S[:, None] + np.arange(n) + 1, 0)
        paged_SxN = -(-seen_SxN // page_tokens) * page_tokens
        longest_N = -(-seen_SxN.max(0) // bucket) * bucket
        read["ideal"] += int(seen_SxN.sum())
        read["paged"] += int(paged_SxN.sum())
        read["bucketed"] += int(np.minimum(longest_N, full).sum()) * slots
        read["dense"] += n * slots * full
        slowest += paged_SxN.reshape(shards, -1).sum(1).max() * shards
    ideal = read.pop("ideal")
    return {name: tokens / ideal for name, tokens in read.items()} | {
        "slowest": slowest / ideal,
        "steps": int(trace.steps_C.sum()),
        "occupancy": trace.occupancy,
        "peak": trace.pages / (row_pages * slots // shards),
        "evicted": trace.evicted,
    }


def measure(args) -> list[harness.Table]:
    """slowest: paged, if all wait for the shard of slots that reads most. occupancy: busy slots.
    peak: pages in use, of all slots at full length, in the fullest shard."""
    table = harness.Table("lengths", "requests", "mean", *MEASURES)
    for sigma in args.sigma:
        lengths = log_normal(args.requests, args.cap, args.mean, sigma)
        found = simulate(lengths, Sizes(*(getattr(args, name) for name in Sizes._fields)))
        numbers = (f"{found[name]:.4g}" for name in MEASURES)
        name = f"log-normal, sigma {sigma}"
        table.row(name, f"{len(lengths):,}", f"{lengths.mean():,.0f}", *numbers)
    return [table]
