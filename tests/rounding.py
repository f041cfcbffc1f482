"""How far float32 may lie from float64 on any CPU: bounds that no machine has to be asked for.

A CPU chooses the order of a sum, the width of its vectors and whether products are rounded before
they are added. So each operation of a float64 reference is made to err as much as float32 may, in
directions of no order, and the result's distance from the exact one is the unit of the bound.
"""

import functools
import math

import jax
import numpy as np
from jax.extend.core import Literal

EPS = 2.0**-24  # the most that rounding to float32 changes a number, of its size
# Draws show how far right results spread; what lies four times as far out as any of them is wrong.
DRAWS, FACTOR = 8, 4.0
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call")
_ONCE = ("add", "sub", "mul", "div", "add_any", "sqrt", "square", "integer_pow")
_FEW = ("exp", "log", "log1p", "logistic", "tanh", "rsqrt", "pow", "sin", "cos")  # 2 ulp at most
_SUMS = ("dot_general", "reduce_sum", "scatter-add")


def _error(eqn, inputs, out):
    """The most that float32 changes each number of `out` by, in units of EPS.

    A sum of n terms rounds n partial sums, one after the other at worst. Those of mixed signs grow
    by chance, and their roundings make half the sum of absolute terms; those of one sign grow
    steadily, and make a third of sqrt(n) times the sum.
    """
    name = eqn.primitive.name
    if name in _SUMS:
        if name == "scatter-add":
            terms = inputs[1].shape[:-1]  # if all indices are one
        else:
            dims = eqn.params["axes" if name == "reduce_sum" else "dimension_numbers"]
            axes = dims if name == "reduce_sum" else dims[0][0]
            terms = [inputs[0].shape[i] for i in axes]
        absolute = [np.abs(x) if np.issubdtype(x.dtype, np.inexact) else x for x in inputs]
        return np.hypot(_bind(eqn, absolute)[0] / 2, math.prod(terms) ** 0.5 / 3 * np.abs(out))
    size = np.maximum(np.abs(out), 1.0) if name in ("sin", "cos") else np.abs(out)
    return (4.0 if name in _FEW else 1.0) * size


def _bind(eqn, inputs):
    out = eqn.primitive.bind(*inputs, **eqn.params)
    return [*map(np.asarray, out if eqn.primitive.multiple_results else [out])]


def _run(jaxpr, consts, inputs, eps, phase, count):
    """The program, each of whose operations errs by `eps` times `_error` and a direction."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    read = lambda v: np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else known[v]
    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, [*map(read, eqn.invars)]
        if name in _CALLS:
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            out = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given,
                       eps, phase, count)  # fmt: skip
        else:
            out = _bind(eqn, given)
            inexact = np.issubdtype(out[0].dtype, np.inexact)
            if inexact and name in (*_ONCE, *_FEW, *_SUMS):
                place = count[0] + np.arange(out[0].size, dtype=np.float64)
                count[0] += out[0].size
                # Squares: of the numbers themselves the cosines of a sum would cancel.
                direction = np.cos(phase * place**2).reshape(out[0].shape)
                error = _error(eqn, given, out[0])
                error = np.where(np.isfinite(error), error, 0)  # what is masked is exact
                out = [out[0] + eps * direction * error]
        known |= zip(eqn.outvars, out, strict=True)
    return [*map(read, jaxpr.outvars)]


def reference(f, *args):
    """(value, bound) of `f(*args)`, trees alike: what it is in float64, and how far from it at most
    any entry of an array may be in float32. f: of jax.numpy, without loops. One operation after the
    other: those of all references share their programs, and one of them all compiles for long."""
    phases = [(EPS, x) for x in np.random.default_rng(0).uniform(1, 10, DRAWS)]
    to_wide = lambda x: np.float64(x) if np.issubdtype(np.asarray(x).dtype, np.floating) else x
    with jax.enable_x64(True), np.errstate(all="ignore"):
        wide = jax.tree.map(to_wide, args)
        program, shape = jax.make_jaxpr(f, return_shape=True)(*wide)
        run = functools.partial(_run, program.jaxpr, program.consts, jax.tree.leaves(wide))
        value, *others = [run(*how, [1.0]) for how in [(0.0, 0.0), *phases]]
    far = [FACTOR * max(np.abs(x - v).max() for x in xs) for v, *xs in zip(value, *others)]  # noqa: B905
    return tuple(jax.tree.unflatten(jax.tree.structure(shape), x) for x in (value, far))


def assert_near(got, expected):
    """got: what float32 gives; expected: of `reference`. Such a bound has to tell something: it is
    below a thousandth of an array's largest entry."""
    told = zip(jax.tree.leaves_with_path(got), *map(jax.tree.leaves, expected), strict=True)
    for (path, x), want, far in told:
        name, gap = jax.tree_util.keystr(path), np.abs(np.asarray(x, np.float64) - want).max()
        assert gap <= far <= max(1e-3 * np.abs(want).max(), EPS), f"{name}: {gap} <= {far}"


def assert_as_near(got, other, truth):
    """`got` is as near to the float64 `truth` as another float32 result is: sums by one lane of a
    vector err at most 4 times as much, sqrt(16), as those by 16."""
    ours, theirs = (np.abs(np.asarray(x, np.float64) - truth).max() for x in (got, other))
    assert ours <= 4 * theirs <= 1e-3 * np.abs(truth).max(), (ours, theirs)
