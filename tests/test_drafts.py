"""Guesses change when a token comes, and never which: samples with drafts are those without."""

import functools
import types

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from levels import slow
from rounding import FACTOR
from test_engine import (
    SHAPE,
    assert_same_bits,
    ids,
    make_engine,
    random_weights as weights,
    samples_of,
    spied,
)
from test_qwen2 import oracle_logits

from benchmarks import drafts as measured, half_billion
from dapo_jax import config
from dapo_jax.gate import ConfigError
from dapo_jax.log import tags
from dapo_jax.model import int8_keys, paged, qwen2
from dapo_jax.rollout import drafts, draw as drawing, engine, near_ties
from dapo_jax.rollout.drafts import Counts, Draft, Drafts
from dapo_jax.rollout.draw import Draw
from dapo_jax.rollout.engine import Engine, total
from dapo_jax.rollout.settings import Rollout

STOPS, RESPONSE = (3,), 60
DRAW = Draw(seed=5, temperature=0.5)  # low: texts repeat
GEOMETRY = paged.geometry


def make(kind, mesh=(1, 1, 1), **how):
    usual = dict(response_tokens=RESPONSE, stop_ids=STOPS, chunk=8)
    return make_engine(mesh, kind=kind, **usual | how)


@pytest.fixture(scope="module")
def requests():
    """Three prompts, four samples each; one has a limit of its own."""
    first, *others = samples_of((1, 5, 8))
    return [first._replace(limit=9), *others]


@functools.cache
def without(draw, page_tokens=0):
    """Responses of an engine without drafts; by a function of the requests."""
    engine = make(Engine, page_tokens=page_tokens)
    return lambda requests: engine.generate(engine.decode_params(weights()), requests, draw)[0]


def twice(engine, requests, draw=DRAW):
    """Two calls, the second of which has the first as its history; and its stats."""
    held = engine.decode_params(weights())
    first, stats = engine.generate(held, requests, draw)
    second, more = engine.generate(held, requests, draw)
    return first, second, total([stats, more])


@pytest.mark.parametrize("mesh, slots", [((1, 1, 1), 8), slow((2, 2, 2), 16)], ids=str)
def test_the_same_program_gives_the_same_bits(mesh, slots, requests):
    """Guesses in idle slots: nothing compiles beside what decodes without them, tokens, log-probs
    and entropies are the same bits, and history guesses nearly all. Over 8 devices too: a place has
    the products, the page and the order of sums over devices that every place of its shard has."""
    how = dict(mesh=mesh, slots=slots)
    engine, plain = make(drafts.DraftEngine, draft_tokens=4, **how), make(Engine, **how)
    first, second, stats = twice(engine, requests)
    want = plain.generate(plain.decode_params(weights()), requests, DRAW)[0]
    assert_same_bits(first, want)
    assert_same_bits(second, want)
    assert engine.geometry.reader == plain.geometry.reader == "rows"
    assert engine.programs.decode["full"]._cache_size() == 1
    n = stats.drafts
    assert n.passes and n.accepted[2] > 0.8 * n.drafted[2] > 0
    assert n.tokens_per_row > 1.25 and n.metrics()["drafts/drafted/history"] == n.drafted[2]


@functools.cache
def even_weights():
    return jax.device_get(jax.jit(int8_keys.even_keys)(weights()))


def by_int8(prompt: list[int], response: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A response's log-probs in float64 with keys and values in int8; and how much they may move as
    some of these numbers, up to 127, round to their neighbours: those that lie as near to a half as
    two programs may be apart. Each is moved for itself, and all behind it done again; several that
    meet are allowed for by rounding.py's factor."""
    far = 127 * near_ties.allowance(SHAPE, "float32", False)
    tokens, at = np.array([*prompt, *response]), len(prompt) - 1

    def logps(moved=None):
        halves, calls = [], iter(range(2 * SHAPE.num_layers))

        def held(x):
            scale, call = np.abs(x).max(-1, keepdims=True) / 127, next(calls)
            number, whole = x / scale, np.round(x / scale)
            halves.extend((call, i) for i in np.flatnonzero(0.5 - abs(number - whole) < far))
            if moved and moved[0] == call:
                i = np.unravel_index(moved[1], x.shape)
                whole[i] += np.sign(number[i] - whole[i])
            return whole * scale

        logits = oracle_logits(SHAPE, even_weights(), tokens, held=held)[at:-1] / DRAW.temperature
        logp = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
        return logp[np.arange(len(response)), response], halves

    right, halves = logps()
    moves = (abs(logps(place)[0] - right) for place in halves)
    return right, FACTOR * sum(moves, np.zeros(len(right)))


@pytest.mark.parametrize(
    "how",
    [
        dict(draft_places=32),  # a program of its own
        slow(dict(page_tokens=8, draft_places=32)),
        dict(page_tokens=8, cache_fraction=0.3, draft_places=16),  # evictions
        slow(dict(page_tokens=8, mesh=(2, 1, 1), draft_places=32)),
        slow(dict(page_tokens=8, mesh=(2, 2, 2), draft_places=32)),  # 8 devices
        slow(dict(page_tokens=8, cache_dtype="int8", draft_places=32)),
        slow(dict(draft_places=32, draw=DRAW._replace(temperature=0.0))),
        slow(dict(draft_places=32, draw=DRAW._replace(top_p=0.9))),
        dict(draft_places=32, chunk=1),  # no room for a guess
    ],
    ids=str,
)
def test_other_programs_give_the_same_tokens(how, requests):
    draw, how = how.get("draw", DRAW), {k: v for k, v in how.items() if k != "draw"}
    engine = make(drafts.DraftEngine, draft_tokens=5, **how)
    first, second, stats = twice(engine, requests, draw)
    plain = {k: v for k, v in how.items() if not k.startswith("draft")}
    base = make(Engine, **plain)
    want = base.generate(base.decode_params(weights()), requests, draw)[0]
    assert ids(first) == ids(second) == ids(want)
    assert [r.truncated for r in second] == [r.truncated for r in want]
    for q, a, b in zip(requests, second, want, strict=True):
        truth, moves = by_int8(q.prompt, a.tokens) if "cache_dtype" in how else (a.logps, 0)
        assert (np.abs(a.logps - truth) <= 2e-5 + moves).all()
        assert (np.abs(a.logps - b.logps) <= 2e-5 + moves).all()
    assert (sum(stats.drafts.accepted) > 0) == (how.get("chunk") != 1)


def test_rows_that_continue_and_texts_that_cut(requests):
    """A prefix of earlier steps, and `cut`, as without drafts."""
    tokens = ids(without(DRAW)(requests))
    asked = [r._replace(prefix=t[:3]) for r, t in zip(requests, tokens, strict=True) if len(t) > 5]
    cut = lambda tokens: 7 if len(tokens) >= 7 else 0
    found = []
    for kind, how in ((Engine, {}), (drafts.DraftEngine, dict(draft_tokens=4))):
        engine = make(kind, staleness=1, **how)
        held = engine.decode_params(weights())
        for _ in range(2):
            found.append(ids(engine.generate(held, asked, DRAW, cut=cut)[0]))
    assert found[0] == found[1] == found[2] == found[3] and len(asked) > 3


def texts(*responses, prompt=(1, 2, 3), earlier=()):
    """A source that has these responses, in earlier calls and in this one."""
    source = Drafts(4)
    for i, response in enumerate(earlier):
        source.open(i, prompt)
        source.drew(i, drafts.NONE, response)
    source.begin()
    for i, response in enumerate(responses):
        source.open(i, prompt)
        source.drew(i, drafts.NONE, response)
    return source


@pytest.mark.parametrize(
    "source, want",
    [
        (texts([7, 8, 9, 5], []), Draft((7, 8, 9, 5), "siblings", 2)),  # behind the prompt's end
        (texts([7, 8, 9, 5, 6], [4, 8, 9]), Draft((5, 6), "siblings", 2)),
        (texts([7, 8, 9, 5], [6, 7, 8], earlier=[[6, 7, 8, 4]]), Draft((4,), "history", 5)),
        (texts([7, 8, 9], [7, 8], earlier=[[7, 8, 4]]), Draft((9,), "siblings", 4)),  # of like ones
        (texts([7, 8, 9], [7, 8, 6], [8]), Draft((6,), "siblings", 1)),  # the latest
        (texts([5, 6, 4, 5, 6]), Draft((4, 5, 6), "own", 2)),
        (texts([4, 2]), Draft((3, 4, 2), "own", 1)),  # of where it began
        (texts([9, 8]), drafts.NONE),
    ],
)
def test_what_is_guessed(source, want):
    assert source.draft(max(source._texts), 4) == want
    assert source.draft(max(source._texts), 0) == drafts.NONE


def test_a_guess_is_worth_what_such_guesses_were():
    """Chances are counted also where no pass verified; places go to what is likely kept, by shard;
    the program that is run gives most for its time, and more than a step without guesses."""
    source = Drafts(3)
    good, bad = Draft((1, 2, 3), "siblings", 9), Draft((1, 2, 3), "own", 1)
    assert source.choose([drafts.NONE] * 2, [0, 0], [(11, 1.0)]) is None
    source.open(0, [1])
    for _ in range(30):
        assert source.drew(0, good, [1, 2, 3, 4]) == 3
        assert source.drew(0, bad, [5]) == 0
    assert source.chance(good) > 0.97 and source.chance(bad) < 0.1
    one = lambda wide, cost=1.0: [(wide, cost)]
    assert source.choose([bad, good, good], [0, 0, 1], one(4)) == (4, [0, 2, 3])
    assert source.choose([bad, bad], [0, 0], one(6)) is None
    assert source.choose([good, bad], [0, 0], one(11, 2.0)) == (11, [3, 0])
    assert source.choose([good, bad, bad, bad], [0] * 4, one(13, 2.0)) is None
    # Nearly 4 tokens by 4 places and 8 by 8.
    rows = [good, good], [0, 0]
    for cost, want in ((1.6, (8, [3, 3])), (2.5, (4, [1, 1]))):
        assert source.choose(*rows, [(4, 1.2), (8, cost)]) == want
    assert source.choose(*rows, [(8, 1.5), (16, 1.5)]) == (8, [3, 3])  # no more to guess
    assert source.choose(*rows, [(4, 3.0), (8, 5.0)]) is None


def test_what_is_kept_is_bounded():
    """A problem keeps the responses of its latest call; the latest problems are kept."""
    source = Drafts(4, kept=40)
    for call in range(4):
        source.begin()
        for problem in range(call, call + 2):
            source.open(problem, [problem, 1])
            source.drew(problem, drafts.NONE, [10 * call + problem] * 10)
    source.begin()
    assert sum(map(len, source._problems.values())) <= 40 and list(source._problems) == [
        (3, 1),
        (4, 1),
    ]
    source.open(0, [3, 1])
    assert [t.call for t in source._problems[3, 1].texts[1:]] == [5, 6]


def test_counts_add_up():
    a, b = Counts(1, 4, (3, 0, 0), (2, 0, 0)), Counts(2, 4, (0, 1, 5), (0, 0, 4))
    assert sum([a, b]) == Counts(3, 8, (3, 1, 5), (2, 0, 4)) and (a + b).tokens_per_row == 1.75
    assert {tags.family(tag) for tag in a.metrics()} == {
        name for name, tag in tags.TAGS.items() if tag.when == "drafts"
    }


def test_off_is_the_plain_engine_and_the_same_programs():
    assert drafts.kind(Rollout()) is Engine
    assert drafts.kind(Rollout(draft_tokens=1)) is drafts.DraftEngine
    assert not make(Engine).geometry.gathers
    with pytest.raises(ConfigError, match="draft_places: 9 is not divisible by 2"):
        make(drafts.DraftEngine, mesh=(2, 1, 1), draft_tokens=2, draft_places=9)
    c = config.base()
    c.rollout.draft_tokens, c.rollout.draft_places, c.rollout.slots = 2, 4, 8
    assert "draft_places: 4 is less than rollout.slots = 8" in c.rollout.mistakes()[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_guesses_through_the_interpreted_tpu_kernel(requests, monkeypatch):
    """By idle slots of the same program, and by a wider one: the tokens of XLA's reader."""
    want = [tokens[:24] for tokens in ids(without(DRAW)(requests[:3]))]
    to_tpu = lambda shape, _, **how: GEOMETRY(shape, "tpu", **how)
    monkeypatch.setattr(engine.paged, "geometry", to_tpu)
    for places in (0, 16):
        made = make(drafts.DraftEngine, draft_tokens=3, draft_places=places, page_tokens=16)
        assert made.geometry.reader == "kernel"
        with pltpu.force_tpu_interpret_mode():
            first, second, stats = twice(made, requests[:3], DRAW._replace(max_tokens=24))
        assert ids(first) == ids(second) == want and sum(stats.drafts.accepted) > 5


def test_the_tpu_kernel_takes_so_many_guesses(monkeypatch):
    to_tpu = lambda shape, _, **how: GEOMETRY(shape, "tpu", **how)
    monkeypatch.setattr(engine.paged, "geometry", to_tpu)
    assert make(drafts.DraftEngine, draft_tokens=15, page_tokens=16).geometry.queries == 16
    with pytest.raises(ConfigError, match="draft_tokens: 16 guesses, and the TPU kernel takes 15"):
        make(drafts.DraftEngine, draft_tokens=16, page_tokens=16)


def test_a_rows_places_lie_side_by_side(requests):
    """In each shard its rows in order, behind each row its guesses at the next positions of the
    same pages: how the TPU kernel knows whose they are."""
    made = make(drafts.DraftEngine, mesh=(2, 1, 1), draft_tokens=3, draft_places=32)
    seen = []
    spied(made, "decode", lambda *call: seen.append(jax.device_get(call[2])))
    twice(made, requests)
    programs = made.calls(qwen2.abstract(SHAPE)).decode  # which are compiled before the first step
    few = make(drafts.DraftEngine, draft_tokens=1, draft_places=made.slots + 2, draft_cost=3.0)
    assert few._programs(few.slots) == [(made.slots + 1, 2.0), (made.slots + 2, 3.0)]
    known = {len(call.arguments[2].token_S) for call in programs.values()}
    assert {len(x.token_S) for x in seen} <= known == {made.slots, *made.widths}
    wide = [x for x in seen if len(x.token_S) == 32]
    assert len(wide) > 3
    for slots in wide:
        names = slots.stream_S * 100 + slots.sample_S
        for half in (slice(0, 16), slice(16, 32)):
            live = slots.active_S[half]
            n = live.sum()
            assert live[:n].all()
            name, position = names[half][:n], slots.position_S[half][:n]
            begins = np.flatnonzero(np.diff(name, prepend=-1))
            assert len(set(name)) == len(begins)  # each row once
            for i, j in zip(begins, [*begins[1:], n][: len(begins)], strict=True):
                np.testing.assert_array_equal(position[i:j], position[i] + np.arange(j - i))
                assert (slots.table_SxR[half][i:j] == slots.table_SxR[half][i]).all()


@pytest.mark.slow
def test_the_benchmark_measures_what_it_says(monkeypatch, tmp_path):
    """Its speed part at a tiny size: both engines replay the texts, which it checks itself, and the
    guesses that are kept are those of real text. And its products."""
    for name in ("row_keys", "uniform", "draw"):
        monkeypatch.setattr(drawing, name, getattr(drawing, name))  # puts them back
    monkeypatch.setattr(half_billion, "REAL", half_billion.SMALL)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 256, (2, 24)).tolist()  # siblings write nearly the same
    group = lambda text: [[*text[:n], n, *text[n:]] for n in range(8)]
    monkeypatch.setattr(measured, "texts", lambda path, n: [(t[:5], group(t)) for t in texts])
    args = types.SimpleNamespace(tokens=4, rows=(4,), layers=1, length=24, repeats=1)
    table = measured.speed(tmp_path, args)
    assert [row[:2] for row in table.rows] == [
        ["4", "real responses"], ["4", "real responses, epoch 2"], ["4", "random ids"],
        ["4", "random ones of 50 ids"],
    ]  # fmt: skip
    kept = [float(row[-2]) for row in table.rows]
    assert kept[0] > 1.5 and kept[1] > 1.5 and kept[2] < 1.2
    assert all(float(row[3]) > 0 for row in table.rows)
    monkeypatch.setattr(measured, "WIDTHS", (4, 16))
    four, sixteen = measured.products(tmp_path, args).rows
    assert (four[0], four[-2], sixteen[0], sixteen[-1]) == ("4", "1.00", "16", "1.00")
    parts = [float(ms) for ms in sixteen[1:6]]
    assert parts[-1] == pytest.approx(sum(parts[:-1]), abs=0.3) and float(sixteen[-2]) > 0
