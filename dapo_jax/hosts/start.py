"""A start that fetches nothing twice: one reader of the base model, one compiler for all hosts; and
one that is not repeated for ever by a launcher."""

import atexit
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags
from etils import epath
from jax._src import (
    cache_key,  # what a program is called has no public name
    compilation_cache as jax_cache,  # nor has the cache that is in use
)
from jax.experimental.compilation_cache import compilation_cache

from dapo_jax import parallel
from dapo_jax.checkpoint import checkpoint, patience, workdir
from dapo_jax.config import cli
from dapo_jax.data import files
from dapo_jax.model import hf

MOST_STARTS = 20  # starts in a row without progress after which the run ends for good
_STARTS = "starts.json"  # in the workdir: what there was at the last start, and how often only that
_BASE = "base"  # in the workdir: config.json and tokenizer of a model from elsewhere
_IMPORTED = time.monotonic()


def share_programs(home: workdir.Workdir) -> None:
    """Compile each program once for all hosts: process 0 compiles it, sends it to the others, and
    keeps it in WORKDIR/xla for the next start. JAX keeps nothing that another process has compiled,
    so a cache on each host's own disk serves process 0 alone. A cache that JAX is configured with
    stays; only one in a bucket is known to be seen by all hosts."""
    several, given = jax.process_count() > 1, jax.config.jax_compilation_cache_dir
    if several and not _alike():
        return
    if not given and (several or home.remote):
        given = str((home.remote or home.local.resolve()) / workdir.PROGRAMS)
        jax.config.update("jax_compilation_cache_dir", given)
        compilation_cache.reset_cache()  # it may have looked already
    elif not (given and "://" in given):
        return
    # Without a common cache, hosts that miss what process 0 has found would wait for it.
    jax.config.update("jax_share_binary_between_hosts", several)
    _read_with_patience(given)


def _read_with_patience(where: str) -> None:
    """Try again to read a program from the cache. JAX takes one that cannot be read as one that is
    missing, and a host that misses what process 0 has found waits for it for 20 minutes."""
    client = jax.devices()[0].client
    cache = patience.read(where, lambda: jax_cache._get_cache(client))
    if cache is not None and "get" not in vars(cache):
        get = cache.get
        cache.get = lambda key: patience.read(f"{where}/{key}", lambda: get(key))


def _alike() -> bool:
    """Whether a program has the same key in all processes. The key holds a fingerprint of the
    devices, which on CPU differs between processes: there each compiles for itself. A
    collective."""
    key = hashlib.sha256()
    cache_key._hash_accelerator_config(key, np.asarray(jax.devices()))
    return len(set(parallel.meet(key.hexdigest()))) == 1


def model_directory(
    config, home: workdir.Workdir, checkpoints: str, given: str | None = None
) -> pathlib.Path | None:
    """Directory with config.json and tokenizer of `model.path`; on process 0 also with the weights,
    if a start needs them: not if there is a checkpoint to go on from, nor if `given` (default:
    `init_from`) names other weights. None: the config has a shape and no model. Files that were
    fetched are kept in WORKDIR/base, so that a start from a checkpoint fetches nothing. A
    collective."""
    if not config.model.path:
        return None
    kept = home.local / _BASE

    def look() -> str:
        elsewhere = config.init_from if given is None else given
        weights = not elsewhere and not checkpoint.numbers(checkpoints)
        if not weights and (kept / "config.json").is_file():
            return str(kept)
        found = hf.resolve(config.model.path, weights)
        if not pathlib.Path(config.model.path).expanduser().is_dir():
            kept.mkdir(exist_ok=True)
            for file in _small(found):
                shutil.copyfile(file, kept / file.name)
        return str(found)

    return _of_main_process(look)


def resolve(name: str) -> pathlib.Path:
    """`hf.resolve` on process 0 alone, from its disk, a bucket or the hub; the others receive the
    small files from it. A collective."""
    return _of_main_process(lambda: str(hf.resolve(name)))


def _of_main_process(look: Callable[[], str]) -> pathlib.Path:
    found = pathlib.Path(parallel.of_main_process(look))
    return found if jax.process_count() == 1 else _sent(found)


def _small(folder: pathlib.Path) -> list[pathlib.Path]:
    """All but the weights."""
    files = (p for p in sorted(folder.iterdir()) if p.is_file())
    return [p for p in files if p.suffix != ".safetensors"]


def _sent(folder: pathlib.Path) -> pathlib.Path:
    """`folder` on process 0; on the others a copy of its small files. A collective."""
    first = parallel.is_main_process()
    listed = parallel.of_main_process(lambda: [[p.name, p.stat().st_size] for p in _small(folder)])
    data = np.zeros(sum(size for _, size in listed), np.uint8)
    if first:
        data[:] = np.frombuffer(b"".join(p.read_bytes() for p in _small(folder)), np.uint8)
    parallel.broadcast(data)
    if first:
        return folder
    here, end = pathlib.Path(tempfile.mkdtemp(prefix="dapo_jax-")), 0
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    for name, size in listed:
        (here / name).write_bytes(data[end : end + size].tobytes())
        end += size
    return here


def count(home: workdir.Workdir, checkpoints: str) -> None:
    """Count this start, if a launcher starts again whatever leaves with --terminated_status.
    ValueError: MOST_STARTS in a row have left no new checkpoint and no new record in the journal. A
    collective."""
    if not (flags.FLAGS.is_parsed() and cli.TERMINATED_STATUS.value):
        return
    top, note = epath.Path(home.remote or home.local), home.local / _STARTS

    def listed() -> list:
        folder = top / workdir.JOURNAL
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted([path.name, path.stat().length] for path in found)

    def counted() -> int:
        there = [checkpoint.numbers(checkpoints), patience.read(f"{top}", listed)]
        starts = 1
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
            before = json.loads(note.read_text())
            starts += before["starts"] if before["there"] == there else 0
        with contextlib.suppress(OSError):  # a start that cannot be written down does not count
            files.write_json(note, {"starts": starts, "there": there})
            workdir.send(home)
        return starts

    if parallel.of_main_process(counted) > MOST_STARTS:
        raise ValueError(
            f"--workdir={home.name}: {MOST_STARTS} starts in a row have left no checkpoint and no"
            " finished response: what ends them does not pass by itself; see what they printed, and"
            f" remove {top / _STARTS} to have it tried again"
        )


def seconds() -> float:
    """Seconds since this process began; if the system does not tell, since its imports."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # s since the machine's start
        return float(pathlib.Path("/proc/uptime").read_text().split()[0]) - began
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED


class FirstToken:
    """Measures the seconds from the start of this process to its first chunk of tokens."""

    def __init__(self):
        self._log: dict[str, float] | None = None

    def phase(self, name: str) -> None:
        """As `train.Hooks.phase`."""
        if name == "chunk" and self._log is None:
            self._log = {"time/first_token_s": seconds()}

    def told(self) -> dict[str, float]:
        """The metric for the record of the step or evaluation in which it came; once."""
        log, self._log = self._log or {}, {}
        return log
