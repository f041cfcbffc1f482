"""Bytes of keys and values that decoding reads, over the ideal, by the kind of cache. NumPy only.

    python benchmarks/kv_traffic.py                         # 8192 requests, 1024 slots, 20k cap
    python benchmarks/kv_traffic.py --lengths=lengths.txt   # response lengths, one a line
    python benchmarks/kv_traffic.py --lengths=runs/a/rollouts
    python benchmarks/kv_traffic.py --write                 # and put the table into RESULTS.md

The ideal reads each live token of each busy row once a step. Slots, refill, prompt sharing, pages
and evictions are decided by the engine's own code (rollout/schedule.py); only the model is missing.
  paged     whole pages, as the TPU kernel reads; an idle slot costs nothing
  bucketed  all slots up to the longest live row, rounded up to a bucket
  dense     all slots at full length
"""

import argparse
import json
import math
import pathlib

import numpy as np
import results
from lengths import log_normal
from tqdm import tqdm

from dapo_jax.rollout.schedule import Request, Schedule

HEADING = "## Keys and values that decoding reads"


def read_lengths(path: pathlib.Path) -> np.ndarray:
    """Recorded lengths: a text file with one a line, a JSON-lines file with a `tokens` number a
    line, or a folder of such. Raises ValueError where there are none."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    lengths = []
    for file in files:
        for i, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                lengths.append(int(value["tokens"] if isinstance(value, dict) else value))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file} line {i}: no length in {line[:40]!r}") from None
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{path}: no lengths of at least 1 token")
    return np.array(lengths)


def simulate(
    lengths: np.ndarray,
    *,
    slots: int,
    shards: int,
    chunk: int,
    prompt: int,
    group: int,
    cap: int,
    page_tokens: int,
    pool: float,
    bucket: int,
    room: int,
) -> dict[str, float]:
    """Key/value tokens read by each kind of cache over the ideal, and what the pool went through.

    group: requests in a row that share a prompt. pool: pages there are, of those of all slots at
    full length. cap: longest response; a row has room for `room` prompt tokens and those.
    """
    full = room + cap
    row_pages = -(-full // page_tokens)
    pages = max(row_pages, math.ceil(pool * slots // shards * row_pages))
    # Groups differ by one token, so that each has a prompt of its own.
    names = [(i // group, *(0,) * (prompt - 1)) for i in range(len(lengths))]
    schedule = Schedule(
        [Request(name, 0, i) for i, name in enumerate(names)],
        slots=slots,
        shards=shards,
        chunk=chunk,
        limit=cap,
        pages=pages,
        page_tokens=page_tokens,
    )
    read = dict.fromkeys(("ideal", "paged", "bucketed", "dense"), 0)
    shard_S = np.array([schedule.shard(s) for s in range(slots)])
    slowest = idle = evicted = steps = 0
    with tqdm(total=len(lengths), unit="request", leave=False) as bar:
        while schedule:
            evicted += schedule.grow()
            schedule.admit()
            position_S, count_S = np.zeros(slots, int), np.zeros(slots, int)
            for s, row in enumerate(schedule.rows):
                if row:
                    position_S[s] = row.position
                    count_S[s] = min(chunk, lengths[row.index] - row.emitted)
            n = int(count_S.max())  # a chunk ends early when all rows have
            busy_SxN = np.arange(n) < count_S[:, None]
            seen_SxN = np.where(busy_SxN, position_S[:, None] + np.arange(n) + 1, 0)
            paged_SxN = -(-seen_SxN // page_tokens) * page_tokens
            by_shard = np.bincount(shard_S, paged_SxN.sum(1))
            read["ideal"] += int(seen_SxN[busy_SxN].sum())
            read["paged"] += int(paged_SxN.sum())
            longest_N = -(-seen_SxN.max(0) // bucket) * bucket
            read["bucketed"] += int(np.minimum(longest_N, full).sum()) * slots
            read["dense"] += n * slots * full
            slowest += by_shard.max() * shards
            idle += int((~busy_SxN).sum())
            steps += n
            for s, row in enumerate(schedule.rows):
                if row:
                    row.emitted += int(count_S[s])
                    if row.emitted == lengths[row.index]:
                        schedule.release(s)
                        bar.update()
    ideal = read.pop("ideal")
    return {name: tokens / ideal for name, tokens in read.items()} | {
        "slowest": slowest / ideal,
        "steps": steps,
        "occupancy": 1 - idle / (steps * slots),
        "peak": schedule.peak / (row_pages * slots // shards),
        "evicted": evicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=pathlib.Path, help="recorded lengths, else log-normal")
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--mean", type=float, default=5000, help="mean length, after the cut")
    parser.add_argument("--sigma", type=float, nargs="*", default=[0.6, 0.9, 1.2])
    parser.add_argument("--cap", type=int, default=20480, help="longest response")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--room", type=int, default=2048, help="prompt tokens a dense row is for")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--page_tokens", type=int, default=128)
    parser.add_argument("--pool", type=float, default=1.0, help="of all slots at full length")
    parser.add_argument("--bucket", type=int, default=2048)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = vars(parser.parse_args())
    file, n, mean, sigmas, write = (
        args.pop(k) for k in ("lengths", "requests", "mean", "sigma", "write")
    )
    if file:
        recorded = read_lengths(file)
        args["cap"] = max(args["cap"], int(recorded.max()))
        sets = {str(file): recorded}
    else:
        sets = {f"log-normal, sigma {s}": log_normal(n, args["cap"], mean, s) for s in sigmas}
    names = ("paged", "bucketed", "dense", "slowest", "steps", "occupancy", "peak", "evicted")
    rows = [("lengths", "requests", "mean", *names)]
    for name, lengths in sets.items():
        found = simulate(lengths, **args)
        counted = f"{len(lengths):,}", f"{lengths.mean():,.0f}"
        rows.append((name, *counted, *(f"{found[x]:.4g}" for x in names)))
        print("   ".join(rows[-1]), flush=True)
    section = (
        f"{HEADING}\n\n{results.made_by('numpy')}. Lengths in tokens,"
        f" at most {args['cap']:,}; {args['slots']:,} slots, pages of {args['page_tokens']}, chunks"
        f" of {args['chunk']}. Key/value bytes read over the ideal, which reads each live token of"
        " each busy row once per step. slowest: paged, if all wait for the shard of slots that"
        " reads most. occupancy: busy slots. peak: pages in use, of all slots at full length, in"
        f" the fullest shard.\n\n{results.table(*rows)}"
    )
    print("\n" + section)
    if write:
        results.write(HEADING, section)


if __name__ == "__main__":
    main()
