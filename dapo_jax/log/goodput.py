"""Goodput: how the wall time of a run, over all of its starts, was used and lost.

WORKDIR/events.jsonl gets a line when a phase begins, when a step is done and when the process
leaves. A resumed run appends to it, so that it also has the steps that were done again.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import time
from dataclasses import field
from typing import Any

import jax.monitoring

from dapo_jax import parallel
from dapo_jax.data import files

# Causes of lost time, in the words of the summary; `time/lost/<cause>` in the records.
LOST = {
    "restart": "what was done again or cut off",
    "away": "no process",
    "start": "start-up",
    "compile": "compilation",
    "save": "saving",
}
_COMPILES = re.compile("/jax/core/compile/(backend_compile|jaxpr_to_mlir_module)_duration")
_EVENTS = {"start-up", "resume", "rollout", "update", "evaluation", "save", "step", "leave"}


@dataclasses.dataclass
class Ledger:
    """Seconds of wall time so far. Steps, evaluations and losses sum to the time between the first
    event and the last, except for time between the end of a finished run and its continuation."""

    steps: dict[int, float] = field(default_factory=dict)  # step number -> s, for steps that count
    # Step -> s of the evaluation after it; 0 = before the first
    evaluated: dict[int, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOST, 0.0))  # cause -> s
    begun: float = 0.0  # s in the running step
    step: int = 0  # the last step that is done
    sampled: dict[int, float] = field(default_factory=dict)  # step -> s in rollouts, of the above
    # Step -> s in rollouts that were cut off or undone. They count as lost to 'restart' until the
    # step is done again and says which share of its tokens was kept.
    undone: dict[int, float] = field(default_factory=dict)
    doing: str = ""  # phase since the newest event; '' = none
    since: float = 0.0  # time of the newest event
    starts: int = 0

    def shares(self) -> dict[str, float]:
        """`time/goodput` and `time/lost/<what>`, which sum to 1; nothing without any time."""
        good = sum((*self.steps.values(), *self.evaluated.values()))
        if not (total := good + self.begun + sum(self.lost.values())):
            return {}
        # The running step counts as good until it is cut off.
        shares = {f"time/lost/{what}": seconds / total for what, seconds in self.lost.items()}
        return {"time/goodput": (good + self.begun) / total} | shares


def add(ledger: Ledger, event: dict[str, Any]) -> Ledger:
    """The ledger, itself changed by one more event: {"time": s since 1970, "event": name, ...}.

    start-up                            a process starts
    resume, step=N                      from the state after step N: later steps are lost
    rollout, update, evaluation, save   the phase begins
    step, step=N, kept=share            the step is done; time up to the next event counts as
                                        `save`. kept: share of its tokens that the journal had kept
    leave, finished=bool                the process ends; finished: so does the run

    compile_s, with any event: seconds of compilation since the event before.

    If a step is done again, its earlier sampling counts in proportion to the tokens that were kept:
    the time that these would have taken at the rate of the others, at most the time it took.
    """
    # The clock may have been set back.
    name, now = event["event"], max(float(event["time"]), ledger.since)
    steps, evaluated, lost = ledger.steps, ledger.evaluated, ledger.lost
    sampled, undone = ledger.sampled, ledger.undone
    begun, running = ledger.begun, ledger.step + 1
    seconds = now - ledger.since if ledger.doing else 0.0
    if name == "start-up" and ledger.doing != "away":  # killed at an unknown time
        lost["restart"] += seconds
        compiled = 0.0
    else:
        compiled = min(float(event.get("compile_s", 0.0)), seconds)
        lost["compile"] += compiled
        if ledger.doing in ("rollout", "update"):
            begun += seconds - compiled
        elif ledger.doing == "evaluation":
            lost["restart"] += evaluated.pop(ledger.step, 0.0)  # was cut off, is done again
            evaluated[ledger.step] = seconds - compiled
        elif ledger.doing:
            lost[ledger.doing] += seconds - compiled
    if ledger.doing == "rollout":
        sampled[running] = sampled.get(running, 0.0) + seconds - compiled

    def undo(step: int) -> None:
        undone[step] = undone.get(step, 0.0) + sampled.pop(step, 0.0)

    next_phase = {"start-up": "start", "resume": "start", "step": "save", "leave": "away"}
    doing = next_phase.get(name, name)
    if name == "step":
        running, share = event.get("step", 0), float(event.get("kept", 0.0))
        other = sampled.get(running, 0.0)
        had = undone.pop(running, 0.0)
        back = min(had, other * share / (1 - share) if share < 1 else had)
        steps[running], sampled[running], begun = begun + back, other + back, 0.0
        lost["restart"] -= back
    elif name in ("start-up", "leave"):
        undo(running)
        lost["restart"], begun = lost["restart"] + begun, 0.0
        doing = "" if event.get("finished") else doing
    elif name == "resume":
        for n in [n for n in steps if n > event.get("step", 0)]:
            lost["restart"] += steps.pop(n) + evaluated.pop(n, 0.0)
            undo(n)
    done = event.get("step", 0) if name in ("step", "resume") else ledger.step
    ledger.begun, ledger.step, ledger.doing, ledger.since = begun, done, doing, now
    ledger.starts += name == "start-up"
    return ledger


def read(path: pathlib.Path) -> Ledger:
    """The ledger of an events.jsonl; lines that are damaged or no event are skipped."""
    rows = (row for _, row in files.json_lines(path)) if path.exists() else ()
    return functools.reduce(add, filter(_is_event, rows), Ledger())


def _is_event(row: dict[str, Any] | None) -> bool:
    """Whether `add` can take it."""
    row = {"compile_s": 0.0, "kept": 0.0, "step": 0, "event": "", "time": ""} | (row or {})
    numbers = [row[name] for name in ("time", "compile_s", "kept", "step")]
    good = all(type(x) in (int, float) and 0 <= x < 1e12 for x in numbers)
    return good and isinstance(row["event"], str) and row["event"] in _EVENTS


def summary(ledger: Ledger) -> str:
    """One line: 'wall time 3.2 h in 4 starts: 91.2% in steps that count, 4.1% ...'."""
    shares, evaluated = ledger.shares(), sum(ledger.evaluated.values())
    seconds = sum(ledger.steps.values()) + evaluated + sum(ledger.lost.values())
    good = f"{shares.get('time/goodput', 0):.1%} in steps that count (goodput"
    parts = [f"{good}; {evaluated / seconds:.1%} their evaluations)" if evaluated else f"{good})"]
    lost = sorted(LOST, key=ledger.lost.get, reverse=True)
    parts += [f"{shares[f'time/lost/{w}']:.1%} {LOST[w]}" for w in lost if ledger.lost[w]]
    starts = f"{ledger.starts} start" + ("s" if ledger.starts > 1 else "")
    return f"  wall time {seconds / 3600:.2f} h in {starts}: {', '.join(parts)}"


def beside(hooks, *others):
    """train.Hooks that first call `phase` and `step` of `others`."""
    call = lambda name: lambda *what: [getattr(x, name)(*what) for x in (*others, hooks)]
    return hooks._replace(phase=call("phase"), step=call("step"))


@functools.cache
def _compiled() -> list[float]:
    """[seconds that this process has compiled since the first call], updated in place."""
    total = [0.0]

    def add_up(event: str, seconds: float, **_) -> None:
        if _COMPILES.fullmatch(event):
            total[0] += seconds

    jax.monitoring.register_event_duration_secs_listener(add_up)
    return total


class Book:
    """Writes events.jsonl on process 0, beginning with `resume`: a refused start changes no file.
    began: time of this start, by time.time(). Events that a full disk refuses are lost."""

    def __init__(self, workdir: pathlib.Path, began: float):
        self._path, self._compiled = workdir / "events.jsonl", _compiled()[0]
        self.ledger = read(self._path) if parallel.is_main_process() else Ledger()
        cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        self._waiting = "\n" if cut_off else ""
        self.note("start-up", time=began)

    def note(self, event: str, **more) -> None:
        compiled, self._compiled = _compiled()[0] - self._compiled, _compiled()[0]
        row = {"time": round(time.time(), 3), "event": event} | more
        row |= {"compile_s": round(compiled, 3)} if compiled else {}
        self.ledger = add(self.ledger, row)
        self._waiting += json.dumps(row) + "\n"
        if event != "start-up" and parallel.is_main_process():
            text, self._waiting = self._waiting, "\n"  # ends a line that a full disk cuts off
            with contextlib.suppress(OSError):
                with self._path.open("a") as file:
                    file.write(text)
                self._waiting = ""

    def phase(self, name: str) -> None:
        if name != "chunk":
            self.note(name)

    def step(self, state, record) -> None:
        stats = record.stats
        kept = {"kept": stats.replayed / stats.tokens} if stats.replayed else {}
        self.note("step", step=state.counters.step, **kept)
