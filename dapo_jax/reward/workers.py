"""Judging responses in worker processes, with a time limit for each response.

A worker is `python -m dapo_jax.reward.workers`, a fresh interpreter without the accelerator. One
that takes too long is killed, with every process it has started, and replaced. Grades do not depend
on which worker judges which response.
"""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe, connection
from typing import Any

from dapo_jax.data.problems import Problem
from dapo_jax.reward import asking, functions as rewards
from dapo_jax.reward.functions import Failed

START_S = 300.0  # time limit for a worker's imports, including the file of the user's function
_READ_S = 10.0  # of a message that has begun
_ORPHAN_S = 30.0  # a worker whose parent is gone ends itself this long after its time limit


class _Worker:
    def __init__(self, reward: dict, limit_s: float):
        self.line, theirs = Pipe()
        paths = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dapo_jax.reward.workers", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # what it starts is killed with it
        )
        theirs.close()
        self.line.send((reward, limit_s))
        self.ready, self.job = False, -1  # job: an index; -1 = none
        self.due = time.monotonic() + START_S

    def said(self):
        """What it sends next. If the user's code writes half a message there, it is killed."""
        late = threading.Timer(_READ_S, os.killpg, (self._process.pid, signal.SIGKILL))
        late.start()
        try:
            return self.line.recv()
        finally:
            late.cancel()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.line.close()


class Pool:
    """Up to `count` worker processes, which start with the first responses and then stay. reward:
    the fields of `config.reward`. limit_s: seconds for one response."""

    def __init__(self, reward: dict, count: int, limit_s: float):
        self._reward, self._count, self._limit_s = reward, count, limit_s
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers)

    def grade(self, jobs: Sequence[tuple[Problem, Any]]) -> list:
        """`asking.answer` to each job, in order. ValueError: a worker cannot start."""
        out: list[Any] = [None] * len(jobs)
        waiting = collections.deque(range(len(jobs)))
        for worker in [w for w in self._workers if w.ready and w.line.poll()]:  # ended while idle
            worker.kill()
            self._workers.remove(worker)
        idle = [w for w in self._workers if w.ready]
        busy = {w.line: w for w in self._workers if not w.ready}  # or still starting

        def ends(worker: _Worker, why: str) -> None:
            worker.kill()
            self._workers.remove(worker)
            if not worker.ready:
                raise ValueError(f"reward: a process that judges {why} while it started")
            out[worker.job] = rewards.failed(jobs[worker.job][0], why)

        try:
            while waiting or any(w.job >= 0 for w in busy.values()):
                while waiting and idle:
                    worker = idle.pop()
                    worker.job, worker.due = waiting.popleft(), time.monotonic() + self._limit_s
                    busy[worker.line] = worker
                    with contextlib.suppress(OSError):  # it died: noticed below
                        worker.line.send(jobs[worker.job])
                starting = sum(not w.ready for w in busy.values())
                while starting < len(waiting) and len(self._workers) < self._count:
                    self._workers.append(worker := _Worker(self._reward, self._limit_s))
                    busy[worker.line] = worker
                    starting += 1
                soonest = min(w.due for w in busy.values())
                for line in connection.wait(list(busy), max(soonest - time.monotonic(), 0.0)):
                    worker = busy.pop(line)
                    try:
                        said = worker.said()
                    except (EOFError, OSError):
                        ends(worker, "ended its process")
                        continue
                    except Exception:  # pickle's are of any kind
                        ends(worker, "wrote to the descriptor on which grades are sent")
                        continue
                    if worker.ready:
                        out[worker.job], worker.job = said, -1
                    elif said:  # why it cannot judge
                        busy[line] = worker
                        raise ValueError(said)
                    worker.ready = True
                    idle.append(worker)
                for worker in [w for w in busy.values() if w.due <= time.monotonic()]:
                    del busy[worker.line]
                    limit = self._limit_s if worker.ready else START_S
                    ends(worker, f"took more than {limit:g} s")
        except BaseException:  # also Ctrl-C: the next call must find no half-done work
            _end(self._workers)
            raise
        return out


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


def main() -> None:
    line = connection.Connection(int(sys.argv[1]))
    reward, limit_s = line.recv()
    try:
        named = rewards.read(types.SimpleNamespace(**reward))
    except (ValueError, OSError) as error:
        line.send(str(error))
        return
    line.send(None)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            problem, response = line.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_s + _ORPHAN_S)
            said = asking.answer(named, problem, response, limit_s + _ORPHAN_S)
            signal.setitimer(signal.ITIMER_REAL, 0)
            line.send(said._replace(error=None) if isinstance(said, Failed) else said)


if __name__ == "__main__":
    main()
