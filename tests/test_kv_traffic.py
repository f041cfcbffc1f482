"""benchmarks/kv_traffic.py: its counts by hand, and its schedule is that of the engine."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dapo_jax import config, parallel
from dapo_jax.model import qwen2
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine, Request

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import kv_traffic

SIZES = dict(slots=2, shards=1, chunk=4, prompt=3, room=3, group=1, cap=13, page_tokens=2)


def test_counts_by_hand():
    """Two slots, responses of 3 and 5 tokens after 2 cached ones: reads 3 4 5 and 3 4 5 6 7."""
    got = kv_traffic.simulate(np.array([3, 5]), **SIZES, pool=1.0, bucket=6)  # pages of 2 tokens
    ideal = 3 + 4 + 5 + 3 + 4 + 5 + 6 + 7
    assert got["steps"] == 5 and got["occupancy"] == 8 / 10 and got["evicted"] == 0
    assert got["paged"] * ideal == pytest.approx((4 + 4 + 6) + (4 + 4 + 6 + 6 + 8))
    assert got["bucketed"] * ideal == pytest.approx(2 * (6 + 6 + 6 + 6 + 12))
    assert got["dense"] * ideal == pytest.approx(2 * 16 * 5)


@pytest.mark.slow
def test_schedule_is_the_engines():
    """The lengths that an engine drew give its steps, its peak and its evictions."""
    shape = qwen2.Shape(32, 16, 16, 1, 2, 1, 8, 1e4, 1e-6, True, scan_layers=False)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), parallel.AXES)
    requests = [Request([1 + i // 4] + [0] * 10, i, 0) for i in range(40)]
    params = qwen2.init(shape, jax.random.key(0))
    evicted = []
    for pool in (1.0, 0.25):
        engine = Engine(
            shape,
            mesh,
            config.base().sharding.decode,
            slots=8,
            prompt_tokens=11,
            response_tokens=29,
            chunk=5,
            prefill_prompts=4,
            stop_ids=[3],
            dtype="float32",
            page_tokens=8,
            cache_fraction=pool,
        )
        responses, stats = engine.generate(engine.decode_params(params), requests, Draw(seed=0))
        lengths = np.array([len(r.tokens) for r in responses])
        assert lengths.min() < 10 and lengths.max() == 29
        sizes = SIZES | dict(slots=8, chunk=5, prompt=11, room=11, group=4, cap=29, page_tokens=8)
        said = kv_traffic.simulate(lengths, **sizes, pool=pool, bucket=16)
        assert stats.slot_steps == 8 * said["steps"]
        assert stats.evicted == said["evicted"]
        assert stats.peak_cache == pytest.approx(said["peak"] / pool)
        evicted.append(stats.evicted)
    assert evicted[0] == 0 < evicted[1]


def test_paged_reads_little_more_than_it_must():
    lengths = kv_traffic.log_normal(512, cap=2048, mean=500, sigma=0.9)
    assert abs(lengths.mean() - 500) < 1 and lengths.max() <= 2048
    got = kv_traffic.simulate(
        lengths,
        slots=64,
        shards=1,
        chunk=16,
        prompt=32,
        room=128,
        group=16,
        cap=2048,
        page_tokens=16,
        pool=1.0,
        bucket=256,
    )
    assert 1 < got["paged"] < 1.15 < got["bucketed"] < got["dense"]
    assert got["peak"] < 0.5


def test_recorded_lengths(tmp_path):
    (tmp_path / "a.txt").write_text("12\n7\n\n")
    (tmp_path / "b.jsonl").write_text('{"tokens": 5, "text": "x"}\n')
    assert kv_traffic.read_lengths(tmp_path / "a.txt").tolist() == [12, 7]
    assert kv_traffic.read_lengths(tmp_path).tolist() == [5]
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="b.jsonl line 1: no length in"):
        kv_traffic.read_lengths(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="a.txt: no lengths of at least 1 token"):
        kv_traffic.read_lengths(tmp_path / "a.txt")
