"""What a step looked like, as numbers and as text, and the files that keep it.

metrics.jsonl, TensorBoard and the files a step hold each rollout step once, also across restarts: a
resumed run first cuts what lies beyond the checkpoint it starts from. Only process 0 writes.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterable, Sequence

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from dapo_jax import parallel
from dapo_jax.dapo.dynamic_sampling import Collected

# ------------------------------------------------------------------------------------------------
# Numbers
# ------------------------------------------------------------------------------------------------


def rollout_metrics(
    got: Collected, outcomes: np.ndarray, rewards: np.ndarray, tokens: int
) -> dict[str, float]:
    """Of everything drawn this step, before the filter, unless the tag says `batch`.

    outcomes, rewards: float [responses], without and with the length penalty, in drawing order.
    tokens: response tokens drawn. The groups' `extras` are `parts.Grades`.
    """
    log = {"sampling/rounds": got.rounds, "sampling/batch_groups": len(got.groups)}
    if got.drawn:
        correct_NxG = np.stack([g.correct for g in got.drawn])
        grades = [g.extras for g in got.drawn]
        rows = [r for g in got.drawn for r in g.responses]
        length = np.array([len(r.tokens) for r in rows])
        log |= {
            "reward/mean": rewards.mean(),
            "reward/accuracy": correct_NxG.mean(),
            "reward/overlong_penalty": (rewards - outcomes).mean(),
            "response/length_mean": length.mean(),
            "response/length_max": length.max(),
            "response/truncated_frac": np.mean([r.truncated for r in rows]),
            "policy/entropy": sum(r.entropies.sum(dtype=float) for r in rows) / tokens,
            "policy/mean_prob": sum(np.exp(r.logps).sum(dtype=float) for r in rows) / tokens,
            "sampling/accept_frac": np.mean([g.mixed for g in got.drawn]),
            "sampling/all_correct_frac": correct_NxG.all(1).mean(),
            "sampling/all_wrong_frac": (~correct_NxG.any(1)).mean(),
            "sampling/parse_fail_frac": np.mean([a is None for g in grades for a in g.answers]),
            "sampling/shadow_gain": np.mean([g.shadow for g in grades]) - correct_NxG.mean(),
        }
    if got.groups:
        log["reward/batch_accuracy"] = np.mean([g.correct for g in got.groups])
    return log


def update_metrics(logs: Sequence[dict], with_reference: bool) -> dict[str, float]:
    """Means over the trained tokens of all updates of a step; `ratio_max` and the gap are maxima.
    `logs`: what `update` returned, on the host."""
    log = {"optim/skipped": sum(bool(x["skipped"]) for x in logs)}
    if not logs:
        return log
    tokens = sum(x["tokens"] for x in logs)

    def mean(name):
        return sum(x[name] for x in logs) / tokens

    log |= {
        "policy/loss": np.mean([x["loss"] for x in logs]),
        "policy/batch_entropy": mean("entropy"),
        "policy/batch_mean_prob": mean("prob"),
        "policy/clip_low_frac": mean("clip_low"),
        "policy/clip_high_frac": mean("clip_high"),
        "policy/dual_clip_frac": mean("dual_clip"),
        "policy/approx_kl": mean("approx_kl"),
        "policy/ratio_max": max(x["ratio_max"] for x in logs),
        # Of the first update alone: there the policy still is the one that sampled.
        "policy/sampler_trainer_logprob_gap": logs[0]["sampler_gap"],
        "optim/grad_norm": np.mean([x["grad_norm"] for x in logs]),
    }
    return log | ({"policy/ref_kl": mean("ref_kl")} if with_reference else {})


# ------------------------------------------------------------------------------------------------
# Text
# ------------------------------------------------------------------------------------------------


def short(log: dict[str, float]) -> str:
    """The few numbers that fit behind a progress bar."""
    shown = (
        ("acc", "reward/accuracy", ".2f"),
        ("reward", "reward/mean", "+.2f"),
        ("len", "response/length_mean", ".1f"),
        ("ent", "policy/entropy", ".2f"),
        ("accept", "sampling/accept_frac", ".2f"),
        ("tok/s", "perf/tokens_per_s", ",.0f"),
    )
    return " ".join(f"{name} {log[tag]:{form}}" for name, tag, form in shown if tag in log)


def evaluation_lines(step: int, log: dict[str, float]) -> list[str]:
    """One line a set: '  step 20  heldout: avg@4 .59 ...'."""
    sets = {tag.split("/")[1] for tag in log if tag.startswith("eval/")}
    lines = []
    for name in sorted(sets):
        values = {t.split("/")[2]: v for t, v in log.items() if t.startswith(f"eval/{name}/")}
        text = "  ".join(f"{k} {v:.3f}" for k, v in values.items() if "@" in k)
        lines.append(f"  step {step:4d}  {name:18s} {text}")
    return lines


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


class Writer:
    """metrics.jsonl, TensorBoard and one file a step under rollouts/ and eval/, in `workdir`.

    `resume_step`: records of later steps are removed first; -1 removes all. What cannot be written
    (a full disk) is kept in memory, reported by `say`, and written with what comes next.
    """

    def __init__(self, workdir: pathlib.Path, resume_step: int, tensorboard: bool, say=print):
        self._path, self._workdir = workdir / "metrics.jsonl", workdir
        self._board, self._plots = None, tensorboard
        self._lines: list[str] = []  # of metrics.jsonl, not yet written
        self._files: dict[pathlib.Path, str] = {}  # not yet written
        self._say, self._failing = say, False
        if not parallel.first():
            return
        kept = [r for r in read(self._path) if r["step"] <= resume_step]
        for folder in ("rollouts", "eval"):
            for file in workdir.glob(f"{folder}/step_*.jsonl*"):
                if int(re.sub(r"\D", "", file.name) or 0) > resume_step:
                    file.unlink()
        _replace(self._path, "".join(json.dumps(r) + "\n" for r in kept))
        self._size = self._path.stat().st_size  # bytes of whole lines
        shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
        self._write()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if not parallel.first():
            return
        record = {"step": step} | {k: _number(v) for k, v in values.items()}
        self._lines.append(json.dumps(record) + "\n")
        self._write()

    def lines(self, folder: str, step: int, rows: Iterable[dict]) -> None:
        """JSON lines to `folder`/step_NNNNNN.jsonl."""
        if not parallel.first():
            return
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        self._files[self._workdir / folder / f"step_{step:06d}.jsonl"] = text
        self._write()

    def _write(self) -> None:
        try:
            for path in list(self._files):
                path.parent.mkdir(exist_ok=True)
                _replace(path, self._files[path])
                del self._files[path]
            new = "".join(self._lines)
            with self._path.open("r+b") as file:
                file.truncate(self._size)  # of a line that was cut off
                file.seek(self._size)
                file.write(new.encode())
                file.flush()
                os.fsync(file.fileno())  # a checkpoint must not be newer than its records
            self._size += len(new.encode())
            self._lines.clear()
            self._plot(new)
            self._failing = False
        except OSError as error:
            self._close_board()
            if not self._failing:
                self._say(f"warning: {self._path}: {error.strerror}; records wait in memory")
            self._failing = True

    def _plot(self, new: str) -> None:
        """Add records to TensorBoard's file; a new file begins with all there are."""
        if not self._plots:
            return
        if self._board is None:
            shutil.rmtree(self._workdir / "tensorboard", ignore_errors=True)
            (self._workdir / "tensorboard").mkdir()
            self._board = EventsWriter(str(self._workdir / "tensorboard" / "events"))
            new = self._path.read_text()
        for record in map(json.loads, new.splitlines()):
            for tag, value in record.items():
                if tag != "step" and value is not None:
                    point = scalar(tag, value)
                    event = Event(step=record["step"], wall_time=time.time(), summary=point)
                    self._board.write_event(event)
        self._board.flush()

    def _close_board(self) -> None:
        with contextlib.suppress(OSError):
            if self._board:
                self._board.close()
        self._board = None

    def close(self) -> None:
        if parallel.first():
            self._write()
        self._close_board()


def _replace(path: pathlib.Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _number(value) -> float | int | None:
    """JSON has no NaN or infinity: null, which plots as a gap."""
    if isinstance(value, int | np.integer):
        return int(value)
    value = float(value)
    return value if np.isfinite(value) else None


def read(path: pathlib.Path) -> list[dict]:
    """Whole records of a metrics.jsonl; what follows a line cut off by a crash is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            break
        records.append(record)
    return records
