"""Finished responses and grades as records of the journal, so that they are not made again."""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dapo_jax import parallel
from dapo_jax.checkpoint.journal import Journal, digest
from dapo_jax.dapo.reward import Grade
from dapo_jax.data.problems import Problem
from dapo_jax.reward import functions, grading
from dapo_jax.rollout import engine
from dapo_jax.rollout.engine import Draw, Request, Response


class Responses(engine.Store):
    """Finished responses, by policy, prompt, random numbers and limits; others' answers by name."""

    def __init__(self, journal: Journal):
        self._journal = journal
        # On others a log-prob has other last bits; what somebody said is the same.
        self._devices = repr((jax.device_count(), jax.devices()[0].device_kind)).encode()

    def open(self, params) -> None:
        self._journal.open(params)

    def get(self, requests: Sequence[Request], draw: Draw) -> list[Response | None]:
        return [_response(self._journal.get(key)) for key in self._keys(requests, draw)]

    def put(self, request: Request, draw: Draw, response: Response) -> None:
        if parallel.is_main_process():  # all processes have the same
            (key,) = self._keys([request], draw)
            # 1 byte: truncated; then all token ids, all log-probs, all entropies, 4 bytes each.
            arrays = b"".join(x.tobytes() for x in response[:3])
            self._journal.put(key, bytes([bool(response.truncated)]) + arrays)

    def recall(self, name: bytes) -> bytes | None:
        return self._journal.get(self._journal.key(name))

    def keep(self, said: Mapping[bytes, bytes]) -> None:
        for name, payload in said.items():
            self._journal.put(self._journal.key(name), payload)
        self._journal.flush()

    def _keys(self, requests: Sequence[Request], draw: Draw) -> list[bytes]:
        @functools.cache  # the samples of a prompt share its hash
        def hash_of(prompt: tuple[int, ...], draw: Draw) -> bytes:
            ids = np.array(prompt, np.int64).tobytes()
            return digest(self._devices + repr(draw).encode() + ids, 16)

        def key(request: Request) -> bytes:
            prefix = np.array(request.prefix, np.int32).tobytes()
            of_prompt = hash_of(tuple(request.prompt), request.draw or draw)
            return self._journal.key(of_prompt, repr(request[1:5]).encode(), prefix)

        return [key(request) for request in requests]


class Grades:
    """What a user's own judge said, by problem and text. Failures are not kept."""

    def __init__(self, journal: Journal):
        self._journal = journal

    def get(self, jobs: Sequence[tuple[Problem, str]]) -> list[Grade | None]:
        return [_grade(self._journal.get(self._key(job))) for job in jobs]

    def put(self, job: tuple[Problem, str], grade: Grade) -> None:
        self._journal.put(self._key(job), json.dumps(grade._asdict()).encode())

    def _key(self, job: tuple[Problem, str]) -> bytes:
        problem, text = job
        parts = ("grade", problem.source, problem.id, text)
        return self._journal.key(*(part.encode() for part in parts))


def watch(before: engine.Watch, journal: Journal, check) -> engine.Watch:
    """`before` with the journal as its store. check: see `Watch`."""
    return before._replace(check=check, store=Responses(journal) if journal.on else engine.Store())


def judge(before: grading.Judge, journal: Journal) -> grading.Judge:
    """`before`, asked once about each response where it may be slow. Rules in this process are
    quick, and have a second opinion (`shadow`) that is not kept."""
    slow = before.pool or before.shadow is None
    return before._replace(memory=Grades(journal)) if journal.on and slow else before


def _response(payload: bytes | None) -> Response | None:
    if not payload or len(payload) % 12 != 1 or payload[0] > 1:
        return None
    tokens, logps, entropies = np.frombuffer(payload[1:], np.int32).reshape(3, -1).copy()
    logps, entropies = logps.view(np.float32), entropies.view(np.float32)
    whole = len(tokens) and tokens.min() >= 0 and np.isfinite([logps, entropies]).all()
    return Response(tokens, logps, entropies, bool(payload[0])) if whole else None


def _grade(payload: bytes | None) -> Grade | None:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return functions.checked(Grade(**json.loads(payload or b"null")))
