"""Two independent checks that a checkpoint is what was written.

The SEAL, a file in the step directory, lists the other files with their sizes, and the SHA-256 of
small ones. It finds files that are missing, cut or changed, cheaply for any model size. The CONTENT
is a checksum per array, computed on the devices that hold the arrays, saved with the state and
computed again after a restore. It is the same for every mesh, and finds damage inside large files.
"""

import hashlib
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dapo_jax import parallel
from dapo_jax.checkpoint import retry

SEAL = "seal.json"
HASHED = 1 << 20  # bytes; of larger files only the size is sealed, `content` covers their arrays
_SMALL = 1 << 20  # elements; NumPy sums smaller host arrays sooner than a program compiles
# Orbax finishes these two after the seal, in a thread that the commit waits for. No run reads them,
# so they are not sealed; `check` only requires that a commit has completed them.
_COMMITTED, _METADATA = "commit_success.txt", "_CHECKPOINT_METADATA"


class Damaged(ValueError):
    """A checkpoint that is not what was written; the message says how."""


def write(step_dir: epath.Path) -> None:
    """Seal the files that the directory has now."""
    (step_dir / SEAL).write_bytes(_dump({"files": _files(step_dir, HASHED)}))


def check(step_dir: epath.Path) -> None:
    """Damaged: a file is missing, extra, cut or changed since `write`. OSError: a file cannot be
    read now, which says nothing about its content."""
    try:
        raw = _bytes(step_dir / SEAL)
        seal = json.loads(raw)
        if raw != _dump(seal):
            raise ValueError
        sealed = dict(seal["files"])
        limit = max((int(size) for size, sha256 in sealed.values() if sha256), default=0)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise Damaged(f"{SEAL} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{SEAL} is not what was written") from error
    found = _files(step_dir, limit)
    for name in sorted(sealed.keys() | found.keys()):
        there, wanted = found.get(name), sealed.get(name)
        if there != wanted:
            what = "is missing" if not there else "does not belong to it" if not wanted else ""
            raise Damaged(f"{name} {what or 'is not what was written'}")
    if not _noted_by_a_commit(step_dir):
        raise Damaged(f"{_METADATA} is missing or not what a commit leaves")
    committed = step_dir / _COMMITTED
    if not committed.exists() or not _bytes(committed).endswith(step_dir.name.encode()):
        raise Damaged(f"{_COMMITTED} is missing or cut")


def _bytes(path: epath.Path) -> bytes:
    return retry.read(f"{path}", path.read_bytes)


def _dump(seal: dict) -> bytes:
    return json.dumps(seal, indent=1, sort_keys=True).encode()


def _files(step_dir: epath.Path, limit: int) -> dict[str, list]:
    """Relative name -> [bytes, SHA-256 or ''] of all files but the seal and the last two."""
    found = {}
    for path in retry.files(step_dir, (SEAL, _COMMITTED, _METADATA)):
        size = path.stat().length
        digest = hashlib.sha256(_bytes(path)).hexdigest() if size <= limit else ""
        found[path.relative_to(step_dir).as_posix()] = [size, digest]
    return found


def _noted_by_a_commit(step_dir: epath.Path) -> bool:
    """Whether Orbax's metadata is readable and has the time of the commit, which it writes last. It
    is read from a copy, since Orbax does not tell bad metadata from a bad disk."""
    if not (step_dir / _METADATA).is_file():
        return False
    with tempfile.TemporaryDirectory() as here:
        pathlib.Path(here, _METADATA).write_bytes(_bytes(step_dir / _METADATA))
        try:
            noted = ocp.metadata.get_step_metadata(here)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return False
    return type(noted.commit_timestamp_nsecs) is int


def content(arrays) -> dict[str, int]:
    """Path in the tree -> checksum of the array there, on every process."""
    return {path: number for path, (number, _) in survey(arrays).items()}


def survey(arrays) -> dict[str, tuple[int, bool]]:
    """Path in the tree -> (checksum, whether all of it is finite), on every process.

    A checksum is the sum of an array's bits as uint32, weighted by odd numbers that depend on the
    place. Any change of one element changes it; several changes escape with a chance of 2**-32.
    uint32 sums wrap, so they are exact in any order and layout."""
    found, on_devices = {}, {}
    for path, x in jax.tree.leaves_with_path(arrays):
        found[name(path)] = None  # in the order of the tree
        if _is_small_here(x):
            found[name(path)] = _weigh_here(np.asarray(x)), np.isfinite(x).all()
        elif isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
            # Offloaded moments are moved to the devices one by one.
            on_device = jax.device_put(x, x.sharding.with_memory_kind("device"))
            found[name(path)] = _survey({"": on_device})[""]
        else:
            on_devices[name(path)] = x
    found |= _survey(on_devices) if on_devices else {}
    seen = parallel.to_host(found)  # its keys are sorted
    return {path: (int(seen[path][0]), bool(seen[path][1])) for path in found}


def name(path: tuple) -> str:
    """A leaf's path in its tree, with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_small_here(x) -> bool:
    if not isinstance(x, jax.Array) or jax.process_count() > 1 or x.size > _SMALL:
        return False
    return all(device.platform == "cpu" for device in x.devices())


def _weigh_here(x: np.ndarray) -> np.uint32:
    bits = x.ravel().view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)
    return np.sum(bits * (2 * np.arange(x.size, dtype=np.uint32) + 1), dtype=np.uint32)


def _weigh(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype("uint32")
    place, stride = jnp.uint32(0), 1
    for axis in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota("uint32", x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return jnp.sum(bits * (2 * place + 1), dtype="uint32")


@jax.jit
def _survey(arrays: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    return {name: (_weigh(x), jnp.isfinite(x).all()) for name, x in arrays.items()}


def digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of named host arrays: names, types, shapes and bytes."""
    h = hashlib.sha256()
    for name, x in sorted(arrays.items()):
        h.update(f"{name} {x.dtype} {x.shape}\n".encode() + np.ascontiguousarray(x).tobytes())
    return h.hexdigest()
