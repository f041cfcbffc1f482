"""The device mesh, and the one table that maps logical axes to it.

Weights and activations name LOGICAL axes ("embed", "heads", "batch"); a table of the config
(`sharding.train`, `sharding.decode`) splits each over mesh axes (`data`, `fsdp`, `tensor`).
"""

import contextlib
import contextvars
import hashlib
import itertools
import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed  # the coordination service's client has no public name yet
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

Rules = Mapping[str, str]  # logical axis -> comma-separated mesh axes, '' = replicated
_scope: contextvars.ContextVar = contextvars.ContextVar("mesh_and_rules", default=None)


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Mesh over all devices."""
    return Mesh(arrange(tuple(sizes[a] for a in AXES), jax.devices()), AXES)


def arrange(shape: tuple[int, int, int], devices: list) -> np.ndarray:
    """Devices as an array of (data, fsdp, tensor). Physical axes may be split. TPU slices, between
    which the network is slow, are joined along `data`. ValueError: they do not divide it."""
    tpu, split = devices[0].platform == "tpu", dict(allow_split_physical_axes=True)
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if tpu else 1
    if shape[0] % slices:
        several = f"a multiple of {slices}, the TPU slices, which are joined along `data`"
        raise ValueError(f"config.mesh.data = {shape[0]}: must be {several}")
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, **split)
    one = (shape[0] // slices, *shape[1:])
    return mesh_utils.create_hybrid_device_mesh(one, (slices, 1, 1), devices, **split)


def spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry these logical axes (None = replicated).
    ValueError: the rules split one array over one mesh axis twice."""
    parts, used = [], []
    for axis in axes:
        names = tuple(n for n in rules[axis].split(",") if n) if axis else ()
        parts.append(names[0] if len(names) == 1 else names or None)
        used += names
    if len(used) > len(set(used)):
        told = ", ".join(f"{axis}={rules[axis]!r}" for axis in axes if axis and rules[axis])
        once = "are of one array; a mesh axis can split it only once"
        raise ValueError(f"config.sharding: {told} {once}")
    return PartitionSpec(*parts)


def _specs(axes_tree, rules: Rules):
    # A tuple of logical axes is a leaf; named tuples, and tuples of such tuples, are containers.
    is_axes = lambda x: type(x) is tuple and all(a is None or isinstance(a, str) for a in x)
    return jax.tree.map(lambda axes: spec(axes, rules), axes_tree, is_leaf=is_axes)


def shardings(axes_tree, mesh: Mesh, rules: Rules):
    """Tree of axis tuples -> tree of NamedShardings."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), _specs(axes_tree, rules))


def sharded(tree, sharding):
    """Anything with shapes and dtypes -> jax.ShapeDtypeStructs that lie as `sharding` says (one
    for all leaves, or a tree of them): arguments for `trace` and `lower`."""
    lay = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(lay, tree, jax.tree.broadcast(sharding, tree))


class Call(NamedTuple):
    """A jitted program with abstract arguments: it can be compiled ahead, or for other devices."""

    program: Callable
    arguments: tuple
    per: str = "call"  # what one turn of its loop, if it has one, stands for


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


@contextlib.contextmanager
def mesh_scope(mesh: Mesh, rules: Rules, dtype=None):
    """Within this scope `constrain` lays activations out by `rules`. Wrap the traced body in it.
    dtype: of the computation; GPUs would multiply float32 in TF32, of 10 bits, if not told."""
    exact = dtype is not None and np.dtype(dtype) == np.float32
    exact &= mesh.devices.flat[0].platform == "gpu"
    token = _scope.set((mesh, rules))
    try:
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            yield
    finally:
        _scope.reset(token)


def compiler_options(mesh: Mesh, same_bits=False) -> dict[str, Any] | None:
    """Compiler options of a large program, but for those that XLA_FLAGS names. same_bits: request
    deterministic results on GPUs, where sums at like indices otherwise add up in any order."""
    platform, flags = mesh.devices.flat[0].platform, os.environ.get("XLA_FLAGS", "")
    options, wanted = dict(_ON_CPU) if platform == "cpu" else {}, {}
    if platform == "gpu":
        n = mesh.devices.size
        options |= _ON_GPU | (_OVER_GPUS if n > 1 else {})
        options |= _OF_WHOLE_WEIGHTS if n == 1 or mesh.shape["data"] == n else {}
        wanted = {"xla_gpu_exclude_nondeterministic_ops": True} if same_bits else {}
    return {name: x for name, x in options.items() if name not in flags} | wanted or None


# LLVM's level 2 makes as quick code as XLA's 3 in less time, to the same bits. Of itself it takes
# half of AVX-512's vectors; whole ones, and two at a time without AVX-512, are 6 % quicker.
_ON_CPU = {"xla_backend_optimization_level": 2, "xla_cpu_prefer_vector_width": 512}

# Products by cuBLAS: XLA's Triton adds a pass over the logits, 8 % of an update of 0.5B on H100.
_ON_GPU = {"xla_gpu_enable_triton_gemm": False}

# No products are merged: XLA would join the adapters' with the base's and copy both weights and the
# result (unmeasured; by bytes and FLOPs 5 % of an update of 7B). Where weights are
# split, jax 0.12 would then gather them beside fewer products.
_OF_WHOLE_WEIGHTS = {"xla_gpu_dot_merger_threshold_mb": 0}

# Unmeasured. Collectives run beside products, one for all the weights of a layer, and in a loop
# over layers beside those of the layer before: otherwise, by XLA's schedule, beside none.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_OVER_GPUS = {f"xla_gpu_{kind}_combine_threshold_bytes": 1 << 29 for kind in _KINDS}
_OVER_GPUS["xla_gpu_enable_latency_hiding_scheduler"] = True
if jax.__version_info__ < (0, 12):
    _OVER_GPUS |= {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS}
else:
    _ON = "COLLECTIVE_PIPELINING_MODE_ON"
    _OVER_GPUS |= {f"xla_gpu_pipeline_{kind}": _ON for kind in _KINDS}


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's layout by logical axes; outside `mesh_scope` a no-op."""
    scope = _scope.get()
    if scope is None:
        return x
    mesh, rules = scope
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, rules)))


def check_host_memory(mesh: Mesh) -> None:
    """ValueError where arrays of this mesh cannot rest in pinned host memory."""
    device = mesh.devices.flat[0]
    if "pinned_host" not in (kinds := [m.kind for m in device.addressable_memories()]):
        only = f"no pinned host memory (only {', '.join(kinds)}); set optim.offload=False"
        raise ValueError(f"{device.device_kind} devices have {only}")


def _device():
    """The first of the mesh in scope, which may be one that is only described."""
    scope = _scope.get()
    return jax.devices()[0] if scope is None else scope[0].devices.flat[0]


def platform() -> str:
    """'cpu', 'gpu' or 'tpu', of the devices in use."""
    return _device().platform


def runs_triton() -> bool:
    """Whether XLA takes kernels by Triton for the devices in use: for NVIDIA's GPUs from Ampere
    (compute capability 8.0) on."""
    older = re.match(r"[1-7]\.", getattr(_device(), "compute_capability", ""))
    return platform() == "gpu" and not older


def axis_size(axis: str) -> int:
    """Into how many parts `mesh_scope` splits a logical axis; 1 outside it."""
    scope = _scope.get()
    return 1 if scope is None else math.prod(scope[0].shape[a] for a in mesh_axes(axis))


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes of a logical axis, for collectives inside `per_shard`."""
    scope = _scope.get()
    return () if scope is None else tuple(n for n in scope[1][axis].split(",") if n)


def per_shard(f, in_axes, out_axes):
    """`f` on every device's own part of its arguments: in_axes has a tree of axis tuples for each
    (() = a replicated number), out_axes one for what comes out. Outside a scope, `f` itself."""
    scope = _scope.get()
    if scope is None:
        return f
    mesh, rules = scope
    specs = dict(in_specs=_specs(in_axes, rules), out_specs=_specs(out_axes, rules))
    # What a Pallas kernel returns carries no types for check_vma.
    return jax.shard_map(f, mesh=mesh, **specs, check_vma=False)


def to_host(tree):
    """Global arrays -> NumPy on every process, the same everywhere (a gather when sharded)."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    whole = [x.is_fully_replicated and not x.is_fully_addressable for x in jax.tree.leaves(tree)]
    if all(whole):
        return jax.device_get(jax.tree.map(lambda x: x.addressable_data(0), tree))
    return multihost_utils.process_allgather(tree, tiled=True)


def to_device(tree, sharding):
    """NumPy values that every process holds whole -> global arrays under `sharding` (one
    sharding for all leaves, or a tree of them). Each process moves only its own shards."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    put = lambda x, s: jax.make_array_from_callback(np.shape(x), s, np.asarray(x).__getitem__)
    return jax.tree.map(put, tree, jax.tree.broadcast(sharding, tree))


def to_program(tree, sharding):
    """`to_device`, for the arguments of one call; one CPU device takes NumPy values sooner."""
    return tree if _one_cpu(sharding) else to_device(tree, sharding)


def for_program(tree, sharding):
    """`sharded` of what `to_program` will hand over."""
    return tree if _one_cpu(sharding) else sharded(tree, sharding)


def _one_cpu(sharding) -> bool:
    """sharding: one, or a tree of them over the same devices."""
    device, *others = jax.tree.leaves(sharding)[0].device_set
    return not others and device.platform == "cpu"


def gather_json(value: Any) -> list:
    """The JSON value of each process, in the order of the processes, on all of them. A collective:
    every process has to call it. For counts, verdicts and names, not for arrays."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    rows = multihost_utils.process_allgather(np.pad(data, (0, _room(sizes.max()) - data.size)))
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def _room(size: int) -> int:
    """The next power of two, for few lengths and so few programs."""
    return 1 << max(10, int(size - 1).bit_length())


_meetings = itertools.count()
_DAY_MS = 24 * 3600 * 1000  # a process that never comes is hosts.processes' to name


def meet(value: Any) -> list:
    """`gather_json` by the coordination service, for the first agreements of a start: no program
    runs, which each host would have to compile before it knows where all of them keep theirs."""
    if jax.process_count() == 1:
        return [value]
    client, folder = distributed.global_state.client, f"dapo_jax/met/{next(_meetings)}"
    client.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(value))
    everybody = range(jax.process_count())
    return [json.loads(client.blocking_key_value_get(f"{folder}/{i}", _DAY_MS)) for i in everybody]


_ERRORS = (OSError, ValueError)


def agreed(action: Callable[[], Any], errors: tuple[type[Exception], ...] = _ERRORS) -> Any:
    """`action()` of each process. Where one of `errors` comes out on any of them, all raise (of
    several kinds the one named first), and nobody goes on to wait for others. A collective."""
    if jax.process_count() == 1:
        return action()
    value, mine, told = None, None, None
    try:
        value = action()
    except errors as error:
        mine = error
        told = [next(i for i, kind in enumerate(errors) if isinstance(error, kind)), str(error)]
    if failed := [(said, process) for process, said in enumerate(gather_json(told)) if said]:
        (kind, text), process = min(failed)
        raise mine if told and told[0] == kind else errors[kind](f"process {process}: {text}")
    return value


def of_main_process(ask: Callable[[], Any], errors: tuple[type[Exception], ...] = _ERRORS) -> Any:
    """What `ask` returns (JSON) or raises on process 0, on all of them: the others do not ask, so
    that there is one opinion of what is on a disk or in a bucket. A collective."""
    return gather_json(agreed(ask if is_main_process() else lambda: None, errors))[0]


def same_everywhere(what: str, parts: Iterable[bytes]) -> None:
    """ValueError on all processes, naming those that bring other bytes. A collective."""
    if jax.process_count() == 1:
        return
    sha = hashlib.blake2b(digest_size=8)
    for part in parts:
        sha.update(part)
    rows = multihost_utils.process_allgather(np.frombuffer(sha.digest(), np.uint32))
    digests = [row.tobytes() for row in rows]
    usual = max(digests, key=digests.count)  # in a tie, that of the lowest process
    if digests.count(usual) < len(digests):
        hosts = enumerate(zip(gather_json(socket.gethostname()), digests, strict=True))
        odd = [f"process {i} ({host})" for i, (host, digest) in hosts if digest != usual]
        other = f"{', '.join(odd)} of {len(digests)} came to another result than the rest"
        cause = "a device or memory that errs (have the host replaced where it does so again)"
        again = "The same command, on all hosts, goes on from the last checkpoint"
        raise ValueError(f"{what}: {other}: {cause}, or another NumPy. {again}")


_PIECE = 1 << 26  # bytes that travel at a time: the devices hold a copy


def broadcast(x: np.ndarray) -> None:
    """Fill `x`, contiguous and of one shape, with process 0's bits. A collective."""
    flat = x.reshape(-1).view(np.uint8)
    for start in range(0, flat.size if jax.process_count() > 1 else 0, _PIECE):
        part = flat[start : start + _PIECE]
        # Of integers: a sum with the others' zeros would make +0 of -0.
        bits = np.pad(part, (0, _room(part.size) - part.size)).view(np.uint32)
        part[:] = np.asarray(multihost_utils.broadcast_one_to_all(bits)).view(np.uint8)[: part.size]


def any_process(flag: bool) -> bool:
    """Whether `flag` holds on any process; the same answer on all. A collective, and a barrier."""
    if jax.process_count() == 1:
        return bool(flag)
    return bool(multihost_utils.process_allgather(np.bool_(flag)).any())


def device_memory(mesh: Mesh) -> int:
    """Bytes that programs may use of one device of the mesh. On CPU, where the devices are
    simulated or one, a device's share of the machine's memory."""
    device = mesh.local_devices[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    pages = os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend=device.platform))


def bytes_on_device(tree) -> int:
    """What arrays, or ShapeDtypeStructs with shardings, take of the device that holds most."""
    part = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(part, jax.tree.leaves(tree)))


def is_main_process() -> bool:
    """Whether this is the process that writes files and talks."""
    return jax.process_index() == 0
