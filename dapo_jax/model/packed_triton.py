"""Flash attention over packed rows for NVIDIA GPUs: Pallas kernels by Triton, forward and backward.

What `attention.packed` gives, without a bias of rows x keys as cuDNN wants it: a block of queries
goes through the blocks of keys from the start of its first query's sequence to the diagonal, so
that a row of short sequences takes hardly more than the sequences alone. Sums have one order: the
same bits every time. Each sequence lies in one piece, padding behind all of them.

Dims: B rows, T tokens, H query heads, K key/value heads, G query heads a key/value head, d
head_dim, I blocks of queries, J blocks of keys.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dapo_jax import parallel

_MASKED = -1e30  # finite: exp2 of a difference to it is 0 and not NaN

_OWN, _MOST = 64, 128  # tokens of a program, and of any block: rows are padded to whole ones


def _step(head_dim: int) -> int:
    """Tokens that a program goes through at a time: as many as leave it four warps' registers."""
    return _MOST if head_dim <= 64 else 64


def attend(q_BxHxTxd, k_BxKxTxd, v_BxKxTxd, segments_BxT, saved: str) -> jax.Array:
    """[B, H, T, d] on each device's rows and heads. saved: the name under which remat may keep what
    the backward pass needs. Off GPUs it is interpreted, for tests."""
    heads, kv_heads = (("batch", n, None, None) for n in ("heads", "kv_heads"))
    one = functools.partial(_padded, saved)
    split = parallel.per_shard(one, (heads, kv_heads, kv_heads, ("batch", None)), heads)
    return split(q_BxHxTxd, k_BxKxTxd, v_BxKxTxd, segments_BxT)


def _padded(saved, *given):
    """Kernels read and write [B, T, heads, d], as the products before and after them do."""
    *heads, segments_BxT = given
    T = segments_BxT.shape[1]
    pad = (0, 0), (0, -T % _MOST)
    q, k, v = (jnp.pad(x.swapaxes(1, 2), (*pad, (0, 0), (0, 0))) for x in heads)
    return _attend(saved, q, k, v, jnp.pad(segments_BxT, pad))[:, :T].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(saved, q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT):
    return _forward(saved, q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT)[0]


def _spans(segments_BxT, step: int) -> tuple[jax.Array, jax.Array]:
    """Steps of keys that each block of queries sees, int32 [B, 4, I], and of queries that see each
    block of keys, [B, 4, J]: the first, the first that needs no mask (all is of one sequence, and
    below the diagonal), the first after it that does, and the end."""
    T = segments_BxT.shape[1]
    index_T = jnp.arange(T, dtype=jnp.int32)
    new_BxT = jnp.pad(segments_BxT[:, 1:] != segments_BxT[:, :-1], ((0, 0), (1, 1)))
    start_BxT = jax.lax.cummax(jnp.where(new_BxT[:, :-1], index_T, 0), axis=1)
    last_BxT = jnp.where(new_BxT[:, 1:], index_T, T - 1)
    end_BxT = jax.lax.cummin(last_BxT, axis=1, reverse=True)
    start_BxI, end_BxI = start_BxT[:, ::_OWN], end_BxT[:, _OWN - 1 :: _OWN]
    one_BxI = start_BxI == start_BxT[:, _OWN - 1 :: _OWN]  # all of one sequence
    own_I = index_T[::_OWN]
    before_I, after_I = own_I // step, -(-(own_I + _OWN) // step)
    from_BxI = jnp.where(one_BxI, jnp.minimum(-(-start_BxI // step), before_I), before_I)
    to_BxI = jnp.where(one_BxI, jnp.maximum((end_BxI + 1) // step, after_I), after_I)
    four = lambda *of: jnp.stack([jnp.broadcast_to(x, one_BxI.shape) for x in of], 1)
    of_queries = four(start_BxI // step, from_BxI, before_I, after_I)
    return of_queries, four(before_I, after_I, to_BxI, end_BxI // step + 1)


def _call(kernel, name: str, q, k, by_keys: bool, given, outs, products: int):
    """Run `kernel` for each block of queries and head, or (by_keys) of keys and key/value head.
    given, outs: (array or shape, what a program sees of it: 'row' or 'block' of [B, T, heads, d] or
    [B, heads, T], 'tokens' or 'spans' of a row). products: how many a query and a key take."""
    from jax.experimental import pallas as pl  # here: see paged_kernel.py
    from jax.experimental.pallas import triton

    (B, T, H, d), K = q.shape, k.shape[2]
    heads, G = (K if by_keys else H), H // K

    def spec(x, sees):
        if sees == "tokens":
            return pl.BlockSpec((None, T), lambda i, h, b: (b, 0))
        if sees == "spans":
            return pl.BlockSpec((None, *x.shape[1:]), lambda i, h, b: (b, 0, 0))
        most = _OWN if sees == "block" else T
        at = (lambda i: i) if sees == "block" else (lambda i: 0)
        by_token = len(x.shape) == 4
        n = x.shape[2 if by_token else 1]
        count = None if n <= heads else n // heads  # query heads of a program's key/value head
        head = (lambda h: h // G) if n < heads else (lambda h: h)
        if by_token:
            return pl.BlockSpec((None, most, count, d), lambda i, h, b: (b, at(i), head(h), 0))
        return pl.BlockSpec((None, count, most), lambda i, h, b: (b, head(h), at(i)))

    return pl.pallas_call(
        functools.partial(kernel, b=_step(d)),
        grid=(T // _OWN, heads, B),
        in_specs=[spec(*x) for x in given],
        out_specs=[spec(*x) for x in outs],
        out_shape=[x for x, _ in outs],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=parallel.platform() != "gpu",
        name=name,
        # If each row is one sequence: `topology.matmul_flops` cannot see how far the loops go.
        cost_estimate=pl.CostEstimate(products * B * H * T * T * d, 0, 0),
    )(*(x for x, _ in given))


def _product(dtype):
    from jax.experimental.pallas import triton

    # bfloat16 products are exact; float32 ones would otherwise be TF32's.
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lambda a, b: triton.dot(a.astype(dtype), b.astype(dtype), precision=exact)


def _scores(product, q_axd, k_bxd, seen_axb):
    """Scores of a block of queries and one of keys, in base 2. seen: None = all are."""
    scores = product(q_axd, k_bxd.T) * (q_axd.shape[1] ** -0.5 * math.log2(math.e))
    return scores if seen_axb is None else jnp.where(seen_axb, scores, _MASKED)


def _seen(segments_ref, i, a: int, j, b: int):
    """[a, b]: whether query i a + n sees key j b + m."""
    of = lambda block, size: (block * size + jnp.arange(size), _at(segments_ref, block, size))
    (query_a, mine_a), (key_b, theirs_b) = of(i, a), of(j, b)
    return (query_a[:, None] >= key_b) & (mine_a[:, None] == theirs_b)


def _through(spans_ref, block, step, carry):
    """`step(i, masked, carry)` of a block's steps, those without a mask before the others. In the
    last one of keys each query sees its own."""
    first, clear, beyond, end = (spans_ref[n, block] for n in range(4))
    carry = jax.lax.fori_loop(clear, beyond, lambda i, carry: step(i, False, carry), carry)
    before = clear - first
    at = lambda i: jnp.where(i < before, first, beyond - before) + i
    masked = lambda i, carry: step(at(i), True, carry)
    return jax.lax.fori_loop(0, before + end - beyond, masked, carry)


def _at(ref, i, size: int):
    from jax.experimental import pallas as pl

    return ref[pl.ds(i * size, size)]


def _forward_kernel(q_ref, k_ref, v_ref, segments_ref, spans_ref, y_ref, lse_ref, *, b):
    from jax.experimental import pallas as pl

    i, q, product = pl.program_id(0), q_ref[...], _product(q_ref.dtype)

    def step(j, masked, carry):
        top, total, y = carry
        seen = _seen(segments_ref, i, _OWN, j, b) if masked else None
        scores = _scores(product, q, _at(k_ref, j, b), seen)
        new_top = jnp.maximum(top, scores.max(1))
        weights, fade = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        y = y * fade[:, None] + product(weights, _at(v_ref, j, b))
        return new_top, total * fade + weights.sum(1), y

    start = jnp.full(_OWN, _MASKED), jnp.zeros(_OWN), jnp.zeros(q.shape)
    top, total, y = _through(spans_ref, i, step, start)
    y_ref[...] = (y / total[:, None]).astype(y_ref.dtype)
    lse_ref[...] = top + jnp.log2(total)


def _forward(saved, q, k, v, segments):
    spans, _ = _spans(segments, _step(q.shape[3]))
    B, T, H, _ = q.shape
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    given = (q, "block"), (k, "row"), (v, "row"), (segments, "tokens"), (spans, "spans")
    outs = (jax.ShapeDtypeStruct(q.shape, q.dtype), "block"), (lse, "block")
    y, lse = _call(_forward_kernel, "packed_forward", q, k, False, given, outs, 2)
    y, lse = checkpoint_name((y, lse), saved)
    return y, (q, k, v, segments, y, lse)


def _grad_scores(product, scores, lse, do, v, delta):
    """(weights of the softmax, the gradient of the scores in base e)."""
    weights = jnp.exp2(scores - lse[:, None])
    return weights, weights * (product(do, v.T) - delta[:, None])


def _queries_kernel(
    q_ref, k_ref, v_ref, segments_ref, spans_ref, do_ref, lse_ref, delta_ref, dq_ref, *, b
):
    from jax.experimental import pallas as pl

    i, q, product = pl.program_id(0), q_ref[...], _product(q_ref.dtype)
    do, lse, delta = do_ref[...], lse_ref[...], delta_ref[...]

    def step(j, masked, dq):
        k, v = _at(k_ref, j, b), _at(v_ref, j, b)
        scores = _scores(product, q, k, _seen(segments_ref, i, _OWN, j, b) if masked else None)
        return dq + product(_grad_scores(product, scores, lse, do, v, delta)[1], k)

    dq = _through(spans_ref, i, step, jnp.zeros(q.shape))
    dq_ref[...] = (dq * q.shape[1] ** -0.5).astype(dq_ref.dtype)


def _keys_kernel(
    q_ref, k_ref, v_ref, segments_ref, spans_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, *,
    G, b,
):  # fmt: skip
    from jax.experimental import pallas as pl

    j, k, v, product = pl.program_id(0), k_ref[...], v_ref[...], _product(k_ref.dtype)

    def of_head(g, carry):
        head = () if G == 1 else (g,)

        def step(i, masked, carry):
            (dk, dv), some = carry, pl.ds(i * b, b)
            q, do = (x[(some, *head)] for x in (q_ref, do_ref))
            lse, delta = (x[(*head, some)] for x in (lse_ref, delta_ref))
            scores = _scores(product, q, k, _seen(segments_ref, i, b, j, _OWN) if masked else None)
            weights, ds = _grad_scores(product, scores, lse, do, v, delta)
            return dk + product(ds.T, q), dv + product(weights.T, do)

        return _through(spans_ref, j, step, carry)

    zeros = jnp.zeros(k.shape)
    dk, dv = jax.lax.fori_loop(0, G, of_head, (zeros, zeros))
    dk_ref[...] = (dk * k.shape[1] ** -0.5).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _backward(saved, kept, do):
    q, k, v, segments, y, lse = kept
    of_queries, of_keys = _spans(segments, _step(q.shape[3]))
    delta = (do.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    like = lambda x: (jax.ShapeDtypeStruct(x.shape, x.dtype), "block")
    rows = (segments, "tokens")
    given = (q, "block"), (k, "row"), (v, "row"), rows, (of_queries, "spans")
    given += (do, "block"), (lse, "block"), (delta, "block")
    (dq,) = _call(_queries_kernel, "packed_queries", q, k, False, given, [like(q)], 3)
    given = (q, "row"), (k, "block"), (v, "block"), rows, (of_keys, "spans")
    given += (do, "row"), (lse, "row"), (delta, "row")
    kernel = functools.partial(_keys_kernel, G=q.shape[2] // k.shape[2])
    dk, dv = _call(kernel, "packed_keys", q, k, True, given, [like(k), like(v)], 4)
    return dq, dk, dv, None


_attend.defvjp(_forward, _backward)
