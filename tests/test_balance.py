"""Rows that move between shards: what moves, to which pages, and that samples stay the same."""

import jax
import numpy as np
import pytest
from test_engine import DRAW, RULES, SHAPE, assert_same_bits, make_engine, random_weights
from test_qwen2 import mesh_of

from dapo_jax import parallel
from dapo_jax.model import paged, qwen2
from dapo_jax.plan import roofline, shapes, simulate
from dapo_jax.plan.constants import VALUES
from dapo_jax.rollout import balance
from dapo_jax.rollout.schedule import Request, Schedule

SHARDS, SLOTS, PAGES, P = 4, 32, 150, 4


def uneven(seed: int) -> Schedule:
    """Rows of 4 shards in mid-call, some of which share the pages of a prompt; none waits."""
    rng = np.random.default_rng(seed)
    requests = [Request((g // 4,) * 9, g // 4, g % 4) for g in range(SLOTS)]
    made = Schedule(requests, SLOTS, SHARDS, 4, 60, pages=PAGES, page_tokens=P)
    made.admit()
    for _ in range(12):
        made.grow()
        for row in filter(None, [*made.rows]):
            row.emitted += 4
            if rng.random() < 0.1:
                made.release(row.slot)
    made.grow()
    return made


def loads(made: Schedule) -> np.ndarray:
    held = [row.position if row else 0 for row in made.rows]
    return np.reshape(held, (SHARDS, -1)).sum(1)


def numbers(made: Schedule) -> dict[int, list[int]]:
    """Each row's pages, counted through all shards."""
    rows = filter(None, made.rows)
    return {r.index: [made.shard(r.slot) * PAGES + page for page in r.pages] for r in rows}


def test_rows_even_out_the_shards_and_keep_their_pages():
    """Every copied page is one that its row has filled, goes where that row looks for it, and
    comes from no page that is written; whoever shared a page still has it."""
    moved, gaps = 0, np.zeros(2)  # before, after
    for seed in range(40):
        made = uneven(seed)
        before, old, rows = loads(made), numbers(made), [*filter(None, made.rows)]
        content = {page: page for pages in old.values() for page in pages}
        copies = balance.moves(made)
        after, new = loads(made), numbers(made)
        assert after.sum() == before.sum() and after.max() <= before.max()
        moved += after.max() < before.max()
        gaps += np.ptp(before), np.ptp(after)
        assert not {a for a, _ in copies} & {b for _, b in copies}
        content |= {target: source for source, target in copies}
        assert {id(row) for row in rows} == {id(row) for row in filter(None, made.rows)}
        for row in rows:
            assert made.rows[row.slot] is row
            filled = -(-row.position // P)
            assert [content[n] for n in new[row.index][:filled]] == old[row.index][:filled]
            assert new[row.index] == old[row.index] or row.tabled == 0
        for k, pages in enumerate(made.shard_pages):
            used = {page for pages in new.values() for page in pages if page // PAGES == k}
            assert pages.free == PAGES - len(used)
    assert moved > 20 and gaps[1] < gaps[0] / 3


def test_nothing_moves_for_little_nor_while_requests_wait():
    made = next(made for made in map(uneven, range(40)) if balance.moves(made))
    while balance.moves(made):
        pass
    settled = loads(made)
    assert balance.moves(made) == [] and (loads(made) == settled).all()
    seed = next(seed for seed in range(40) if balance.moves(uneven(seed)))
    made = uneven(seed)
    made.waiting.append((99, Request((1, 2), 99, 0)))
    assert balance.moves(made) == []
    made.waiting.clear()
    assert balance.moves(made)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}, {"cache_dtype": "int8"}], ids=str)
def test_samples_are_the_same_bits_with_and_without(how, monkeypatch):
    """Pages of keys, values and scales come over as they are."""
    requests = [Request([3, 1 + i], i, g) for i in range(2) for g in range(8)]
    engine = make_engine((1, 2, 2), slots=16, chunk=2, page_tokens=8, **how)
    weights, seen = engine.decode_params(random_weights()), []
    got, stats = [], []
    real = balance.moves
    for moves in (lambda made: [], lambda made: seen.append(real(made)) or seen[-1]):
        monkeypatch.setattr(balance, "moves", moves)
        drawn, said = engine.generate(weights, requests, DRAW)
        got.append(drawn)
        stats.append(said)
    assert any(seen) and stats[0].tokens == stats[1].tokens
    assert_same_bits(*got)


def test_a_page_is_copied_bit_for_bit():
    """Also a -0, which a sum with 0 would turn into 0; pages that no copy names stay."""
    mesh = mesh_of((2, 2, 2))
    how = dict(slots=8, shards=4, row_tokens=32, page_tokens=8, fraction=1.0)
    g = paged.geometry(SHAPE, "cpu", **how)
    make = jax.jit(lambda: paged.new_pool(g, "float32"), out_shardings=None)
    random = lambda x: np.random.default_rng(x.size).standard_normal(x.shape, np.float32)
    pool = jax.tree.map(random, make())
    for x in jax.tree.leaves(pool):
        x[..., 0, 0] = -0.0
    given = jax.device_put(pool, paged.pool_sharding(g, mesh, RULES))
    copies = np.array([[1, 3 * g.pages + 2], [2 * g.pages, 5], [7, 6], [0, 0]], np.int32)
    got = balance.copier(g, mesh, (*RULES.items(),))(given, copies, np.int32(3))
    for x, y in zip(jax.tree.leaves(pool), jax.tree.leaves(jax.device_get(got)), strict=True):
        axis, want = x.ndim - 3, x.copy()
        for source, target in copies[:3]:
            np.moveaxis(want, axis, 0)[target] = np.moveaxis(x, axis, 0)[source]
        assert want.tobytes() == np.ascontiguousarray(y).tobytes()


def test_the_program_is_compiled_ahead_and_works_in_place():
    """Where rows move: not where a page is a whole row."""
    for page_tokens in (8, 0):
        engine = make_engine((1, 2, 2), slots=16, chunk=2, page_tokens=page_tokens)
        calls = [*engine.calls(qwen2.abstract(SHAPE)).others.values()]
        assert len(calls) == bool(page_tokens)
        for call in calls:
            memory = call.program.lower(*call.arguments).compile().memory_analysis()
            assert memory.alias_size_in_bytes == parallel.bytes_on_device(call.arguments[0])


def test_the_plan_counts_what_moves():
    """A traffic of long tails: fewer keys in the fullest shard, and seconds for each page."""
    length = simulate.lengths(simulate.Traffic(8, 200, 0.9), 1000, 8, 8)
    sizes = simulate.Sizes(64, 4, 32, 1100, 16, 4)
    apart, even = (
        simulate.sample(length, 8, 1000, sizes._replace(even=even)) for even in (False, True)
    )
    fullest = lambda t: t.position_CxS.reshape(len(t.steps_C), 4, -1).sum(2).max(1).sum()
    assert apart.moved == 0 < even.moved and fullest(even) < 0.95 * fullest(apart)
    assert (apart.count_CxS.sum(1) == even.count_CxS.sum(1)).all()


def test_seconds_of_a_copied_page():
    """A sum over 16 shards of the page of all layers, at half of the links' rate: no ring of 16."""
    from dapo_jax.config import presets, validation
    from dapo_jax.pods import slices

    config, pod = presets.dapo_math("32B"), slices.parse("v5p-256")
    sizes = validation.resolve_mesh(config, pod.devices)
    scene = roofline.Scene(config, shapes.network(config), sizes, pod)
    zero = np.zeros(1)
    call = roofline.Call(zero + 1, zero > 0, 0, 256, zero, zero, zero)
    host = lambda n: roofline.sampling(call._replace(moved=n), scene, VALUES)[0]["host"]
    page = 64 * 128 * 2 * 128 * 2  # layers, tokens, keys and values, numbers, bytes
    want = 2 * 15 / 16 * page / 0.9e11 + 2 * 6e-6
    assert (host(1000) - host(0)) / 1000 == pytest.approx(want, rel=1e-9)
