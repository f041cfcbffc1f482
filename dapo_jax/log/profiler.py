"""A trace of one step by jax.profiler: `python -m dapo_jax.train --profile=STEP`.

WORKDIR/profile/step_NNNNNN_rollout and ..._update each get a plugins/profile/*/*.xplane.pb of
process 0's devices, for TensorBoard's profile plugin (pip install xprof).
"""

import pathlib
import threading
from collections.abc import Callable

import jax

from dapo_jax import parallel

SECONDS = 20  # of a phase, at most: minutes of trace are gigabytes


class Profiler:
    """Traces on process 0. step: the step to trace, 0 = none; done: number of steps done so far."""

    def __init__(self, workdir: pathlib.Path, step: int, done: int, say: Callable[[str], None]):
        self._folder, self._step, self._done, self._say = workdir / "profile", step, done, say
        self._lock, self._timer = threading.Lock(), None
        if step and step <= done:
            say(f"warning: --profile={step}: that step is done; the next one is {done + 1}")

    def phase(self, name: str) -> None:
        if name == "chunk":
            return
        self.stop()
        traced = self._done + 1 == self._step and name in ("rollout", "update")
        if not traced or not parallel.is_main_process():
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of every function
        where = self._folder / f"step_{self._step:06d}_{name}"
        jax.profiler.start_trace(where, profiler_options=options)
        self._say(f"tracing {name} of step {self._step} to {where}")
        self._timer = threading.Timer(SECONDS, self.stop)
        self._timer.daemon = True
        self._timer.start()

    def step(self, state, record) -> None:
        self.stop()
        self._done = state.counters.step

    def stop(self) -> None:
        """End the running trace, if any, and write it."""
        with self._lock:
            if self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # a full disk, or any error of the profiler
                self._say(f"warning: --profile: no trace ({type(error).__name__}: {error})")
