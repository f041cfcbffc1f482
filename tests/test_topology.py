"""Work and memory of compiled programs; pods that are only described."""

import functools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from levels import needs_libtpu

from dapo_jax.parallel import AXES
from dapo_jax.pods import topology

A, B = np.ones((3, 4, 5), np.float32), np.ones((3, 5, 6), np.float32)
ONE = 2 * 3 * 4 * 5 * 6  # of A @ B
MESH = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), AXES)
X, W = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)

dot = lambda a, b: (a @ b).sum()
scanned = lambda a, b: jax.lax.scan(lambda c, _: (c + dot(a, b), None), 0.0, length=7)[0]
looped = lambda a, b, n: jax.lax.fori_loop(0, n, lambda _, c: c + scanned(a, b), 0.0)
branch = lambda a, b, yes: jax.lax.cond(yes, lambda: dot(a, b), lambda: dot(a[:1], b[:1]))
loss = lambda w, a: jax.checkpoint(lambda w: jnp.sin(jnp.sin(a[0] @ w) @ jnp.ones((6, 6))).sum())(w)
how = dict(in_specs=P(), out_specs=P(), check_vma=False)  # by both devices, each with all of it
copied = jax.shard_map(jnp.matmul, mesh=MESH, **how)
LAYERS = 2 * 4 * 5 * 6, 2 * 4 * 6 * 6


def kernel(a, n, out):
    step = lambda _, c: c + a[...] @ a[...]
    out[...] = jax.lax.fori_loop(0, n[0, 0], step, jnp.zeros((8, 8)))


def kernels(a, n, cost=None):
    out = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    call = pl.pallas_call(kernel, out, interpret=True, cost_estimate=cost)
    return jax.lax.fori_loop(0, n[0, 0], lambda _, x: call(x, n), a)


estimated = functools.partial(kernels, cost=pl.CostEstimate(5000, 0, 0))
SQUARE, N = np.ones((8, 8), np.float32), np.ones((1, 1), np.int32)


@pytest.mark.parametrize(
    ("f", "arguments", "trips", "count"),
    [
        (lambda a, b: jnp.einsum("xij,xjk->xik", a, b).sum(), (A, B), 1, ONE),
        (looped, (A, B, 3), 5, 35 * ONE),  # the trip count is traced
        (branch, (A, B, True), 1, ONE),  # the dearest
        # Both products forward, both again (sin needs its argument), and both back.
        (jax.grad(loss), (B[0], A), 1, 3 * sum(LAYERS)),
        (copied, (X, W), 1, 2 * (2 * 4 * 8 * 6)),
        (kernels, (SQUARE, N), 1, 2 * 8**3),
        (estimated, (SQUARE, N), 3, 15000),  # the loop around the kernel
    ],
    ids=("einsum", "loops", "branch", "remat", "both devices", "kernel", "estimated"),
)
def test_flops(f, arguments, trips, count):
    assert topology.matmul_flops(jax.make_jaxpr(f)(*arguments).jaxpr, trips) == count


def test_splash_computes_no_block_above_the_diagonal():
    assert topology._blocks("splash_mha_fwd", (5, 2, 4)) == 5 * (2 + 4)
    assert topology._blocks("splash_mha_dkv", (4, 5, 2)) == 5 * (2 + 4)


def test_memory_of_a_program():
    step = lambda state, x: (state + x.sum(), x * 2)
    state, x = jnp.zeros(1000), jnp.ones(300)
    m = topology.memory(jax.jit(step, donate_argnums=0).lower(state, x).compile())
    assert m.arguments == 4 * 1300 and m.aliased == 4000
    assert m.outputs >= 4 * 1300 and m.peak >= 4 * 1300
    assert m.live == m.arguments + m.outputs - m.aliased + m.temporaries


def test_memory_line():
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.zeros(500_000)).compile()
    line = topology.memory_line({"decode": compiled, "update": compiled})
    assert line == "memory of a device, at most: decode 2 MB, update 2 MB"
    sizes = [topology.size(n) for n in (12, 9_610_000_000, 95_730_000, 1_000)]
    assert sizes == ["12 B", "9.61 GB", "95.7 MB", "1 kB"]


def test_the_log_of_a_compilation(capfd):
    noisy = types.SimpleNamespace(compile=lambda: os.write(2, b"a warning of XLA\n"))
    assert topology.compile_watched(noisy) == (17, "a warning of XLA\n")
    assert capfd.readouterr().err == ""


@needs_libtpu
def test_pods():
    mesh = topology.laid(topology.devices("v5p:4x4x8"), dict(data=1, fsdp=16, tensor=8))
    assert mesh.shape == dict(data=1, fsdp=16, tensor=8)
    assert len(topology.devices("v4:4x4x4")) == 64  # chips, not cores
    assert len(topology.devices("v6e:1x1")) == 1
    with pytest.raises(ValueError, match="devices 128 must equal the product"):
        topology.laid(topology.devices("v5p:4x4x8"), dict(data=1, fsdp=8, tensor=8))
    with pytest.raises(ValueError, match="'v5p-256': libtpu knows no such pod"):
        topology.devices("v5p-256")


@needs_libtpu
def test_slices_are_joined_along_data():
    mesh = topology.laid(topology.devices("v5p:2x2x1", slices=2), dict(data=4, fsdp=1, tensor=2))
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert slices.tolist() == [[[n, n]] for n in (0, 0, 1, 1)]
    with pytest.raises(ValueError, match=r"mesh.data = 1: must be a multiple of 2"):
        topology.laid(topology.devices("v5p:2x2x1", slices=2), dict(data=1, fsdp=4, tensor=2))


@needs_libtpu
def test_warnings_of_the_sharding_pass_are_seen():
    """Six columns of fifteen cannot be cut out of rows that lie over eight devices."""
    mesh = topology.laid(topology.devices("v5e:2x4"), dict(data=1, fsdp=4, tensor=2))
    lay = lambda x, *axes: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    def f(x):
        rows = lay(jnp.sin(x), ("fsdp", "tensor"), None)
        return lay(rows.reshape(32, 6, 5), None, "tensor")

    x = jax.ShapeDtypeStruct((64, 15), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert "Involuntary full rematerialization" in topology.compile_watched(jax.jit(f).lower(x))[1]
