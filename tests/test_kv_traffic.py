"""benchmarks/kv_traffic.py: its counts by hand, and its schedule is that of the engine."""

import jax
import numpy as np
import pytest

from benchmarks import harness, kv_traffic, sides
from dapo_jax.model import qwen2
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Request

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


@pytest.mark.slow
def test_schedule_is_the_engines():
    """The lengths that an engine drew give its steps, its peak and its evictions."""
    shape = qwen2.Shape(32, 16, 16, 1, 2, 1, 8, 1e4, 1e-6, True, scan_layers=False)
    requests = [Request([1 + i // 4] + [0] * 10, i, 0) for i in range(40)]
    params = qwen2.init(shape, jax.random.key(0))
    evicted = []
    for pool in (1.0, 0.25):
        more = dict(prefill_prompts=4, stop_ids=[3], page_tokens=8, cache_fraction=pool)
        engine = sides.engine(shape, 8, 11, 29, 5, "float32", **more)
        responses, stats = engine.generate(engine.decode_params(params), requests, Draw(seed=0))
        lengths = np.array([len(r.tokens) for r in responses])
        assert lengths.min() < 10 and lengths.max() == 29
        said = kv_traffic.simulate(lengths, kv_traffic.Sizes(8, 1, 5, 11, 11, 4, 29, 8, 16, pool))
        assert stats.slot_steps == 8 * said["steps"]
        assert stats.evicted == said["evicted"]
        assert stats.peak_cache == pytest.approx(said["peak"] / pool)
        evicted.append(stats.evicted)
    assert evicted[0] == 0 < evicted[1]


def test_paged_reads_little_more_than_it_must():
    (table,) = kv_traffic.measure(harness.parse("kv_traffic", kv_traffic, []))
    (row,) = table.rows
    paged, bucketed, dense = (float(row[table.columns.index(x)]) for x in kv_traffic.MEASURES[:3])
    assert 1 < paged < 1.15 < bucketed < dense
    assert float(row[table.columns.index("peak")]) < 0.5
