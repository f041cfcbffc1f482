"""The device mesh, and the one table that maps logical axes to it.

Weights and activations name LOGICAL axes ("embed", "heads", "batch"); a rules table of the config
(`sharding.train`, `sharding.decode`) says which mesh axes (`data`, `fsdp`, `tensor`) each one is
split over. Nothing else in the project knows the mesh, so another strategy is another table.
"""

import contextlib
import contextvars
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

Rules = Mapping[str, str]  # logical axis -> comma-separated mesh axes, '' = replicated
_scope: contextvars.ContextVar = contextvars.ContextVar("mesh_and_rules", default=None)


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Mesh over all devices. Split physical axes let the torus take shapes it would refuse."""
    shape = tuple(sizes[a] for a in AXES)
    if jax.devices()[0].platform == "cpu":
        return Mesh(np.asarray(jax.devices()).reshape(shape), AXES)
    devices = mesh_utils.create_device_mesh(shape, allow_split_physical_axes=True)
    return Mesh(devices, AXES)


def spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry these logical axes (None = replicated)."""
    parts = []
    for axis in axes:
        names = tuple(n for n in rules[axis].split(",") if n) if axis else ()
        parts.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*parts)


def shardings(axes_tree, mesh: Mesh, rules: Rules):
    """Tree of axis tuples -> tree of NamedShardings."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, spec(axes, rules)),
        axes_tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


@contextlib.contextmanager
def use(mesh: Mesh, rules: Rules):
    """Within this scope `constrain` lays activations out by `rules`. Wrap the traced body in it."""
    token = _scope.set((mesh, rules))
    try:
        yield
    finally:
        _scope.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's layout by logical axes; outside `use` (notebooks, tests) a no-op."""
    scope = _scope.get()
    if scope is None:
        return x
    mesh, rules = scope
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, rules)))


def to_host(tree):
    """Global arrays -> NumPy on every process, the same everywhere (a gather when sharded)."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def to_device(tree, sharding):
    """NumPy values that every process holds whole -> global arrays under `sharding` (one
    sharding for all leaves, or a tree of them). Each process moves only its own shards."""
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)

    def put(x, s):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, s, lambda index: x[index])

    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(put, tree, sharding)


def gather_json(value: Any) -> list:
    """The JSON value of each process, in the order of the processes, on all of them. A collective:
    every process has to call it. For counts, verdicts and names, not for arrays."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    room = 1 << max(10, int(sizes.max() - 1).bit_length())  # few lengths, so few programs
    rows = multihost_utils.process_allgather(np.pad(data, (0, room - data.size)))
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def any_process(flag: bool) -> bool:
    """Whether `flag` holds on any process; the same answer on all. A collective."""
    return any(gather_json(bool(flag)))
