"""The last rows of a call move from the shard with the most keys to the one with the fewest.

All shards wait for the one whose rows have the most keys to read. When nothing waits any more rows
end here and there, and no new ones even that out. Between two chunks rows therefore change places:
their pages are copied bit for bit over the links between devices, and no draw depends on a slot, so
samples stay the same.

Dims: M page copies of one call.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dapo_jax import parallel
from dapo_jax.model import paged
from dapo_jax.parallel import Call
from dapo_jax.rollout.schedule import Row, Schedule

_MOST = 512  # page copies of one call
# Tokens of relief for the fullest shard that moving one token must bring: a v5p's links send its
# bytes in a fifth of the time in which HBM reads them for a chunk of 128.
_PRICE = 0.25
_LEAST = 1 / 64  # of the fullest shard's keys, for rows to move at all


def moves(schedule: Schedule) -> list[tuple[int, int]]:
    """Give rows new places, one exchange a shard at most; returns the copies (source page, target
    page) that this takes before the next chunk, pages counted through all shards. No target is the
    source of another. A row goes alone where the emptier shard has fewer rows, and otherwise for
    another that comes back."""
    shards, P, N = range(schedule.shards), schedule.page_tokens, schedule.shard_pages[0].count
    if len(shards) == 1 or schedule.fixed or schedule.waiting:
        return []
    rows: list[list[Row]] = [[] for _ in shards]  # that may still move
    for row in filter(None, schedule.rows):
        rows[schedule.shard(row.slot)].append(row)
    load, count = [sum(row.position for row in mine) for mine in rows], [*map(len, rows)]
    pages, copies, left = schedule.shard_pages, [], []
    for _ in shards:
        high, low = max(shards, key=load.__getitem__), min(shards, key=load.__getitem__)
        alone = count[low] < count[high]
        gain, goes, comes = _exchange(rows[high], rows[low], load[high] - load[low], alone)
        if gain <= _LEAST * load[high]:
            break
        ways = [(goes, high, low)] + [(comes, low, high)] * (comes is not None)
        # One page in hand for every row, as `Schedule.admit` leaves.
        if any(pages[k].free < len(row.pages) + count[k] + 1 for row, _, k in ways):
            break
        slots = [row.slot for row, _, _ in ways[::-1]]
        if comes is None:
            slots = [schedule.rows.index(None, low * schedule.slots // schedule.shards)]
        for row, here, _ in ways:
            rows[here] = [x for x in rows[here] if x is not row]
            schedule.rows[row.slot] = None
        for (row, here, there), slot in zip(ways, slots, strict=True):
            left.append((here, row.pages))
            old, row.pages = row.pages, pages[there].take(len(row.pages))
            filled = zip(old[: -(-row.position // P)], row.pages, strict=False)
            copies += [(here * N + a, there * N + b) for a, b in filled]
            schedule.rows[slot], row.slot, row.tabled = row, slot, 0
            for k, sign in ((here, -1), (there, 1)):
                load[k] += sign * row.position
                count[k] += sign
    for k, given_up in left:  # not before all have their new ones
        pages[k].release(given_up)
    return copies


def _exchange(full: list[Row], empty: list[Row], gap: int, alone: bool):
    """(tokens gained, row of the fuller shard, row of the emptier or None) of the best exchange.
    gap: keys that the fuller has more. alone: whether a row may go for none."""
    others = [*empty, *[None] * alone]
    if not (full and others):
        return -math.inf, None, None
    goes_Nx1 = np.array([[row.position] for row in full])
    comes_K = np.array([row.position if row else 0 for row in others])
    evened_NxK = goes_Nx1 - comes_K
    gain_NxK = np.minimum(evened_NxK, gap - evened_NxK) - _PRICE * (goes_Nx1 + comes_K)
    i, j = np.unravel_index(gain_NxK.argmax(), gain_NxK.shape)
    return float(gain_NxK[i, j]), full[i], others[j]


def mover(g: paged.Geometry, mesh: Mesh, rules: parallel.Rules) -> Callable | None:
    """A `copier`, or None: where a page is a whole row nothing moves, nor between slices, whose
    network is slow."""
    slices = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    fixed = g.shards == 1 or g.reader == "rows" or len(slices) > 1
    return None if fixed else copier(g, mesh, (*rules.items(),))


def calls(copy: Callable | None, mesh: Mesh, pool) -> dict[str, Call]:
    """A `mover` by its name, with abstract arguments: to compile ahead. pool: its shapes."""
    number = lambda *size: jax.ShapeDtypeStruct(size, np.int32)
    given = parallel.for_program((number(_MOST, 2), number()), parallel.replicated(mesh))
    return {"pages to other shards": Call(copy, (pool, *given))} if copy else {}


def even(copy: Callable | None, mesh: Mesh, pool, schedule: Schedule):
    """The pool after `moves`, by a `mover`; without one nothing moves."""
    copies = moves(schedule) if copy else ()
    for i in range(0, len(copies), _MOST):
        pages_Mx2 = np.zeros((_MOST, 2), np.int32)
        pages_Mx2[: len(copies) - i] = copies[i : i + _MOST]
        given = pages_Mx2, np.int32(min(len(copies) - i, _MOST))
        pool = copy(pool, *parallel.to_program(given, parallel.replicated(mesh)))
    return pool


@functools.lru_cache(maxsize=8)
def copier(g: paged.Geometry, mesh: Mesh, rules: tuple) -> Callable:
    """The program (pool, pages int32 [M, 2], how many of them count) -> pool, in its place: pages
    of any shard into those of any other, in every layer. rules: the items of `parallel.Rules`."""
    rules, pools = dict(rules), (g.pages_axes,) * g.arrays

    def local(pool, pages_Mx2, n):
        over, N = parallel.mesh_axes("batch"), g.pages
        here = jax.lax.axis_index(over)

        def copy(x, source, target):
            spot = lambda page: jnp.clip(page - here * N, 0, N - 1)
            cut = lambda page: jax.lax.dynamic_slice_in_dim(x, spot(page), 1, x.ndim - 3)
            # As integers: a sum of numbers with 0 would turn -0 into 0.
            bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
            page = jax.lax.bitcast_convert_type(cut(source), bits)
            moved = jax.lax.psum(jnp.where(source // N == here, page, jnp.zeros((), bits)), over)
            moved = jax.lax.bitcast_convert_type(moved, x.dtype)
            new = jnp.where(target // N == here, moved, cut(target))
            return jax.lax.dynamic_update_slice_in_dim(x, new, spot(target), x.ndim - 3)

        step = lambda i, pool: jax.tree.map(lambda x: copy(x, *pages_Mx2[i]), pool)
        return jax.lax.fori_loop(0, n, step, pool)

    def copy_between(*given):
        with parallel.mesh_scope(mesh, rules):
            return parallel.per_shard(local, (pools, (), ()), pools)(*given)

    out = paged.pool_sharding(g, mesh, rules)
    return jax.jit(copy_between, donate_argnums=0, out_shardings=out)
