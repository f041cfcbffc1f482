"""Sequences of any length -> rows of one length, several sequences a row.

Every array has the same shape at every step, whatever the lengths, so nothing compiles again; a
row's sequences are told apart by segment numbers, and only micro-batches that hold something run. A
sequence of n tokens takes n - 1 cells: cell t reads token t and is asked for token t + 1.

Dims: A micro-batches, R rows of a micro-batch, T cells of a row, Q sequences.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax.model.attention import SHARED


class Item(NamedTuple):
    """One prompt with its response, and what the loss needs to know about it."""

    prompt: Sequence[int]
    response: Sequence[int]
    sampled_logps: np.ndarray  # float32 [len(response)]; inf: a token that was not drawn
    advantage: float
    weight: float  # of each response token in the loss
    truncated: bool = False  # cut where it might have gone on
    term_weights: Sequence[float] = ()  # of each response token in each extra term of the loss


class Layout(NamedTuple):
    """The rows that a mini-batch is packed into; fixed for a run, so nothing compiles again."""

    row_tokens: int  # TOKENS of a row
    micro_rows: int  # rows of a micro-batch
    max_items: int  # most sequences of a mini-batch
    share_prompts: bool = False  # sequences of one prompt in one row share its cells
    last_row_tokens: int = 0  # of the last micro-batch's rows, if sequences fit so; 0 = as others


class PackedBatch(NamedTuple):
    """A mini-batch. Cells outside responses have weight 0; segment 0 is padding."""

    tokens_AxRxT: np.ndarray  # int32
    targets_AxRxT: np.ndarray  # int32, the next token
    positions_AxRxT: np.ndarray  # int32, counted from the start of each sequence
    segments_AxRxT: np.ndarray  # int32, 1.. within a row, of shared prompts: `attention.SHARED`
    trained_AxRxT: np.ndarray  # bool, the target is a trained response token
    weight_AxRxT: np.ndarray  # float32
    advantage_AxRxT: np.ndarray  # float32
    sampled_logp_AxRxT: np.ndarray  # float32, the sampler's record


DTYPES = [np.int32] * 4 + [bool] + [np.float32] * 3  # of its fields
Place = tuple[int, int, slice]  # of a response: micro-batch, row, cells


def best_fit(lengths: Sequence[int], capacity: int, first: Sequence[int] = ()) -> list[list[int]]:
    """Indices of each bin: longest first, each into the fullest bin that still takes it. first:
    capacities of bins that are there already; those that are added have `capacity`."""
    bins: list[list[int]] = [[] for _ in first]
    room = sorted((left, b) for b, left in enumerate(first))  # cells left of each bin
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > capacity:
            raise ValueError(f"sequence {i} needs {lengths[i]} cells, a row has {capacity}")
        at = bisect.bisect_left(room, (lengths[i], -1))
        left, b = room.pop(at) if at < len(room) else (capacity, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        bisect.insort(room, (left - lengths[i], b))
    return bins


def fill_rows(
    cells: Sequence[int], row_tokens: int, micro_rows: int, last_row_tokens: int
) -> list[list[int]]:
    """Indices of each row, the fewest by `best_fit`. last_row_tokens: as for `pack`."""
    bins = best_fit(cells, row_tokens)
    if not last_row_tokens or not bins:
        return bins
    whole = (len(bins) - 1) // micro_rows * micro_rows  # rows before the last micro-batch
    sizes = [row_tokens] * whole + [last_row_tokens] * micro_rows
    with_short = best_fit(cells, row_tokens, sizes)
    return with_short if len(with_short) == len(sizes) else bins


def pack(
    items: Sequence[Item], layout: Layout, open_ends: bool = False
) -> tuple[PackedBatch, int, list[Place | None]]:
    """(rows, micro-batches in use, place of each item). Items of weight 0 are left out (None).

    The number of micro-batches A is the least that `max_items` sequences can ever need. open_ends:
    a truncated item has one more cell, not trained, that reads its last token. share_prompts: items
    with the same prompt (one object) that lie in one row see one copy of its cells but the last,
    which reads the token before the response (segments: see `attention.SHARED`). last_row_tokens:
    if no more micro-batches are needed so, the rows of the last one hold nothing beyond.
    """
    row_tokens, micro_rows, max_items, share_prompts, last_row_tokens = layout
    live = [i for i, item in enumerate(items) if item.weight]
    head = lambda i: (len(items[i].prompt) - 1) * share_prompts  # cells that others see too
    cells_of = lambda x: len(x.prompt) + len(x.response) - (not (open_ends and x.truncated))
    own = {i: cells_of(items[i]) - head(i) for i in live}
    if len(live) > max_items:
        raise ValueError(f"{len(live)} sequences, these rows are made for {max_items}")
    shape = (-(-max_items // micro_rows), micro_rows, row_tokens)
    rows = PackedBatch(*(np.zeros(shape, dtype) for dtype in DTYPES))
    places: list[Place | None] = [None] * len(items)
    together: dict[int, list[int]] = {}
    for i in live:
        together.setdefault(id(items[i].prompt) if share_prompts else i, []).append(i)
    parcels = [  # a prompt's sequences that share it
        [members[m] for m in part]
        for members in together.values()
        for part in best_fit([own[i] for i in members], row_tokens - head(members[0]))
    ]
    cells_P = [head(p[0]) + sum(own[i] for i in p) for p in parcels]
    bins = fill_rows(cells_P, row_tokens, micro_rows, last_row_tokens)
    for b, row_parcels in enumerate(bins):
        at = divmod(b, micro_rows)
        start = segment = 0
        for number, members in enumerate((parcels[p] for p in row_parcels), 1):
            shared, n = (number << SHARED) * share_prompts, head(members[0])
            if n:
                cells = (*at, slice(start, start + n))
                _fill(rows, cells, items[members[0]].prompt[: n + 1], 0, shared)
            start += n
            for i in members:
                item, segment = items[i], segment + 1
                sequence = np.concatenate([item.prompt[n:], item.response])
                _fill(rows, (*at, slice(start, start + own[i])), sequence, n, shared | segment)
                first = start + len(item.prompt) - 1 - n
                cells = (*at, slice(first, first + len(item.response)))
                rows.trained_AxRxT[cells] = drawn = item.sampled_logps != np.inf
                rows.weight_AxRxT[cells] = item.weight * drawn
                rows.advantage_AxRxT[cells] = item.advantage * drawn
                rows.sampled_logp_AxRxT[cells] = np.where(drawn, item.sampled_logps, 0)
                places[i] = cells
                start += own[i]
    return rows, -(-len(bins) // micro_rows), places


def _fill(rows: PackedBatch, cells: tuple, sequence, position: int, segment: int) -> None:
    """`sequence`, whose first token has this position, into cells of a row."""
    n = cells[-1].stop - cells[-1].start
    rows.tokens_AxRxT[cells] = sequence[:n]
    rows.targets_AxRxT[cells] = np.append(sequence[1:], 0)[:n]
    rows.positions_AxRxT[cells] = np.arange(position, position + n)
    rows.segments_AxRxT[cells] = segment


def spread(
    numbers: Sequence[float], places: Sequence[Place | None], shape: tuple[int, ...]
) -> np.ndarray:
    """One number per item -> float32 [A, R, T]: in the cells of its response, 0 elsewhere."""
    out_AxRxT = np.zeros(shape, np.float32)
    for number, place in zip(numbers, places, strict=True):
        if place is not None:
            out_AxRxT[place] = number
    return out_AxRxT
