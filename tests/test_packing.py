"""Packing sequences into rows, and taking them out again."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_update import unpack

from dapo_jax.dapo import packing
from dapo_jax.model.attention import SHARED


def naive_best_fit(lengths, capacity, first=()):
    """Best-fit decreasing by trying every bin: the least room left wins, the older bin on a tie."""
    bins, room = [[] for _ in first], [*first]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if fitting:
            b = min(fitting, key=lambda b: (room[b], b))
        else:
            b = len(bins)
            bins.append([])
            room.append(capacity)
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 60), st.lists(st.integers(5, 40)))
def test_best_fit(lengths, capacity, first):
    bins = packing.best_fit(lengths, capacity, first)
    assert bins == naive_best_fit(lengths, capacity, first)


def pack(items, row_tokens, micro_rows, max_items, **more):
    return packing.pack(items, packing.Layout(row_tokens, micro_rows, max_items, **more))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="sequence 1 needs 11 cells, a row has 10"):
        packing.best_fit([3, 11], 10)
    with pytest.raises(ValueError, match="needs 11 cells"):
        pack([item(6, 6)], 10, 1, 1)
    pack([item(6, 6)], 11, 1, 1)
    with pytest.raises(ValueError, match="3 sequences, these rows are made for 2"):
        pack([item(1, 1)] * 3, 8, 1, 2)
    pack([item(1, 1)] * 2 + [item(1, 1, 0.0)], 8, 1, 2)  # what is left out takes no room


def item(prompt, response, weight=0.5, seed=0):
    rng = np.random.default_rng([seed, prompt, response])
    return packing.Item(
        rng.integers(1, 1000, prompt).tolist(),
        rng.integers(1, 1000, response),
        rng.normal(size=response).astype(np.float32),
        float(np.float32(rng.normal())),
        weight,
    )


lengths, weights = (st.integers(1, 6), st.integers(1, 9)), st.sampled_from([0.0, 0.25, 1.5])
batches = st.lists(st.builds(item, *lengths, weights, st.integers(0, 9)), max_size=15)


@given(batches, st.integers(14, 40), st.integers(1, 4), st.integers(0, 4), st.integers(0, 13))
def test_round_trip(items, row_tokens, micro_rows, spare, last):
    """Every field comes back, in the order of the items, and nothing else is in the rows. The
    last ones are short if that costs no micro-batch; else all is as without."""
    max_items = max(len(items) + spare, 1)
    rows, used, places = pack(items, row_tokens, micro_rows, max_items, last_row_tokens=last)
    plain, as_many, _ = pack(items, row_tokens, micro_rows, max_items)
    assert used == as_many
    if rows.segments_AxRxT[used - 1 :, :, last:].any():
        assert all(map(np.array_equal, rows, plain))
    shape = (-(-max_items // micro_rows), micro_rows, row_tokens)
    assert [(f.shape, f.dtype) for f in rows] == [(shape, dtype) for dtype in packing.DTYPES]
    assert [p is None for p in places] == [i.weight == 0 for i in items]

    fields = packing.PackedBatch(*(unpack(field, places) for field in rows))
    for n, it in enumerate(items):
        if not it.weight:
            assert all(field[n] is None for field in fields)
            continue
        sequence = [*it.prompt, *it.response]
        at = len(it.prompt)
        assert fields.targets_AxRxT[n].tolist() == sequence[at:]
        assert fields.tokens_AxRxT[n].tolist() == sequence[at - 1 : -1]
        assert fields.positions_AxRxT[n].tolist() == list(range(at - 1, len(sequence) - 1))
        np.testing.assert_array_equal(fields.sampled_logp_AxRxT[n], it.sampled_logps)
        assert (fields.advantage_AxRxT[n] == np.float32(it.advantage)).all()
        assert (fields.weight_AxRxT[n] == it.weight).all()
        assert fields.trained_AxRxT[n].all()

        # The prompt lies right before it, in the same segment, and is not trained on.
        *row, cells = places[n]
        prompt = (*row, slice(cells.start - at + 1, cells.start))
        assert rows.tokens_AxRxT[prompt].tolist() == list(it.prompt[:-1])
        assert rows.positions_AxRxT[prompt].tolist() == list(range(at - 1))
        whole = (*row, slice(cells.start - at + 1, cells.stop))
        assert len(set(rows.segments_AxRxT[whole].tolist())) == 1

    live = [i for i in items if i.weight]
    assert rows.trained_AxRxT.sum() == sum(len(i.response) for i in live)
    cells = sum(len(i.prompt) + len(i.response) - 1 for i in live)
    assert (rows.segments_AxRxT > 0).sum() == cells
    for field in rows:
        assert not field[rows.segments_AxRxT == 0].any()
        assert not field[used:].any()
    for field in (rows.weight_AxRxT, rows.advantage_AxRxT, rows.sampled_logp_AxRxT):
        assert not field[~rows.trained_AxRxT].any()
    assert all((rows.segments_AxRxT[i] > 0).any() for i in range(used))
    for row in rows.segments_AxRxT.reshape(-1, row_tokens):
        numbers = list(dict.fromkeys(row[row > 0].tolist()))
        assert numbers == list(range(1, len(numbers) + 1))


@given(st.lists(batches.filter(bool), min_size=1, max_size=4), st.integers(14, 40))
def test_shared_prompts(groups, row_tokens):
    """A cell sees, of its row and up to itself, its own sequence and nothing else; a prompt takes
    its place once in every row that holds a parcel of it."""
    items = [i._replace(prompt=group[0].prompt) for group in groups for i in group]
    rows, _, places = pack(items, row_tokens, 2, len(items), share_prompts=True)
    assert [p is None for p in places] == [i.weight == 0 for i in items]
    for item, place in zip(items, places, strict=True):
        if place is None:
            continue
        cells, row = place[2], packing.PackedBatch(*(field[place[:2]] for field in rows))
        assert row.targets_AxRxT[cells].tolist() == item.response.tolist()
        assert (row.weight_AxRxT[cells] == item.weight).all()
        whole = [*item.prompt, *item.response][:-1]
        for t in range(cells.start, cells.stop):
            of, prompt = row.segments_AxRxT[: t + 1], row.segments_AxRxT[t] >> SHARED << SHARED
            seen = (of == of[t]) | (of == prompt)
            n = seen.sum()
            assert row.tokens_AxRxT[: t + 1][seen].tolist() == whole[:n]
            assert row.positions_AxRxT[: t + 1][seen].tolist() == list(range(n))
    trained = rows.trained_AxRxT
    assert trained.sum() == sum(len(i.response) for i in items if i.weight)
    placed = [(item.prompt, p) for item, p in zip(items, places, strict=True) if p]
    prompts = {(*p[:2], id(prompt)): len(prompt) - 1 for prompt, p in placed}
    assert (rows.segments_AxRxT > 0).sum() == trained.sum() + sum(prompts.values())
