"""Finished responses of steps that no checkpoint holds yet: kept as they finish, drawn only once.

A response is a pure function of the policy, its prompt and the names of its random numbers. So a
step that is done again after a restart takes the responses that were finished from here, draws the
others and comes to the same bits; a step that had been sampled whole only repeats its updates.
What a user's own judge said is kept likewise: it may be slow. Rule-based verdicts are made again.

WORKDIR/journal/STEP.POLICY.NAME holds records: length of the payload, key, checksum, payload. The
key is a hash of all that the payload depends on (run, policy, prompt, random numbers), so what
belongs to another config, seed or policy is never found. A record that is cut or damaged counts as
absent. Files are removed once a checkpoint holds what they led to.
"""

import collections
import concurrent.futures
import hashlib
import itertools
import json
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from dapo_jax import parallel
from dapo_jax.build import Machine, Text
from dapo_jax.checkpoint import checkpoint, seal
from dapo_jax.checkpoint.workdir import JOURNAL, Workdir
from dapo_jax.config import schema
from dapo_jax.dapo.reward import Grade
from dapo_jax.data.problems import Problem
from dapo_jax.reward import grading
from dapo_jax.reward.functions import Failed, attempt
from dapo_jax.rollout import engine
from dapo_jax.rollout.engine import Part, Request, Response

EVERY_S = 2.0  # what a killed run loses at most; in a bucket each write is an object
_READERS = 32  # files read at a time: a bucket answers slowly and in parallel
_PIECE = 1 << 24  # bytes told to the other processes at a time
_HEAD = struct.Struct("<I16sI")  # bytes of payload, key, checksum of both

# Fields that no response depends on; names that end in a dot are sections.
_FREE = ("steps", "init_from", "init_state", "eval.", "checkpoint.", "log.", "guard.")


class File(NamedTuple):
    """Name of a file: the step that was running, the policy, and what keeps files apart."""

    step: int
    policy: str
    name: str

    def __str__(self) -> str:
        return f"{self.step:06d}.{self.policy}.{self.name}"


class Journal:
    """Records by key, in files of the workdir; use as a context. Process 0 reads, and tells the
    others; `open` and the constructor are collectives. Nothing here ends a run: what cannot be
    written or read is drawn again."""

    def __init__(
        self,
        home: Workdir,
        config,
        inputs: dict[str, str],
        step: int,
        say: Callable[[str], None],
    ):
        """inputs: `resume.inputs`. step: that the run starts from."""
        self._folder = epath.Path(home.remote or home.local) / JOURNAL
        self._remote, self._say = home.remote is not None, say
        self._most = int(config.checkpoint.journal_gb * 1e9)
        self._run = _digest(_binding(config, inputs), 16)
        self._step, self._covered = step, 0
        self._policy = ""
        self._kept: dict[bytes, bytes] = {}  # key -> payload, of the policy that is open
        # (step, policy, record), not yet written
        self._waiting: collections.deque[tuple[int, str, bytes]] = collections.deque()
        self._own: File | None = None  # where this process writes
        self._files: dict[File, int] = {}  # -> bytes; of process 0 all, of others their own
        self._failing = False
        self._writing, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        if self.on and parallel.is_main_process():
            self._files = self._listed()
        self._old = [File(*f) for f in parallel.gather_json([*self._files])[0]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.set()
        if self._thread:
            self._thread.join()
        self.flush()
        self._tidy()

    # --- what the run tells ---------------------------------------------------------------------

    def at(self, step: int) -> None:
        """The step that begins; its files are named by it."""
        self._step = step

    def covered(self, step: int) -> None:
        """A checkpoint of `step` is safe: nothing before it will be done again."""
        self._covered = step

    def open(self, params) -> None:
        """From here on `get` and `put` are about this policy."""
        if not self.on:
            return
        sums = np.array(parallel.to_host(seal.checksums(params)), np.uint32)
        policy = _digest(sums.tobytes(), 8, self._run).hex()
        if policy == self._policy:
            return
        self._policy, self._kept = policy, {}
        wanted = [f for f in self._old if f.policy == policy]
        if wanted:
            found = self._read(wanted) if parallel.is_main_process() else b""
            self._kept = {key: payload for key, payload, _ in _records(_told(found))}
            step = self._step + 1
            self._say(f"step {step}: {len(self._kept)} responses or grades are there already")

    @property
    def on(self) -> bool:
        return self._most > 0

    # --- records --------------------------------------------------------------------------------

    def key(self, *parts: bytes) -> bytes:
        """Of what depends on the run, the open policy and `parts`."""
        return _digest(b"".join(parts), 16, self._run + self._policy.encode())

    def get(self, key: bytes) -> bytes | None:
        return self._kept.get(key)

    def put(self, key: bytes, payload: bytes) -> None:
        """Written within EVERY_S, or by `flush`."""
        checksum = zlib.crc32(payload, zlib.crc32(key))
        record = _HEAD.pack(len(payload), key, checksum) + payload
        self._waiting.append((self._step, self._policy, record))
        if self._thread is None:
            self._thread = threading.Thread(target=self._in_background, daemon=True)
            self._thread.start()

    # --- files ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what waits."""
        with self._writing:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            for now, records in itertools.groupby(waiting, key=lambda w: w[:2]):
                self._write(*now, b"".join(record for *_, record in records))

    def _in_background(self) -> None:
        while not self._closing.wait(EVERY_S):
            self.flush()
            self._tidy()

    def _write(self, step: int, policy: str, data: bytes) -> None:
        """Append to the own file; objects in a bucket are whole, so there it is a new one."""
        own = self._own and self._own[:2] == (step, policy) and not self._remote
        if not own or self._failing:
            self._own = File(step, policy, secrets.token_hex(6))
        wrong = ""
        try:
            if not self._make_room(len(data)):
                raise OSError("config.checkpoint.journal_gb allows no more")
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / str(self._own)).open("wb" if self._remote else "ab") as file:
                file.write(data)
            self._files[self._own] = self._files.get(self._own, 0) + len(data)
        except Exception as error:  # of the file system, or of a bucket's library
            wrong = str(error) or type(error).__name__
        if wrong and not self._failing:
            self._say(
                f"warning: {self._folder}: finished responses cannot be kept ({wrong}); a run that"
                " is cut off now draws them again"
            )
        self._failing = bool(wrong)

    def _make_room(self, size: int) -> bool:
        """Whether `size` more bytes are within the limit; for them the oldest steps give way."""
        for file in sorted(self._files):
            if sum(self._files.values()) + size <= self._most or file.step >= self._step:
                break
            self._remove(file)
        return sum(self._files.values()) + size <= self._most

    def _tidy(self) -> None:
        for file in sorted(self._files):
            if file.step < self._covered:
                self._remove(file)

    def _remove(self, file: File) -> None:
        self._files.pop(file, None)
        try:
            (self._folder / str(file)).unlink(missing_ok=True)
        except Exception as error:
            self._say(f"warning: {self._folder}/{file}: cannot be removed ({error})")

    def _listed(self) -> dict[File, int]:
        found = {}
        try:
            for path in self._folder.iterdir() if self._folder.is_dir() else ():
                step, _, rest = path.name.partition(".")
                policy, _, name = rest.partition(".")
                if step.isdigit() and policy and name:
                    found[File(int(step), policy, name)] = path.stat().length
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


def _binding(config, inputs: dict[str, str]) -> bytes:
    """All that a response depends on beside the policy, its prompt and its random numbers."""
    fields = schema.leaves(config).items()
    decides = {
        "config": {k: v for k, v in fields if not any(_free(k, name) for name in _FREE)},
        "versions": checkpoint.versions(),
        "devices": [jax.device_count(), jax.devices()[0].device_kind],
    }
    return json.dumps(decides | inputs, sort_keys=True).encode()


def _free(field: str, name: str) -> bool:
    return field == name or (name.endswith(".") and field.startswith(name))


def _digest(data: bytes, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=size, key=key).digest()


def _records(data: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(key, payload, the record itself) of each that is as it was written."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, key, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        payload = data[at + _HEAD.size : end]
        if len(payload) == size and zlib.crc32(payload, zlib.crc32(key)) == checksum:
            yield key, payload, data[at:end]
        at = end


def _told(data: bytes) -> bytes:
    """The bytes of process 0, on all. A collective."""
    if jax.process_count() == 1:
        return data
    size, pieces = parallel.gather_json(len(data))[0], []
    for start in range(0, size, _PIECE):
        piece = np.zeros(min(_PIECE, size - start), np.uint8)
        if parallel.is_main_process():
            piece[:] = np.frombuffer(data, np.uint8, len(piece), start)
        pieces.append(np.asarray(multihost_utils.broadcast_one_to_all(piece), np.uint8).tobytes())
    return b"".join(pieces)


# ------------------------------------------------------------------------------------------------
# A machine and a judge that remember
# ------------------------------------------------------------------------------------------------


def remembering(
    machine: Machine, text: Text, journal: Journal, check: Callable[[], None]
) -> tuple[Machine, Text]:
    """Both, with a sampler that draws only what `journal` does not have, and a judge that is asked
    only what it has not said. check: called between two chunks of decoding and between two updates;
    raises to end the run there."""
    sampler, trainer = _Sampler(machine.engine, journal, check), _Trainer(machine.trainer, check)
    others = {name: _Trainer(other, check) for name, other in machine.others.items()}
    judge = text.judge
    if journal.on and (judge.pool or judge.shadow is None):  # quick rules have a second opinion
        text = text._replace(judge=judge._replace(pool=_Judges(judge, journal)))
    return machine._replace(engine=sampler, trainer=trainer, others=others), text


class _Sampler:
    """An `Engine` for all that it is asked."""

    def __init__(self, inner: engine.Engine, journal: Journal, check: Callable[[], None]):
        self._inner, self._journal, self._check = inner, journal, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def decode_params(self, params):
        self._journal.open(params)
        return self._inner.decode_params(params)

    def generate(
        self,
        decode_params,
        requests: Sequence[Request],
        draw: engine.Draw,
        *,
        progress: Callable[[int], None] = lambda finished: None,
        cut: Callable[[np.ndarray], int] | None = None,
        feed: Callable[[list[Part]], Sequence[Request] | None] | None = None,
    ) -> tuple[list[Response], engine.Stats]:
        """As `Engine.generate`; of the parameters that `decode_params` has had last."""

        def after_chunk(finished: int) -> None:
            progress(finished)
            self._check()

        if not self._journal.on:
            return self._inner.generate(
                decode_params, requests, draw, progress=after_chunk, cut=cut, feed=feed
            )
        if feed is not None:
            return self._fed(decode_params, requests, draw, after_chunk, feed)
        keys, responses = self._look_up(requests, draw)
        missing = [i for i, response in enumerate(responses) if response is None]
        replayed = sum(len(r.tokens) for r in responses if r is not None)

        drawn, stats = [], engine.total([])
        if len(missing) < len(requests):
            progress(len(requests) - len(missing))
        if missing:
            drawn, stats = self._inner.generate(
                decode_params,
                [requests[i] for i in missing],
                draw,
                progress=after_chunk,
                on_finished=lambda index, response: self._keep(keys[missing[index]], response),
                cut=cut,
            )
        for i, response in zip(missing, drawn, strict=True):
            responses[i] = response
        return responses, stats._replace(tokens=stats.tokens + replayed, replayed=replayed)

    def _fed(self, decode_params, requests, draw, after_chunk, feed):
        """`generate` with a `feed`, which is told of what is there before anything is drawn."""
        keys, asked, replayed = [], [], 0  # asked: which of the requests have to be drawn

        def missing(new: Sequence[Request] | None) -> list[Request] | None:
            nonlocal replayed
            out = []
            while new:
                found, kept = self._look_up(new, draw)
                there = []
                for i, (request, r) in enumerate(zip(new, kept, strict=True), len(keys)):
                    if r is None:
                        asked.append(i)
                        out.append(request)
                    else:
                        there.append(Part(i, 0, *r[:3], True))
                        replayed += len(r.tokens)
                keys.extend(found)
                new = feed(there) if there else ()
            return None if new is None else out

        stats = engine.total([])
        if wanted := missing(requests):
            _, stats = self._inner.generate(
                decode_params,
                wanted,
                draw,
                progress=after_chunk,
                on_finished=lambda i, response: self._keep(keys[asked[i]], response),
                feed=lambda parts: missing(feed([p._replace(index=asked[p.index]) for p in parts])),
            )
        return [], stats._replace(tokens=stats.tokens + replayed, replayed=replayed)

    def _look_up(self, requests, draw) -> tuple[list[bytes], list[Response | None]]:
        """The key of each request, and its response where that is there."""
        named, prompts = repr(draw).encode(), {}  # the samples of a prompt share it
        for request in requests:
            if id(request.prompt) not in prompts:
                text = np.array(request.prompt, np.int64).tobytes()
                prompts[id(request.prompt)] = _digest(named + text, 16)
        keys = [
            self._journal.key(
                prompts[id(request.prompt)],
                repr(request[1:5]).encode(),
                np.array(request.prefix, np.int32).tobytes(),
            )
            for request in requests
        ]
        return keys, [_response(self._journal.get(key)) for key in keys]

    def _keep(self, key: bytes, response: Response) -> None:
        if parallel.is_main_process():  # all have the same
            self._journal.put(key, _payload(response))


class _Trainer:
    """An `update.Trainer` that starts nothing before the last thing is done."""

    def __init__(self, inner, check: Callable[[], None]):
        self._inner, self._check, self._last = inner, check, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def log_probs(self, *arguments):
        self._last = out = self._in_turn(self._inner.log_probs, arguments)
        return out

    def update(self, *arguments):
        out = self._in_turn(self._inner.update, arguments)
        self._last = out[-1]  # the metrics; the parameters are given away to the next one
        return out

    def _in_turn(self, program: Callable, arguments: tuple):
        jax.block_until_ready(self._last)  # or all of a step's would be on their way at once
        self._check()
        return program(*arguments)


def _payload(response: Response) -> bytes:
    """1 byte: truncated; then of each token id, log-prob and entropy, 4 bytes each, in blocks."""
    arrays = (response.tokens, response.logps, response.entropies)
    return bytes([bool(response.truncated)]) + b"".join(x.tobytes() for x in arrays)


def _response(payload: bytes | None) -> Response | None:
    if payload is None:
        return None
    n = (len(payload) - 1) // 12
    tokens, logps, entropies = (
        np.frombuffer(payload, dtype, n, 1 + 4 * n * i).copy()
        for i, dtype in enumerate((np.int32, np.float32, np.float32))
    )
    return Response(tokens, logps, entropies, bool(payload[0]))


class _Judges:
    """A `workers.Pool`, or a judge in this process, that is asked once about a response."""

    def __init__(self, judge: grading.Judge, journal: Journal):
        self._judge, self._journal = judge, journal

    def grade(self, jobs: Sequence[tuple[Problem, str]]) -> list[Grade | Failed]:
        """As `workers.Pool.grade`. What the judge failed on is not kept."""
        names = ((b"grade", p.source.encode(), p.id.encode(), text.encode()) for p, text in jobs)
        keys = [self._journal.key(*name) for name in names]
        said = [kept and Grade(**json.loads(kept)) for kept in map(self._journal.get, keys)]
        missing = [i for i, grade in enumerate(said) if grade is None]
        asked = [jobs[i] for i in missing]
        judge = self._judge
        found = judge.pool.grade(asked) if judge.pool else [attempt(judge.score, *x) for x in asked]
        for i, grade in zip(missing, found, strict=True):
            said[i] = grade
            if isinstance(grade, Grade):
                self._journal.put(keys[i], _plain(grade))
        return said


def _plain(grade: Grade) -> bytes:
    fields = {
        "score": float(grade.score),
        "right": None if grade.right is None else bool(grade.right),
        "answer": grade.answer,
        "parts": {name: float(part) for name, part in grade.parts.items()},
    }
    return json.dumps(fields).encode()
