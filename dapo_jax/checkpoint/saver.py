"""Saves checkpoints in the background; a failed save does not end the run."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable

from dapo_jax import gate, parallel
from dapo_jax.checkpoint import checkpoint
from dapo_jax.config import schema
from dapo_jax.dapo.state import State

_LAST_TRIES, _LAST_WAIT_S = 3, 2.0  # of the final save


class Saver:
    """A context. A save starts at the end of a step and is awaited at the end of the next one, on
    every process at the same point. If it failed (a full disk, usually), the state of that next
    step is saved instead. Older checkpoints are removed only after a save has succeeded."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        config,
        inputs: dict[str, str],
        say: Callable[[str], None],
        on_saved: Callable[[int], None] = lambda step: None,
    ):
        """on_saved: called with the step of each checkpoint that is safely written."""
        kept = config.checkpoint.keep, config.checkpoint.keep_every, config.checkpoint.keep_best
        self._open = functools.partial(checkpoint.manager, directory, *kept, cleanup=True)
        self._directory, self._on_saved, self._say = directory, on_saved, say
        self._config, self._inputs = schema.leaves(config), inputs
        self._manager = self._open()
        self._running = False  # whether a save has not been awaited yet
        self._failures = 0  # in a row

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self._settle()  # a run that was told to leave within a step awaits nothing else
            self._manager.close()
        elif kind is not KeyboardInterrupt:  # the run's own error is the one to report
            with contextlib.suppress(Exception):
                self._manager.close()

    def after_step(self, state: State, due: bool, score: float | None = None) -> None:
        """Await the save of the step before; save this one if it is due or that one failed.
        NotFinite: this state has NaN or infinity and is not saved; earlier checkpoints stay."""
        self._settle()
        if due or self._failures:
            self._save(state, score)

    def last(self, state: State, score: float | None = None) -> None:
        """Save this step, unless it is saved already, and wait. OSError: it cannot be saved.
        NotFinite: it must not be."""
        if self._settle() and self.has(state.counters.step):
            return
        for attempt in range(_LAST_TRIES):
            time.sleep(attempt * _LAST_WAIT_S)
            self._save(state, score)
            if self._settle():
                return
        lost = f"step {state.counters.step} could not be saved in {self._directory}"
        raise OSError(f"{lost}; {self._newest()}; make room and give the same command")

    def has(self, step: int) -> bool:
        """Whether the newest checkpoint is that of `step`."""
        return self._manager.latest_step() == step

    def _newest(self) -> str:
        good, _ = parallel.of_main_process(lambda: checkpoint.steps(self._directory))
        return f"the newest checkpoint is {f'of step {good[0]}' if good else 'missing'}"

    def _save(self, state: State, score) -> None:
        save = lambda: checkpoint.save(self._manager, state, self._config, self._inputs, score)
        self._running = self._attempt(save)

    def _settle(self) -> bool:
        """Wait for the running save. Returns whether the last save succeeded."""
        if self._running:
            self._running = False
            if self._attempt(self._manager.wait_until_finished):
                self._failures = 0
                self._on_saved(self._manager.latest_step())
        return not self._failures

    def _attempt(self, action: Callable[[], None]) -> bool:
        wrong = ""
        try:
            action()
        except checkpoint.NotFinite as error:  # raised on all processes
            remedy = "lower optim.lr, or look at optim.* and the weights the run began with"
            raise checkpoint.NotFinite(f"{error}; {self._newest()}: {remedy}") from error
        except Exception as error:  # of the file system, Orbax or tensorstore
            wrong = gate.describe(error)
        if not parallel.any_process(bool(wrong)):
            return True
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8, ...
            lost = f"a checkpoint could not be saved (failure {self._failures} in a row)"
            why = f"{self._directory}: {wrong or 'on another process'}"
            self._say(f"warning: {lost}: {why}; training goes on and tries again every step")
        # Replace the manager: the new one removes half-written checkpoints.
        with contextlib.suppress(Exception):
            self._manager.close()
        with contextlib.suppress(Exception):  # then the next save fails and says why
            self._manager = self._open()
        return False
