"""benchmarks/kv_traffic.py: its counts by hand."""

import numpy as np
import pytest

from benchmarks import harness, kv_traffic

SIZES = kv_traffic.Sizes(
    slots=2, shards=1, chunk=4, prompt=3, room=3, group=1, cap=13, page_tokens=2, bucket=6
)


def test_counts_by_hand():
    """Two slots, responses of 3 and 5 tokens after 2 cached ones: reads 3 4 5 and 3 4 5 6 7."""
    got = kv_traffic.simulate(np.array([3, 5]), SIZES)  # pages of 2 tokens
    ideal = 3 + 4 + 5 + 3 + 4 + 5 + 6 + 7
    assert got["steps"] == 5 and got["occupancy"] == 8 / 10 and got["evicted"] == 0
    assert got["paged"] * ideal == pytest.approx((4 + 4 + 6) + (4 + 4 + 6 + 6 + 8))
    assert got["bucketed"] * ideal == pytest.approx(2 * (6 + 6 + 6 + 6 + 12))
    assert got["dense"] * ideal == pytest.approx(2 * 16 * 5)


def test_paged_reads_little_more_than_it_must():
    (table,) = kv_traffic.measure(harness.parse("kv_traffic", kv_traffic, []))
    (row,) = table.rows
    paged, bucketed, dense = (float(row[table.columns.index(x)]) for x in kv_traffic.MEASURES[:3])
    assert 1 < paged < 1.15 < bucketed < dense
    assert float(row[table.columns.index("peak")]) < 0.5
