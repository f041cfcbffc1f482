"""Finished responses of steps that no checkpoint holds yet: kept as they finish, drawn only once.

A response is a pure function of the policy, its prompt and the names of its random numbers. So a
step that is done again after a restart takes the finished responses from here, draws the others and
comes to the same bits. What a user's own judge said, which may be slow, is kept likewise.

WORKDIR/journal/STEP.POLICY.NAME holds records. Their key is a hash of all that the payload depends
on (run, policy, prompt, random numbers), so nothing of another config, seed or policy is found. A
cut or damaged record counts as absent. Files are removed once a checkpoint holds what they led to.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax import gate, parallel
from dapo_jax.checkpoint import checkpoint, resume, seal
from dapo_jax.checkpoint.workdir import JOURNAL, Workdir
from dapo_jax.config import schema

EVERY_S = 2.0  # what a killed run loses at most; in a bucket each write is an object
_READERS = 32  # files read at a time: a bucket answers slowly and in parallel
_HEAD = struct.Struct("<I16sI")  # bytes of payload, key, checksum of both

# Fields and sections, as in `resume.HARMLESS`, that no response depends on.
_FREE = ("steps", "init_from", "init_state", "eval.", "checkpoint.", "log.", "guard.")


class File(NamedTuple):
    """Name of a file: the step that was running, the policy, and what keeps files apart."""

    step: int
    policy: str
    name: str

    def __str__(self) -> str:
        return f"{self.step:06d}.{self.policy}.{self.name}"


class Journal:
    """Records by key, in files of the workdir; use as a context. Process 0 reads, and sends what it
    has read to the others; `open` and the constructor are collectives. Nothing here ends a run:
    what cannot be written or read is drawn again."""

    def __init__(self, home: Workdir, config, inputs: dict[str, str], step: int, say: Callable):
        """inputs: `resume.inputs`. step: the step that the run starts from."""
        self._folder = home.top / JOURNAL
        self._remote, self._say = home.remote is not None, say
        self._most = int(config.checkpoint.journal_gb * 1e9)
        fields = schema.leaves(config).items()
        # All that a response depends on beside the policy, its prompt and its random numbers.
        binding = inputs | {
            "config": {name: value for name, value in fields if not resume.among(name, _FREE)},
            "versions": checkpoint.versions(),
        }
        self._run = digest(json.dumps(binding, sort_keys=True).encode(), 16)
        self._step, self._covered, self._policy = step, 0, ""
        self._kept: dict[bytes, bytes] = {}  # key -> payload, of the policy that is open
        self._waiting = collections.deque()  # (step, policy, record), not yet written
        self._own: File | None = None  # where this process writes
        self._files: dict[File, int] = {}  # -> bytes; of process 0 all, of others their own
        self._failing = False
        self._writing, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._in_background, daemon=True)
        if self.on and parallel.is_main_process():
            self._files = self._find_files()
        self._old = [File(*f) for f in parallel.gather_json([*self._files])[0]]

    def __enter__(self):
        if self.on:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        if self.on:
            self._thread.join()
        self.flush()
        self._tidy()

    def at(self, step: int) -> None:
        """This step begins; its files are named by it."""
        self._step = step

    def covered(self, step: int) -> None:
        """A checkpoint of `step` is safe: nothing before it will be done again."""
        self._covered = step

    def open(self, params) -> None:
        """From here on `get` and `put` are about this policy."""
        sums = np.array([*seal.content(params).values()], np.uint32)
        policy = digest(sums.tobytes(), 8, self._run).hex()
        if policy == self._policy:
            return
        self._policy, self._kept = policy, {}
        if wanted := [f for f in self._old if f.policy == policy]:
            found = self._read(wanted) if parallel.is_main_process() else b""
            self._kept = {key: payload for key, payload, _ in _records(of_main_process(found))}
            there = f"{len(self._kept)} responses or grades are there already"
            self._say(f"step {self._step + 1}: {there}")

    @property
    def on(self) -> bool:
        return self._most > 0

    def key(self, *parts: bytes) -> bytes:
        """Hash key of a record: run, current policy and `parts`."""
        return digest(b"".join(parts), 16, self._run + self._policy.encode())

    def get(self, key: bytes) -> bytes | None:
        return self._kept.get(key)

    def put(self, key: bytes, payload: bytes) -> None:
        """Written within EVERY_S, or by `flush`."""
        record = _HEAD.pack(len(payload), key, zlib.crc32(key + payload)) + payload
        self._waiting.append((self._step, self._policy, record))

    def flush(self) -> None:
        """Write the records that wait."""
        with self._writing:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for now, records in itertools.groupby(waiting, key=lambda w: w[:2]):
                self._write(*now, b"".join(record for *_, record in records))

    def _in_background(self) -> None:
        while not self._closing.wait(EVERY_S):
            self.flush()
            self._tidy()

    def _write(self, step: int, policy: str, data: bytes) -> None:
        """Append to this process's file; an object in a bucket cannot grow: write another."""
        if self._remote or self._failing or not self._own or self._own[:2] != (step, policy):
            self._own = File(step, policy, secrets.token_hex(6))
        try:
            if sum(self._files.values()) + len(data) > self._most:
                raise OSError("config.checkpoint.journal_gb allows no more")
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / str(self._own)).open("wb" if self._remote else "ab") as file:
                file.write(data)
                if not self._remote:
                    file.flush()
                    os.fsync(file.fileno())
            self._files[self._own] = self._files.get(self._own, 0) + len(data)
            self._failing = False
        except Exception as error:  # of the file system, or of a bucket's library
            if not self._failing:
                lost = f"finished responses cannot be kept ({gate.describe(error)})"
                again = "a run that is cut off now draws them again"
                self._say(f"warning: {self._folder}: {lost}; {again}")
            self._failing = True
            if self._own not in self._files:  # or a full disk gets a file more at each try
                with contextlib.suppress(Exception):
                    (self._folder / str(self._own)).unlink(missing_ok=True)

    def _tidy(self) -> None:
        with self._writing:  # or `flush` of another thread may add a file meanwhile
            over = [file for file in self._files if file.step < self._covered]
            for file in over:
                del self._files[file]
        for file in over:
            try:
                (self._folder / str(file)).unlink(missing_ok=True)
            except Exception as error:
                self._say(f"warning: {self._folder}/{file}: cannot be removed ({error})")

    def _find_files(self) -> dict[File, int]:
        found = {}
        try:
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                if match := re.fullmatch(r"(\d+)\.([^.]+)\.(.+)", path.name):
                    found[File(int(match[1]), *match.groups()[1:])] = path.stat().length
        except Exception as error:
            self._say(f"warning: {self._folder}: cannot be read ({error})")
        return found

    def _read(self, wanted: Sequence[File]) -> bytes:
        """The whole records of these files."""

        def whole(file: File) -> bytes:
            try:
                data = (self._folder / str(file)).read_bytes()
            except Exception as error:
                self._say(f"warning: {self._folder}/{file}: cannot be read ({error})")
                return b""
            return b"".join(raw for _, _, raw in _records(data))

        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            return b"".join(pool.map(whole, wanted))


def digest(data: bytes, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=size, key=key).digest()


def _records(data: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(key, payload, the record itself) of each that is as it was written."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, key, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        payload = data[at + _HEAD.size : end]
        if len(payload) == size and zlib.crc32(key + payload) == checksum:
            yield key, payload, data[at:end]
        at = end


def of_main_process(data: bytes) -> bytes:
    """The bytes of process 0, on all. A collective."""
    out = np.zeros(parallel.gather_json(len(data))[0], np.uint8)
    out[: len(data)] = np.frombuffer(data, np.uint8)
    parallel.broadcast(out)
    return out.tobytes()
