"""The sampler: the same tokens however the work is cut, records that are the network's."""

import functools
import logging
import math
import re
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.hf_golden import make as golden
from levels import slow
from rounding import reference
from test_qwen2 import TINY, mesh_of, oracle_logits

from dapo_jax import config
from dapo_jax.model import hf, one_cpu, qwen2
from dapo_jax.rollout import sampler, schedule
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine, Request, Stats, Watch, total
from dapo_jax.rollout.settings import Rollout

SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_layers=2, head_dim=8)
SHAPE = TINY._replace(**SIZES, tie_embeddings=True, init_std=0.15)
PROMPT, RESPONSE, STOPS = 8, 20, (3, 9)
RULES = config.base().sharding.decode.to_dict()
DRAW = Draw(seed=5, temperature=0.9)


def make_engine(mesh_shape=(1, 1, 1), shape=SHAPE, kind=Engine, **how):
    """how: fields of config.rollout, and what the engine is told beside them."""
    usual = dict(prompt_tokens=PROMPT, response_tokens=RESPONSE, stop_ids=STOPS, dtype="float32")
    beside = {name: how.pop(name, value) for name, value in usual.items()}
    rollout = Rollout(**dict(slots=8, chunk=16, prefill_prompts=4) | how)
    return kind(shape, mesh_of(mesh_shape), RULES, rollout, **beside)


@functools.cache
def random_weights():
    return jax.device_get(jax.jit(qwen2.init, static_argnums=0)(SHAPE, jax.random.key(1)))


def samples_of(lengths, count=4, shape=SHAPE):
    """So many samples of a prompt of each length, in tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, shape.vocab_size, n).tolist() for n in lengths]
    return [Request(p, 10 + i, g) for i, p in enumerate(prompts) for g in range(count)]


@pytest.fixture(scope="module")
def params():
    return random_weights()


@pytest.fixture(scope="module")
def requests():
    return samples_of((1, 2, 3, 5, 7, 8))


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def weights(engine, params):
    return engine.decode_params(params)


@pytest.fixture(scope="module")
def responses(engine, weights, requests):
    return engine.generate(weights, requests, DRAW)[0]


def ids(responses):
    return [r.tokens.tolist() for r in responses]


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.truncated == b.truncated
        for x, y in zip(a[:3], b[:3], strict=True):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


@pytest.fixture(scope="module")
def assert_records(params):
    """The tokens' log-probs and entropies are those of the oracle's pass over whole sequences, as
    near as float32 can be (rounding.py)."""

    @functools.cache
    def expected(rows):
        tokens = np.zeros((len(rows), max(map(len, rows))), int)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row

        def records(p):
            logits = oracle_logits(SHAPE, p, tokens, jnp)[:, :-1]
            logp = jax.nn.log_softmax(logits / DRAW.temperature)
            taken = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
            return taken, -(jnp.exp(logp) * logp).sum(-1)

        return reference(records, params)

    def check(requests, responses):
        rows = tuple((*q.prompt, *r.tokens) for q, r in zip(requests, responses, strict=True))
        values, bounds = expected(rows)
        for i, (q, r) in enumerate(zip(requests, responses, strict=True)):
            n, at = len(r.tokens), len(q.prompt) - 1
            assert r.logps.shape == r.entropies.shape == (n,) and r.tokens.dtype == np.int32
            assert r.logps.dtype == r.entropies.dtype == np.float32
            here = tuple(x[i, at : at + n] for x in values)
            for got, want, far in zip(r[1:3], here, bounds, strict=True):
                assert np.abs(got - want).max() <= far

    return check


def spied(engine, name, note):
    """`note` gets the arguments of each call of a program."""
    usual = getattr(engine.programs, name)
    both = lambda program: lambda *arguments: (note(*arguments), program(*arguments))[1]
    wrapped = {k: both(f) for k, f in usual.items()} if name == "decode" else both(usual)
    engine.programs = engine.programs._replace(**{name: wrapped})


def compiled(**how):
    """The program of a token."""
    engine = make_engine(**how)
    call = engine.calls(qwen2.abstract(engine.shape)).decode["full"]
    return call.program.lower(*call.arguments).compile()


def test_one_cpu_makes_angles_once_a_token():
    """And not for each head of each layer."""
    text = compiled().as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1


def test_on_cpu_logits_are_multiplied_before_their_maximum_is_found():
    """By XLA's library together, which is slower than one after the other."""
    text = compiled(shape=SHAPE._replace(vocab_size=1024)).as_text()  # of 32 it is not
    bodies = [body for body in text.split("\n\n") if " dot(" in body]
    assert bodies and not any(" reduce(" in body for body in bodies)


def test_one_cpu_makes_no_copy_of_a_large_embedding():
    program = compiled(slots=1, shape=SHAPE._replace(vocab_size=2**15, hidden_size=256))
    assert program.memory_analysis().temp_size_in_bytes < 4 * 2**15 * 256 / 4  # the embedding's


@pytest.mark.parametrize(
    "how",
    [
        dict(slots=1, chunk=64),
        dict(slots=64, chunk=16),
        dict(slots=8, chunk=1),
        dict(mesh_shape=(1, 4, 2), slots=8, chunk=16),
        dict(page_tokens=8),
        dict(page_tokens=8, mesh_shape=(2, 2, 2), chunk=5),
        dict(page_tokens=8, cache_fraction=0.4, chunk=3),
        dict(page_tokens=16, slots=64, chunk=64, shape=SHAPE._replace(scan_layers=True)),
        dict(mesh_shape=(1, 4, 2), slots=16, page_tokens=8, near=2),
        dict(mesh_shape=(1, 4, 2), slots=16, chunk=4, near=-1),
        dict(asked_every=8),
        dict(large_vocabulary=32, slots=64),
    ],
    ids=str,
)
def test_tokens_depend_on_no_batch_chunk_or_mesh(
    how, params, requests, responses, assert_records, monkeypatch
):
    """Nor on the order of requests, nor on how often is asked whether all rows have ended, nor on
    whether rows are drawn apart, in no more slots than the requests want, nor on their shards."""
    how = dict(how)
    monkeypatch.setattr(schedule, "NEAR", how.pop("near", schedule.NEAR))
    asked, large = how.pop("asked_every", 0), how.pop("large_vocabulary", 0)
    if asked:
        monkeypatch.setattr(sampler, "asked_every", lambda g, steps: asked)
    if large:
        monkeypatch.setattr(one_cpu, "LARGE_VOCABULARY", large)
    monkeypatch.setattr(sampler, "programs", sampler.programs.__wrapped__)  # not others'
    other = make_engine(**how)
    assert other.mesh.size == np.prod(how.get("mesh_shape", 1))
    order = np.random.default_rng(1).permutation(len(requests))
    drawn, stats = other.generate(other.decode_params(params), [requests[i] for i in order], DRAW)
    got = [drawn[i] for i in np.argsort(order)]
    assert ids(got) == ids(responses)
    assert stats.tokens == sum(len(r.tokens) for r in responses)
    assert not large or stats.slot_steps == len(requests) * RESPONSE
    assert [r.truncated for r in got] == [r.truncated for r in responses]
    assert_records(requests, got)


def test_bits_depend_on_nobody_beside(params, requests):
    """Rows of several pages, drawn again without what was finished before a stop."""
    engine = make_engine(page_tokens=8)
    held = engine.decode_params(params)
    some, whole = (engine.generate(held, asked, DRAW)[0] for asked in (requests[1::3], requests))
    assert_same_bits(some, whole[1::3])


def test_one_cpu_makes_a_pool_for_the_call(params, requests, monkeypatch):
    """Where the vocabulary is large and slots are many: the bits are those of no more slots."""
    monkeypatch.setattr(one_cpu, "LARGE_VOCABULARY", 32)
    monkeypatch.setattr(sampler, "programs", functools.lru_cache(sampler.programs.__wrapped__))
    many = make_engine(page_tokens=8, slots=256)
    held = many.decode_params(params)
    for n, part in (8, 16), (24, 4), (8, 16):
        got = many.generate(held, requests[:n], DRAW)[0]
        assert many._pool[0].pages * part == many.geometry.pages
        few = make_engine(page_tokens=8, slots=n)
        assert_same_bits(few.generate(held, requests[:n], DRAW)[0], got)
        assert few._pool[0].pages == few.geometry.pages


def test_samples_streams_and_seeds_differ(engine, weights, requests, responses):
    assert len({tuple(t) for t in ids(responses)}) > 20
    moved = [r._replace(stream=r.stream + 100) for r in requests]
    for asked, draw in ((requests, DRAW._replace(seed=6)), (moved, DRAW)):
        got, _ = engine.generate(weights, asked, draw)
        assert sum(a == b for a, b in zip(ids(got), ids(responses), strict=True)) < 4


def test_each_request_may_have_its_own_nucleus(engine, weights, requests):
    """In one call, to the bit what calls of their own draw: also of the whole distribution."""
    apart = [
        r for p in (1.0, 0.6) for r in engine.generate(weights, requests, DRAW._replace(top_p=p))[0]
    ]
    asked = [r._replace(top_p=p) for p in (1.0, 0.6) for r in requests]
    together, _ = engine.generate(weights, asked, DRAW)
    assert ids(apart)[: len(requests)] != ids(apart)[len(requests) :]
    assert_same_bits(together, apart)


def test_ends_are_told_by_flag_and_length(responses):
    assert {r.truncated for r in responses} == {True, False}
    for r in responses:
        stops = np.isin(r.tokens, STOPS)
        assert not stops[:-1].any()
        assert r.truncated == (not stops[-1])
        assert len(r.tokens) == RESPONSE if r.truncated else 1 <= len(r.tokens) <= RESPONSE


def test_occupancy_counts_busy_slot_steps(engine, params, weights, requests, responses):
    one = make_engine(slots=1, chunk=64)
    _, stats = one.generate(one.decode_params(params), requests[:4], DRAW)
    assert stats.occupancy == 1.0  # nothing else to wait for
    assert stats.tokens == sum(len(r.tokens) for r in responses[:4]) and stats.chunks == 4
    _, stats = engine.generate(weights, requests[:4], DRAW)
    assert stats.slot_steps == 8 * max(len(r.tokens) for r in responses[:4])
    assert stats.occupancy == stats.tokens / stats.slot_steps < 0.51  # four of eight slots
    nothing, stats = engine.generate(weights, [], DRAW)
    assert nothing == [] and stats.tokens == stats.occupancy == 0


def test_samples_of_a_prompt_share_a_prefill(params, requests, responses):
    engine = make_engine()
    calls = []
    spied(engine, "prefill", lambda weights, pool, prompts: calls.append(jax.device_get(prompts)))
    weights = engine.decode_params(params)
    got, _ = engine.generate(weights, requests[4:12], DRAW)  # two prompts, four samples each
    (call,) = calls
    assert call.length_B.tolist() == [1, 2, 0, 0]
    assert call.tokens_BxT[0, :1].tolist() == requests[4].prompt[:1]
    assert not call.tokens_BxT[2:].any()
    assert ids(got) == ids(responses)[4:12]

    calls.clear()  # five prompts, four a call; the one of a single token needs no prefill
    engine.generate(weights, requests[:20:4], DRAW)
    (call,) = calls
    assert np.count_nonzero(call.length_B) == 4


def test_samples_of_a_prompt_stay_together_where_shards_stay_even(requests, monkeypatch):
    """Fewer prompts are run than by dealing each row to the emptiest shard."""
    for n in range(1, len(requests) + 1):
        ran = {}
        for near in (2, -1):
            monkeypatch.setattr(schedule, "NEAR", near)
            deal = schedule.Schedule(requests[:n], 64, 4, 4, RESPONSE, pages=64, page_tokens=8)
            ran[near] = len(deal.admit()[0])
            rows = np.reshape([bool(row) for row in deal.rows], (4, 16)).sum(1)
            assert rows.sum() == n and np.ptp(rows) <= max(near, 0) + 1
        assert ran[2] <= ran[-1] - (n > 6)


def test_nothing_compiles_after_the_first_call(caplog, engine, weights, requests, responses):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        engine.generate(weights, requests[::-1], Draw(seed=99, temperature=0.5))
        engine.generate(weights, requests[:3], Draw(seed=1, temperature=1.3, max_tokens=2))
        jax.jit(lambda x: x + 99)(np.float32(1))  # which the log does not miss
    (other,) = [m for m in caplog.messages if m.startswith("Compiling ")]
    assert "lambda" in other


def test_no_token_turns_a_bfloat16_pool_into_float32():
    """As XLA on CPUs does around each scatter and gather of bfloat16."""
    how = dict(dtype="bfloat16", page_tokens=8)
    text = compiled(**how).as_text()
    whole = min(x.size for x in jax.tree.leaves(make_engine(**how).programs.new_pool()))
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert sizes and max(sizes) < whole


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"dtype": "bfloat16"}, {"cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("scan", [False, True])
def test_weights_that_are_given_up_are_held_once(params, requests, scan, change):
    """The same samples; what needs no change stays where it lies, and stacks of layers that are
    taken apart are gone."""
    engine = make_engine(shape=SHAPE._replace(scan_layers=scan), **change)
    given = jax.device_put(params, jax.devices()[0])
    want, _ = engine.generate(engine.decode_params(given), requests[:4], DRAW)
    assert not any(w.is_deleted() for w in jax.tree.leaves(given))  # kept unless told
    place = lambda w: w.unsafe_buffer_pointer()
    embed, stack = place(given["embed"]), place(given["blocks"]["up"])
    taken = engine.decode_params(given, keep=False)
    got, _ = engine.generate(taken, requests[:4], DRAW)
    assert_same_bits(got, want)
    if "cache_dtype" in change:  # its keys are evened out: another model's weights
        return
    blocks = taken["blocks"]
    assert isinstance(blocks, dict if scan else list)
    assert given["embed"].is_deleted() == ("dtype" in change)
    assert given["blocks"]["up"].is_deleted() == ("dtype" in change or not scan)
    if not change:
        assert place(taken["embed"]) == embed
        assert not scan or place(blocks["up"]) == stack


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_the_last_rows_are_drawn_by_programs_of_few_slots(
    mesh_shape, params, requests, responses, assert_records
):
    """Once nothing waits and every shard's rows have room in it; the same tokens."""
    engine = make_engine(mesh_shape, slots=8, chunk=2, page_tokens=8)
    engine.rungs, seen = (4, 2), []

    active = lambda *call: np.asarray(call[2].active_S).reshape(engine.shards, -1)
    spied(engine, "decode", lambda *call: seen.append(active(*call)))
    got, stats = engine.generate(engine.decode_params(params), requests, DRAW)
    assert ids(got) == ids(responses)
    assert_records(requests, got)
    sizes = [live.size for live in seen]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == {8, 4, 2}
    for larger, size in ((8, 4), (4, 2)):  # none is used later than it could be
        last = [live for live in seen if live.size == larger][-1]
        assert last.sum(1).max() > size // engine.shards
    assert stats.slot_steps <= 2 * sum(sizes)


def test_programs_of_the_last_rows_are_by_the_rows_of_a_shard():
    sizes = {
        (4096, 16): (2048, 1024, 256),
        (1024, 1): (512, 256, 128, 64, 16),
        (512, 8): (128,),
        (64, 4): (),
        (96, 2): (),
    }
    assert {of: schedule.rungs(*of) for of in sizes} == sizes
    assert make_engine(slots=256).rungs == ()  # of a CPU


def test_a_chunk_is_handed_over_while_the_next_is_decoded(params, requests, responses):
    """All but the last; and no later than that."""
    engine, events = make_engine(chunk=4), []
    spied(engine, "decode", lambda *_: events.append("decode"))
    weights = engine.decode_params(params)
    got, stats = engine.generate(weights, requests, DRAW, Watch(progress=events.append))
    assert ids(got) == ids(responses)
    dispatched = [x == "decode" for x in events]
    assert dispatched == [True] + [True, False] * (stats.chunks - 1) + [False]
    assert sum(x for x in events if x != "decode") == len(requests)


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 0, "request 1: prompt of 0 tokens"),
        ([1] * 9, 0, "request 1: prompt of 9 tokens, this sampler takes 1 to 8"),
        ([1, 32], 0, "request 1: token id outside 0..31"),
        ([-1, 2], 0, "request 1: token id outside 0..31"),
        ([1], 21, "max_tokens=21: this sampler holds 1 to 20"),
    ],
)
def test_bad_requests_are_named(engine, weights, requests, responses, prompt, limit, message):
    bad = [requests[0], Request(prompt, 0, 0)]
    with pytest.raises(ValueError, match=message) as error:
        engine.generate(weights, bad, Draw(seed=0, max_tokens=limit))
    assert "\n" not in str(error.value)
    assert ids(engine.generate(weights, requests[:1], DRAW)[0]) == ids(responses)[:1]


def test_an_interrupted_call_leaves_a_working_engine(engine, weights, requests, responses):
    interrupt = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(weights, requests, DRAW, Watch(progress=interrupt))
    assert ids(engine.generate(weights, requests, DRAW)[0]) == ids(responses)


def test_what_does_not_fit_is_said_with_what_would(params):
    engine = make_engine(page_tokens=8)
    weights = sum(w.nbytes for w in jax.tree.leaves(params))
    pool = 2 * SHAPE.num_layers * 8 * 4 * (8 * SHAPE.num_kv_heads * SHAPE.head_dim) * 4
    engine.require_memory(params, weights + pool)
    with pytest.raises(ValueError, match="does not fit") as error:
        engine.require_memory(params, weights + pool // 2)
    assert "rollout.slots=4 or rollout.cache_fraction=0.5" in str(error.value)
    with pytest.raises(ValueError, match="more devices along mesh.tensor"):
        engine.require_memory(params, weights - 1)
    rows = make_engine()  # a page is a whole row there
    with pytest.raises(ValueError, match="what would: rollout.slots=") as error:
        rows.require_memory(params, weights + pool // 2)
    assert "fraction" not in str(error.value)
    mesh = make_engine((1, 2, 2), page_tokens=8)
    mesh.require_memory(params, weights // 2 + pool // 4 + weights // 4)
    with pytest.raises(ValueError, match="rollout.slots=6: must be a multiple of 4"):
        make_engine((1, 4, 2), slots=6)


def test_statistics_of_several_calls_add_up():
    a, b = Stats(10, 20, 2, 0, 0.5), Stats(30, 30, 3, 1, 0.25)
    assert total([a, b]) == Stats(40, 50, 5, 1, 0.5)
    assert total([a, b]).occupancy == 0.8 and total([]).occupancy == 0
    assert isinstance(total([a, b]).tokens, int)


@pytest.mark.parametrize("most", [20, 6])
def test_limits_cut_the_same_responses(most, engine, weights, requests, responses):
    """A request's own, and the call's."""
    limits = [1 + 3 * i % most for i in range(len(requests))]
    own = [r._replace(limit=n) for r, n in zip(requests, limits, strict=True)]
    draw = DRAW._replace(max_tokens=most)
    for asked, limits in ((own, limits), (requests, [most] * len(requests))):  # noqa: B020
        got, stats = engine.generate(weights, asked, draw)
        for short, whole, n in zip(got, responses, limits, strict=True):
            assert short.tokens.tolist() == whole.tokens[:n].tolist()
            assert short.truncated == (whole.truncated or len(whole.tokens) > n)
        assert stats.tokens == sum(len(r.tokens) for r in got)
    with pytest.raises(ValueError, match=f"request 0: limit 21, this call allows 0 to {most}"):
        engine.generate(weights, [requests[0]._replace(limit=21)], draw)


def listen(engine, weights, requests, **settings):
    """(responses, stats, tokens and log-probs by request as `on_tokens` told them, its starts)."""
    told = [([], []) for _ in requests]
    starts = [[] for _ in requests]

    def on_tokens(index, start, tokens, logps):
        starts[index].append(start)
        for kept, new in zip(told[index], (tokens, logps), strict=True):
            kept[start:] = new.tolist()

    got, stats = engine.generate(weights, requests, DRAW, on_tokens=on_tokens, **settings)
    return got, stats, told, starts


@pytest.mark.parametrize("cache", [dict(), dict(page_tokens=8, cache_fraction=0.4)], ids=str)
def test_tokens_are_told_as_they_come(cache, params, requests, responses):
    """Also of rows that are evicted, and made again from their beginning to the same end."""
    other = make_engine(chunk=4, **cache)
    got, stats, told, starts = listen(other, other.decode_params(params), requests)
    assert ids(got) == ids(responses) == [t for t, _ in told]
    for r, (_, logps) in zip(got, told, strict=True):
        np.testing.assert_array_equal(r.logps, np.float32(logps))
    assert all(s[0] == 0 and set(np.diff(s)) <= {4} for s in starts) == (not cache)
    assert (stats.evicted > 0) == bool(cache)
    assert sum(s.count(0) for s in starts) <= len(requests) + stats.evicted


def test_requests_that_are_not_wanted_any_more_end(params, requests, responses):
    """In their slots and in the queue; the others are what they were."""
    engine, seen = make_engine(chunk=2, slots=16), []
    spied(engine, "decode", lambda *call: seen.extend(np.asarray(call[2].stream_S)))
    wanted = lambda got: len(got) - 12 * any(got)
    got, stats = engine.generate(engine.decode_params(params), requests, DRAW, wanted=wanted)
    assert ids(got[:12]) == ids(responses[:12]) and None in got[12:16]
    assert all(r is None or ids([r]) == ids([full]) for r, full in zip(got, responses, strict=True))
    assert stats.tokens == sum(len(r.tokens) for r in responses[:12])
    assert requests[-1].stream not in seen


def test_cut_ends_a_response(params, requests, responses, assert_records):
    """After the chunk in which a run of tokens is found, and perhaps before that chunk's start."""
    other = make_engine(chunk=4)

    def cut(tokens):  # two ahead of the second token below 8, where there is one
        small = np.flatnonzero(tokens < 8)
        return max(int(small[1]) - 1, 1) if len(small) > 1 else 0

    got, stats, told, _ = listen(other, other.decode_params(params), requests, cut=cut)
    ends = [cut(r.tokens) for r in responses]
    assert ids(got) == [
        r.tokens[: n or None].tolist() for r, n in zip(responses, ends, strict=True)
    ]
    assert ids(got) == [t for t, _ in told]
    assert stats.tokens == sum(len(r.tokens) for r in got)
    for r, whole, n in zip(got, responses, ends, strict=True):
        assert r.truncated == (whole.truncated and not n)
    assert_records(requests, got)
    assert 8 < np.count_nonzero(ends) < len(requests)


@pytest.mark.parametrize(
    ("page_tokens", "cache_dtype"),
    [slow(0, "model"), slow(0, "int8"), (8, "model"), slow(8, "int8")],
)
def test_long_prompts_are_prefilled_in_pieces(page_tokens, cache_dtype, params, assert_records):
    """Pieces of 8 tokens, of prompts of up to 27, and rows that are evicted, against one piece and
    against the oracle; an int8 cache is a little off."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 32, n).tolist() for n in (27, 9, 20, 1, 16, 26)]
    requests = [Request(prompt, i, g) for i, prompt in enumerate(prompts) for g in range(2)]
    sizes = dict(slots=4, chunk=6, prompt_tokens=27, response_tokens=12, prefill_prompts=2)
    sizes |= dict(page_tokens=page_tokens, cache_dtype=cache_dtype)
    pieces = make_engine(**sizes, prefill_tokens=8, cache_fraction=0.4)
    whole = make_engine(**sizes, prefill_tokens=64)
    assert pieces.geometry.reader == ("pages" if page_tokens else "rows")
    assert pieces.prefill_tokens == 8
    weights = pieces.decode_params(params)
    got, _ = pieces.generate(weights, requests, DRAW)
    assert ids(got) == ids(whole.generate(weights, requests, DRAW)[0])
    if cache_dtype == "model":
        assert_records(requests, got)
        return
    assert [x.dtype for x in pieces._pool[1][0]] == ["int8", "int8", "float32"]
    gaps = []
    for q, r in zip(requests, got, strict=True):
        tokens = np.array([*q.prompt, *r.tokens])
        logits = oracle_logits(SHAPE, params, tokens[:-1])[len(q.prompt) - 1 :] / DRAW.temperature
        exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        gaps.extend(np.abs(r.logps - exact[np.arange(len(r.tokens)), r.tokens]))
    assert 1e-4 < np.mean(gaps) < 0.03 and max(gaps) < 0.3


def test_greedy_equals_transformers(tmp_path):
    """Token for token, with the random models of tests/data/hf_golden/make.py."""
    stored = np.load(golden.GREEDY)
    for case in golden.GREEDY_CASES:
        model = hf.load(golden.write(tmp_path / case, case))
        prompt, expected = stored[f"{case}/prompt"], stored[f"{case}/greedy"]
        sizes = dict(prompt_tokens=prompt.shape[1], response_tokens=expected.shape[1])
        sizes |= dict(slots=2, prefill_prompts=2, prefill_tokens=8)
        engine = make_engine(shape=model.shape, stop_ids=[], **sizes)
        requests = [Request(row.tolist(), 0, i) for i, row in enumerate(prompt)]
        weights = engine.decode_params(model.params)
        got, _ = engine.generate(weights, requests, Draw(seed=0, temperature=0))
        np.testing.assert_array_equal([r.tokens for r in got], expected, err_msg=case)
