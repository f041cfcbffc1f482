"""What another order of sums could draw otherwise is told, and hardly anything else."""

import functools

import jax
import numpy as np
import pytest
from test_drafts import DRAW, RESPONSE, SHAPE, make
from test_engine import ids, random_weights, samples_of

from dapo_jax.model import hf
from dapo_jax.rollout import drafts, draw, near_ties
from dapo_jax.rollout.engine import Engine, Request

V, ROWS = 96, 4096
EPS = 2.0**-24


@functools.partial(jax.jit, static_argnames=("allowed", "mode", "apart"))
def told(logits, u, temperature, top_p, *, allowed, mode, apart=False):
    near = functools.partial(near_ties.near, allowed)
    of = draw.draw_apart if apart else draw.draw
    return of(logits, u, temperature, top_p, mode, near)


def rows(seed=0, n=ROWS, size=3.0, vocab=V):
    rng = np.random.default_rng(seed)
    logits = size * rng.normal(size=(n, vocab)).astype(np.float32)
    return logits, rng.random(n, np.float32), np.full(n, 0.8, np.float32)


def oracle(logits, u, temperature, allowed):
    """(which are near, by whom: lower edge or upper, the widths of all edges) in float64, as
    `near_ties.near` has it."""
    scaled = logits.astype(np.float64) / temperature
    w = np.exp(scaled - scaled.max(-1, keepdims=True))
    cdf = np.cumsum(w, -1) / w.sum(-1, keepdims=True)
    token = (cdf <= u[:, None]).sum(-1)
    largest = np.abs(scaled).max(-1)
    n, b = draw.blocks(logits.shape[-1])
    off = allowed * largest + 3 * EPS * (4 * largest + 4)
    far = lambda share: share * (1 - share) * np.expm1(2 * off)
    summed = 3 * EPS * (2 * (n + b + 1) * u + b + 4)
    at = lambda i: np.take_along_axis(cdf, np.clip(i, 0, None)[:, None], 1)[:, 0]
    low, high = np.where(token, at(token - 1), 0), at(token)
    last = token == logits.shape[-1] - 1
    below = (token > 0) & (u - low <= far(low) + summed)
    above = ~last & (high - u <= far(high) + summed)
    edges = cdf[:, :-1]
    return below | above, token, edges * (1 - edges) * np.expm1(2 * off)[:, None]


@pytest.mark.parametrize("allowed", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_it_is_the_oracle_s_bound(allowed, temperature):
    logits, u, top_p = rows()
    want, token, _ = oracle(logits, u, temperature, allowed)
    got = told(logits, u, temperature, top_p, allowed=allowed, mode="full")
    assert (got.token_S != token).sum() <= want.sum()
    assert (got.near_S != want).sum() <= 2  # at the edge of the edge
    apart = told(logits, u, temperature, top_p, allowed=allowed, mode="full", apart=True)
    np.testing.assert_array_equal(apart.near_S, got.near_S)
    plain = jax.jit(draw.draw, static_argnames="mode")(logits, u, temperature, top_p, mode="full")
    assert plain.near_S is None
    for a, b in zip(plain[:3], got[:3], strict=True):
        np.testing.assert_array_equal(a, b)  # what is told changes no bit


def test_at_an_edge_and_well_away_from_it():
    """Uniform numbers on each edge, which is in float32 half a number off, and between edges."""
    logits, *_ = rows(n=1)
    w = np.exp(logits[0].astype(np.float64))
    edges = np.concatenate([[0], np.cumsum(w) / w.sum()])
    wide = np.flatnonzero(np.diff(edges) > 1e-3)
    assert len(wide) > 40
    of = lambda u: told(
        np.repeat(logits, len(u), 0), u.astype(np.float32), 1.0, np.ones(len(u), np.float32),
        allowed=1e-7, mode="full",
    )  # fmt: skip
    assert of(edges[1:-1]).near_S.all()
    away = of((edges[wide] + edges[wide + 1]) / 2)
    assert not away.near_S.any() and (away.token_S == wide).all()
    ends = of(np.array([0.0, 1 - 2**-24]))  # beyond which there is nobody
    assert not ends.near_S.any()


def test_false_alarms_are_as_many_as_the_bound_is_wide():
    """A uniform number falls within `far` of an edge, on either side, as often as that is wide."""
    logits, u, top_p = rows(seed=3, n=20000, size=1.0)
    far = oracle(logits, u, 1.0, 1e-4)[2]
    want = 2 * far.sum(-1).mean() * len(u)
    got = told(logits, u, 1.0, top_p, allowed=1e-4, mode="full").near_S.sum()
    assert want > 200 and abs(got - want) < 5 * want**0.5


@pytest.mark.parametrize("mode, top_p", [("full", 1.0), ("top_p", 0.8), ("greedy", 1.0)])
def test_whatever_is_drawn_from_such_logits_otherwise_is_told(mode, top_p):
    """Logits that are off by no more than is allowed, in directions of no order and in the worst
    ones: every other token was told, and of those told not few are drawn otherwise."""
    allowed = 5e-4
    logits, u, _ = rows(seed=1)
    top_p = np.full(ROWS, top_p, np.float32)
    of = functools.partial(told, allowed=allowed, mode=mode)
    out = of(logits, u, 1.0, top_p)
    rng, found = np.random.default_rng(2), np.zeros(ROWS, bool)
    largest = np.abs(logits).max(-1, keepdims=True)
    token = np.asarray(out.token_S)[:, None]
    index = np.arange(V)
    ways = [rng.choice([-1.0, 1.0], logits.shape) for _ in range(8)]
    ways += [np.where(index < token, 1, -1), np.where(index <= token, -1, 1)]
    for way in ways:
        for share in (1.0, 0.7):
            other = (logits + share * allowed * largest * way).astype(np.float32)
            found |= np.asarray(of(other, u, 1.0, top_p).token_S != out.token_S)
    near = np.asarray(out.near_S)
    assert not (found & ~near).any()
    assert 20 < found.sum() <= near.sum() < ROWS / 5
    # Another nucleus moves all edges, most of them by less than to the uniform number.
    assert near.sum() <= (1.1 if mode != "top_p" else 7) * found.sum()


@pytest.mark.parametrize("vocab", [1000, 2**15])
def test_the_draw_s_own_rounding_is_told(vocab):
    """Uniform numbers a few roundings from an edge: where the sums are in another order than
    float64's, the token is another, and was told; with no allowance for logits."""
    logits, *_ = rows(seed=5, n=64, size=1.0, vocab=vocab)
    w = np.exp(logits.astype(np.float64))
    cdf = np.cumsum(w, -1) / w.sum(-1, keepdims=True)
    rng = np.random.default_rng(0)
    picked = rng.integers(1, vocab - 1, 64)
    u = (cdf[np.arange(64), picked] + EPS * rng.integers(-2, 3, 64)).astype(np.float32)
    exact = (cdf <= u[:, None].astype(np.float64)).sum(-1)
    got = told(logits, u, 1.0, np.ones(64, np.float32), allowed=0.0, mode="full")
    other = got.token_S != exact
    assert other.sum() > 3 and not (other & ~got.near_S).any()


def test_greedy_ties_are_told():
    best = np.float32([[2.0, 2.0, 0.0], [2.0, 2.0 - 1e-6, 0.0], [2.0, 1.9, 0.0]])
    got = told(best, np.zeros(3, np.float32), 1.0, 1.0, allowed=1e-6, mode="greedy")
    assert got.near_S.tolist() == [True, True, False]


def test_a_cut_that_rounding_moves_is_told():
    """Shares of .4, .3, .2, .1: to .7 there are two enough, or by rounding three."""
    logits = np.log(np.float32([[0.4, 0.2, 0.3, 0.1]] * 5))
    top_p = np.float32([0.7 - 4e-7, 0.7 + 4e-7, 0.65, 0.4, 1.0])
    got = told(logits, np.full(5, 0.2, np.float32), 1.0, top_p, allowed=1e-7, mode="top_p")
    assert got.near_S.tolist() == [True, True, False, True, False]
    tied = np.float32([[3.0, 1.0, 1.0 - 1e-7, 0.0]])  # whichever is cut
    got = told(tied, np.zeros(1, np.float32), 1.0, np.float32([0.8]), allowed=1e-6, mode="top_p")
    assert got.near_S.all()


def test_what_is_allowed():
    """By hand: float32 of 2 layers of 32 numbers; bfloat16 has 2^16 times the rounding; int8's
    half a step is twice bfloat16's."""
    small = near_ties.allowance(SHAPE, "float32", False)
    assert small == pytest.approx((2 * 15 * 33) ** 0.5 * EPS)
    assert near_ties.allowance(SHAPE, "bfloat16", False) == pytest.approx(30**0.5 * 2.0**-8)
    assert near_ties.allowance(SHAPE, "float32", True) == pytest.approx(30**0.5 * 2.0**-8)
    deep = SHAPE._replace(num_layers=24, hidden_size=896, intermediate_size=4864)
    assert near_ties.allowance(deep, "float32", False) / small == pytest.approx(
        (169 / 15 * 4865 / 33) ** 0.5
    )


class Told(drafts.DraftEngine):
    """Keeps for each (request, token) whether it was a near tie."""

    def generate(self, *args, **kwargs):
        self.ties = {}
        return super().generate(*args, **kwargs)

    def _drawn(self, out, there):
        drawn = super()._drawn(out, there)
        for (row, columns, _), (_, i) in zip(drawn, there, strict=True):
            near = self._near(out, i, len(columns[0])).tolist()
            self.ties |= {(row.index, row.emitted + n): x for n, x in enumerate(near)}
        return drawn


def differing(shape, params, asked, tokens: int, dtype: str, **how):
    """(a `Told` that has drawn, its stats, where each response first differs from that of an engine
    without drafts): guesses in places of their own, the second of two calls."""
    made = functools.partial(make, shape=shape, response_tokens=tokens, dtype=dtype, **how)
    width = 4 * how.get("slots", 8)
    engine, plain = made(Told, draft_tokens=5, draft_places=width), made(Engine)
    held = engine.decode_params(params)
    engine.generate(held, asked, DRAW)
    before = engine.ties  # of one token a pass
    got, stats = engine.generate(held, asked, DRAW)
    want = plain.generate(plain.decode_params(params), asked, DRAW)[0]
    first = lambda a, b: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)  # noqa: B905
    places = {i: first(a, b) for i, (a, b) in enumerate(zip(ids(got), ids(want), strict=True))}
    differ = {i: n for i, n in places.items() if n is not None}
    near, drawn = stats.drafts.near_ties, len(engine.ties)
    print(
        f"\n{dtype} {how}: {near} of {drawn} near ties, {len(differ)} of {len(asked)} rows differ"
    )
    assert stats.drafts.passes > 10 and near == sum(engine.ties.values()) and drawn == stats.tokens
    assert all(engine.ties[place] for place in differ.items())
    same = [before.get(place) == x for place, x in engine.ties.items() if place[0] not in differ]
    assert np.mean(same) > 0.98  # whether a tie is near may hang on a rounding, too
    return near / drawn, len(differ)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_without_drafts_differs_first_at_a_near_tie(dtype):
    """In float32 there are few near ties and no difference; in bfloat16 many are."""
    asked = samples_of((1, 5, 8), count=8)
    share, differ = differing(SHAPE, random_weights(), asked, RESPONSE, dtype, page_tokens=8)
    assert (share < 0.01 and not differ) if dtype == "float32" else 0.1 < share < 0.9


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "dtype, cache", [("float32", "model"), ("float32", "int8"), ("bfloat16", "model")]
)
def test_samples_of_a_trained_model_too(dtype, cache, assets, tmp_path):
    """docs/drafts.md has what this prints: a model of 260 thousand parameters."""
    for name, stored in (
        ("config.json", "config.json"),
        ("model.safetensors", "qwen2_layout.safetensors"),
    ):
        (tmp_path / name).symlink_to(assets / "weights" / f"aidreams260K_{stored}")
    model = hf.load(tmp_path)
    firsts = [[1], [1, 319, 459], [1, 319, 459, 355, 260, 275], [1, 446, 262]]
    asked = [Request(p, i, g) for i, p in enumerate(firsts) for g in range(16)]
    how = dict(slots=16, page_tokens=16, cache_dtype=cache)
    share, differ = differing(model.shape, jax.device_get(model.params), asked, 112, dtype, **how)
    assert (share < 0.02 and not differ) if (dtype, cache) == ("float32", "model") else share > 0.3
