"""Where the wall time of a run goes, over all of its starts: goodput, and what was lost to what.

WORKDIR/events.jsonl gets a line as each phase of the run begins, as each step is done and as the
process leaves. A resumed run adds to it and cuts nothing, so that also the steps stand there which
had to be done again. `add` is all of the arithmetic: a pure function of the recorded events.
"""

import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.monitoring

from dapo_jax import parallel
from dapo_jax.data import files

# What time is lost to, in the words of the summary; `time/lost/<what>` in the records.
LOST = {
    "restart": "what was done again or cut off",
    "away": "no process",
    "start": "start-up",
    "compile": "compilation",
    "save": "saving",
}
_COMPILES = tuple(
    f"/jax/core/compile/{x}_duration" for x in ("backend_compile", "jaxpr_to_mlir_module")
)


class Ledger(NamedTuple):
    """Seconds of wall time so far. Steps, their evaluations and what was lost sum to all there was
    between the first event and the last, but for what lies between the end of a finished run and
    its going on."""

    steps: Mapping[int, float] = MappingProxyType({})  # by number: of those that still count
    evaluated: Mapping[int, float] = MappingProxyType({})  # after these; 0 = before the first
    lost: Mapping[str, float] = MappingProxyType(dict.fromkeys(LOST, 0.0))
    begun: float = 0.0  # of the step that is running
    step: int = 0  # the last one that is done
    sampled: Mapping[int, float] = MappingProxyType({})  # of `steps` and `begun`: rollouts
    # Rollouts that were cut off or undone, of steps to come: until those say what is left of them,
    # they are lost to 'restart'.
    undone: Mapping[int, float] = MappingProxyType({})
    doing: str = ""  # since the newest event; '' = nothing
    since: float = 0.0  # its time
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
    """With one more event: {"time": seconds since 1970, "event": name, ...}.

    start-up                            a process begins with the run
    resume, step=N                      from the state after step N: later steps are lost
    rollout, update, evaluation, save   begins
    step, step=N, kept=share            is done; what follows, up to the next event, is `save`.
                                        kept: of its tokens, that the journal had from before
    leave, finished=bool                the process ends; finished: for good

    compile_s, with any of them: seconds of compilation since the event before.

    Sampling of a step that was begun before counts as far as its tokens were kept: as long as they
    would have taken at the rate of the others, and no longer than there was.
    """
    name, now = event["event"], max(float(event["time"]), ledger.since)  # a clock may be set back
    steps, lost, begun = dict(ledger.steps), dict(ledger.lost), ledger.begun
    evaluated = dict(ledger.evaluated)
    sampled, undone, running = dict(ledger.sampled), dict(ledger.undone), ledger.step + 1
    seconds = now - ledger.since if ledger.doing else 0.0
    if name == "start-up" and ledger.doing != "away":  # killed: nobody knows how long it worked
        lost["restart"] += seconds
        compiled = 0.0
    else:
        compiled = min(float(event.get("compile_s", 0.0)), seconds)
        lost["compile"] += compiled
        if ledger.doing in ("rollout", "update"):
            begun += seconds - compiled
        elif ledger.doing == "evaluation":
            lost["restart"] += evaluated.pop(ledger.step, 0.0)  # it was cut off, and is done again
            evaluated[ledger.step] = seconds - compiled
        elif ledger.doing:
            lost[ledger.doing] += seconds - compiled
    if ledger.doing == "rollout":
        sampled[running] = sampled.get(running, 0.0) + seconds - compiled

    def undo(step: int) -> None:
        undone[step] = undone.get(step, 0.0) + sampled.pop(step, 0.0)

    doing = {"start-up": "start", "resume": "start", "step": "save", "leave": "away"}.get(
        name, name
    )
    if name == "step":
        running, share = event["step"], float(event.get("kept", 0.0))
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
        for n in [n for n in steps if n > event["step"]]:
            lost["restart"] += steps.pop(n) + evaluated.pop(n, 0.0)
            undo(n)
    done = event["step"] if name in ("step", "resume") else ledger.step
    starts = ledger.starts + (name == "start-up")
    return Ledger(steps, evaluated, lost, begun, done, sampled, undone, doing, now, starts)


def read(path: pathlib.Path) -> Ledger:
    """Of an events.jsonl; lines that are no event, cut off or damaged, are left out."""
    rows = (row for _, row in files.json_lines(path)) if path.exists() else ()
    good = (r for r in rows if r and {"event", "time"} <= r.keys())
    return functools.reduce(add, good, Ledger())


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
    """train.Hooks that first tell others, which have `phase` and `step` too."""
    tell = lambda name: lambda *what: [getattr(x, name)(*what) for x in (*others, hooks)]
    return hooks._replace(phase=tell("phase"), step=tell("step"))


@functools.cache
def _compiled() -> list[float]:
    """[Seconds that this process has compiled]; counts from the first call on."""
    total = [0.0]

    def heard(event: str, seconds: float, **_) -> None:
        if event in _COMPILES:
            total[0] += seconds

    jax.monitoring.register_event_duration_secs_listener(heard)
    return total


class Book:
    """Keeps events.jsonl of process 0, from `resume` on: a start that is refused touches no file.
    began: when this start of the run did, by time.time(). What a full disk refuses is lost."""

    def __init__(self, workdir: pathlib.Path, began: float):
        self._path, self._told = workdir / "events.jsonl", _compiled()[0]
        self.ledger = read(self._path) if parallel.is_main_process() else Ledger()
        cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        self._waiting = "\n" if cut_off else ""
        self.note("start-up", time=began)

    def note(self, event: str, **more) -> None:
        compiled, self._told = _compiled()[0] - self._told, _compiled()[0]
        row = {"time": round(time.time(), 3), "event": event} | more
        row |= {"compile_s": round(compiled, 3)} if compiled else {}
        self.ledger = add(self.ledger, row)
        self._waiting += json.dumps(row) + "\n"
        if event != "start-up" and parallel.is_main_process():
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(self._waiting)
            self._waiting = ""

    def phase(self, name: str) -> None:
        if name != "chunk":
            self.note(name)

    def step(self, state, record) -> None:
        stats = record.stats
        kept = {"kept": stats.replayed / stats.tokens} if stats.replayed else {}
        self.note("step", step=state.counters.step, **kept)
