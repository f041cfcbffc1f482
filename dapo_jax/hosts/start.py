"""A start reads the base model once and compiles once for all hosts; a launcher's starts without
progress come to an end."""

import atexit
import contextlib
import hashlib
import io
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
from jax._src import (
    cache_key,  # what a program is called has no public name
    compilation_cache as jax_cache,  # nor has the cache that is in use
)
from jax.experimental.compilation_cache import compilation_cache

from dapo_jax import parallel
from dapo_jax.checkpoint import checkpoint, journal, retry, workdir
from dapo_jax.config import cli
from dapo_jax.data import files
from dapo_jax.model import hf

MOST_STARTS = 20  # starts in a row without progress after which the run ends for good
_IMPORTED = time.monotonic()


def share_programs(home: workdir.Workdir) -> None:
    """Compile each program once for all hosts: process 0 compiles it, sends it to the others, and
    keeps it in WORKDIR/xla for the next start. A cache that JAX is configured with stays; it is
    shared only if it is in a bucket, which all hosts see."""
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
    _retry_reads(given)


def _retry_reads(where: str) -> None:
    """Retry reads of a program from the cache. JAX takes a failed read for a missing program, and a
    host that misses what process 0 has found waits for it for 20 minutes."""
    client = jax.devices()[0].client
    cache = retry.read(where, lambda: jax_cache._get_cache(client))
    if cache is not None and "get" not in vars(cache):
        get = cache.get
        cache.get = lambda key: retry.read(f"{where}/{key}", lambda: get(key))


def _alike() -> bool:
    """Whether a program has the same key in all processes. On CPU its fingerprint of the devices
    differs, and each process compiles for itself. A collective."""
    key = hashlib.sha256()
    cache_key._hash_accelerator_config(key, np.asarray(jax.devices()))
    return len(set(parallel.meet(key.hexdigest()))) == 1


def model_directory(
    config, home: workdir.Workdir, checkpoints: str, given: str | None = None
) -> pathlib.Path | None:
    """Directory with config.json and tokenizer of `model.path`; on process 0 also with the weights,
    unless there is a checkpoint to go on from or `given` (default: `init_from`) names other ones.
    None: the config has a shape and no model. Small files are kept in WORKDIR/base with the model's
    name, so that a start from a checkpoint fetches nothing. A collective."""
    if not config.model.path:
        return None
    kept, named = home.local / "base", home.local / "base" / "model_path"

    def look() -> str:
        elsewhere = config.init_from if given is None else given
        weights = not elsewhere and not checkpoint.numbers(checkpoints)
        same = named.is_file() and named.read_text() == config.model.path
        if same and not weights:
            return str(kept)
        found = hf.resolve(config.model.path, weights)
        if not os.path.isdir(os.path.expanduser(config.model.path)):
            kept.mkdir(exist_ok=True)
            named.unlink(missing_ok=True)  # until all are there
            for file in _small(found):
                shutil.copyfile(file, kept / file.name)
            named.write_text(config.model.path)
        return str(found)

    return _folder_of_main_process(look)


def resolve(name: str) -> pathlib.Path:
    """`hf.resolve` on process 0 alone; the others receive the small files. A collective."""
    return _folder_of_main_process(lambda: str(hf.resolve(name)))


def _small(folder: pathlib.Path) -> list[pathlib.Path]:
    """All files but the weights."""
    return [p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix != ".safetensors"]


def _folder_of_main_process(look: Callable[[], str]) -> pathlib.Path:
    """The folder that `look` finds on process 0; on the others a copy of its small files."""
    folder, first = pathlib.Path(parallel.of_main_process(look)), parallel.is_main_process()
    if jax.process_count() == 1:
        return folder
    sizes = parallel.of_main_process(lambda: {p.name: p.stat().st_size for p in _small(folder)})
    whole = b"".join(p.read_bytes() for p in _small(folder)) if first else b""
    data = io.BytesIO(journal.of_main_process(whole))
    if first:
        return folder
    here = pathlib.Path(tempfile.mkdtemp(prefix="dapo_jax-"))
    atexit.register(shutil.rmtree, here, ignore_errors=True)
    for name, size in sizes.items():
        (here / name).write_bytes(data.read(size))
    return here


def count(home: workdir.Workdir, checkpoints: str) -> None:
    """Count this start, if --terminated_status shows that a launcher starts runs again. ValueError:
    MOST_STARTS in a row have left no checkpoint and no record in the journal. A collective."""
    if not (flags.FLAGS.is_parsed() and cli.TERMINATED_STATUS.value):
        return
    note, folder = home.local / "starts.json", home.top / workdir.JOURNAL

    def records() -> list:
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted([path.name, path.stat().length] for path in found)

    def counted() -> int:
        there, starts = [checkpoint.numbers(checkpoints), retry.read(f"{folder}", records)], 1
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
            before = json.loads(note.read_text())
            starts += before["starts"] if before["there"] == there else 0
        with contextlib.suppress(OSError):  # a start that cannot be written down does not count
            files.write_json(note, {"starts": starts, "there": there})
            workdir.send(home)
        return starts

    if parallel.of_main_process(counted) > MOST_STARTS:
        why = f"{MOST_STARTS} starts in a row have left no checkpoint and no finished response"
        remedy = f"see what they printed, and remove {home.top / note.name} to have it tried again"
        raise ValueError(f"--workdir={home.name}: {why}; {remedy}")


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

    _log: dict[str, float] | None = None

    def phase(self, name: str) -> None:
        if name == "chunk" and self._log is None:
            self._log = {"time/first_token_s": seconds()}

    def told(self) -> dict[str, float]:
        """The metric for the record of the step or evaluation in which it came; once."""
        log, self._log = self._log or {}, {}
        return log
