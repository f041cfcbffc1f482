"""What a step looked like, as numbers (dapo_jax/log/tags.md), and the files that keep it. They hold
each rollout step once, also across restarts. Only process 0 writes."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dapo_jax import parallel
from dapo_jax.algorithm import StepRecord
from dapo_jax.dapo import reward
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.state import State
from dapo_jax.data import files
from dapo_jax.log import alarm_command, tags, trackers


class Clocks(NamedTuple):
    """Seconds on one clock."""

    started: float
    rollout_done: float
    done: float


def step_metrics(config, state: State, record: StepRecord, clocks: Clocks, problems: int) -> dict:
    """All numbers of a rollout step. state: after it. problems: in the training set."""
    stats, counters, seconds = record.stats, state.counters, clocks.done - clocks.started
    # Not `stats.tokens`: of what is judged now, some may have been drawn in earlier steps.
    tokens = sum(r.length for g in record.batch.drawn for r in g.responses)
    return (
        rollout_metrics(config, record.batch, tokens)
        | update_metrics(record.updates, bool(config.loss.kl_coef))
        | {
            "optim/lr": record.knobs.lr,
            "optim/updates": counters.updates,
            "spent/tokens": counters.tokens,
            "spent/samples": counters.samples,
            "data/epochs": counters.position / problems,
            "data/problems_seen": min(counters.position, problems),
            "time/rollout_s": clocks.rollout_done - clocks.started,
            "time/update_s": clocks.done - clocks.rollout_done,
            "time/step_s": seconds,
            "perf/tokens_per_s": (stats.tokens - stats.replayed) / seconds,
            "perf/slot_occupancy": stats.occupancy,
            "perf/cache_peak": stats.peak_cache,
            "sampling/evicted": stats.evicted,
        }
        | (stats.drafts.metrics() if stats.drafts else {})
        | record.metrics
    )


def rollout_metrics(config, got: Collected, tokens: int) -> dict[str, float | list[int]]:
    """Metrics of everything drawn this step, before the filter, unless the tag says `batch`. Those
    of right and wrong exist if the judge knows them. tokens: of these responses."""
    log = {"sampling/rounds": got.rounds, "sampling/batch_groups": len(got.groups)}
    if got.groups and got.groups[0].grades.right_G is not None:
        log["reward/batch_accuracy"] = np.mean([g.grades.right_G for g in got.groups])
    if not got.drawn:
        return log
    longest = config.rollout.max_response_tokens
    grades = [g.grades for g in got.drawn]
    rows = [r for g in got.drawn for r in g.responses]
    score_NxG = np.stack([g.score_G for g in grades])
    length_NxG = np.array([r.length for r in rows]).reshape(score_NxG.shape)
    rewards_NxG = reward.shaped(score_NxG, length_NxG, longest, config.reward)
    entropies = np.concatenate([r.entropies[r.drawn] for r in rows])
    logps = np.concatenate([r.logps[r.drawn] for r in rows])
    log |= {
        "reward/mean": rewards_NxG.mean(),
        "reward/overlong_penalty": (rewards_NxG - score_NxG).mean(),
        "response/length_mean": length_NxG.mean(),
        "response/length_max": length_NxG.max(),
        **{f"response/length_p{p}": np.percentile(length_NxG, p) for p in (50, 90, 99)},
        "response/length_hist": histogram("response/length_hist", length_NxG, longest),
        "response/truncated_frac": np.mean([r.truncated for r in rows]),
        "policy/entropy": entropies.sum(dtype=float) / tokens,
        "policy/entropy_hist": histogram("policy/entropy_hist", entropies, longest),
        "policy/mean_prob": np.exp(logps).sum(dtype=float) / tokens,
        "sampling/accept_frac": np.mean([g.mixed() for g in got.drawn]),
    }
    if grades[0].right_G is not None:
        value_NxG, what = np.stack([g.right_G for g in grades]), "accuracy"
        log |= _verdict_metrics(grades, value_NxG, length_NxG)
    else:
        value_NxG, what = score_NxG, "score"
    log[f"reward/{what}"] = value_NxG.mean()
    for name in {name: None for g in grades for name in g.parts_G}:
        part = np.concatenate([g.parts_G[name] for g in grades if name in g.parts_G])
        if (there := ~np.isnan(part)).any():  # responses that were missed have no parts
            log[f"reward_part/{name}"] = part[there].mean()
    if grades[0].missed is not None:
        log["reward/missed_frac"] = sum(g.missed for g in grades) / len(rows)
    source_N = np.array([g.source for g in grades])
    for source in np.unique(source_N):
        log[f"source/{source}/{what}"] = value_NxG[source_N == source].mean()
    return log


def _verdict_metrics(grades: Sequence[Grades], right_NxG: np.ndarray, length_NxG) -> dict:
    """Metrics of a judge that knows right and wrong."""
    by_correct = np.bincount(right_NxG.sum(1), minlength=right_NxG.shape[1] + 1)
    log = {
        "sampling/all_correct_frac": right_NxG.all(1).mean(),
        "sampling/all_wrong_frac": (~right_NxG.any(1)).mean(),
        "sampling/groups_by_correct": by_correct.tolist(),
    }
    answers = [a for g in grades for a in g.answers]
    if reward.reads_answers(answers, right_NxG.flat):
        log["sampling/parse_fail_frac"] = np.mean([a is None for a in answers])
    if grades[0].shadow_G is not None:
        log["sampling/shadow_gain"] = np.mean([g.shadow_G for g in grades]) - right_NxG.mean()
    if right_NxG.any():
        log["response/length_correct"] = length_NxG[right_NxG].mean()
    if not right_NxG.all():
        log["response/length_wrong"] = length_NxG[~right_NxG].mean()
    return log


def histogram(tag: str, values: np.ndarray, longest: int) -> list[int]:
    """Counts between `tags.edges`; a bin holds its upper edge, the first one its lower edge too."""
    edges = tags.edges(tag, min(tags.LENGTH_BINS, longest), longest)
    bins = np.searchsorted(edges[1:-1], values.ravel(), side="left")
    return np.bincount(bins, minlength=len(edges) - 1).tolist()


# Tag -> the sum over trained tokens that it is the mean of; the last three only with weights.
MEANS = {
    "batch_entropy": "entropy", "batch_mean_prob": "prob", "clip_low_frac": "clip_low",
    "clip_high_frac": "clip_high", "dual_clip_frac": "dual_clip", "approx_kl": "approx_kl",
    "importance_mean": "importance", "importance_capped_frac": "importance_capped",
    "importance_zeroed_frac": "importance_zeroed",
}  # fmt: skip

# What else `dapo.update` logs; the rest are extra terms of the loss.
OTHERS = {
    "loss", "tokens", "ref_kl", "importance_square", "ratio_max", "sampler_gap", "grad_norm",
    "skipped",
}  # fmt: skip


def update_metrics(logs: Sequence[dict], with_reference: bool) -> dict[str, float]:
    """Means over a step's trained tokens; `ratio_max` and the gap are maxima. logs: of `update`."""
    log = {"optim/skipped": sum(bool(x["skipped"]) for x in logs)}
    if not logs:
        return log
    tokens = sum(x["tokens"] for x in logs)
    mean = lambda name: sum(x[name] for x in logs) / tokens
    log |= {
        "policy/loss": np.mean([x["loss"] for x in logs]),
        **{f"policy/{tag}": mean(name) for tag, name in MEANS.items() if name in logs[0]},
        "policy/ratio_max": max(x["ratio_max"] for x in logs),
        # Of the first update alone: there the policy still is the one that sampled.
        "policy/sampler_trainer_logprob_gap": logs[0]["sampler_gap"],
        "optim/grad_norm": np.mean([x["grad_norm"] for x in logs]),
    }
    if "importance_square" in logs[0]:
        log["policy/importance_ess"] = mean("importance") ** 2 / mean("importance_square")
    if with_reference:
        log["policy/ref_kl"] = mean("ref_kl")
    for name in logs[0].keys() - OTHERS - {*MEANS.values()}:
        log[f"policy/{name}"] = np.mean([x[name] for x in logs])
    return log


class Writer:
    """metrics.jsonl, TensorBoard, trackers, and one file a step under rollouts/ and eval/.

    `resume_step`: records of later steps are removed first; -1 removes all. What cannot be written
    (a full disk) is kept in memory, reported by `say`, and written with what comes next. name: of
    the workdir, as trackers and alarms give it; `workdir` where that is a bucket is a copy.
    """

    def __init__(self, workdir: pathlib.Path, resume_step: int, config, say=print, name: str = ""):
        self._path, self._workdir = workdir / "metrics.jsonl", workdir
        self._board, self._c = None, config
        self._lines: list[str] = []  # of metrics.jsonl, not yet written
        self._files: dict[pathlib.Path, str] = {}  # not yet written
        self._say, self._failing = say, False
        name = name or str(workdir)
        self._trackers = trackers.Trackers(config, workdir, say, name)
        self._alarm_command = alarm_command.AlarmCommand(config.log.alarm_command, name, say)
        if not parallel.is_main_process():
            return
        kept = [r for r in self._recovered(resume_step) if r["step"] <= resume_step]
        for folder in ("rollouts", "eval"):
            for file in workdir.glob(f"{folder}/step_*.jsonl*"):
                if _step(file) > resume_step:
                    file.unlink()
        files.write(self._path, "".join(json.dumps(r) + "\n" for r in kept))
        self._size = self._path.stat().st_size  # bytes of whole lines
        shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
        self._write()

    def _recovered(self, resume_step: int) -> list[dict]:
        """All records that can be read. What the file has lost is said, and the file kept."""
        records, damaged = _records(self._path)
        if damaged:
            kept_as = files.unused(self._path.with_name(f"{self._path.name}.damaged"))
            shutil.copyfile(self._path, kept_as)
            lost = f"no record in lines {damaged[:5]} ({len(damaged)} in all)"
            kept = f"the file as it was is kept as {kept_as.name}"
            self._say(f"warning: {self._path}: {lost}; {kept}")
        if resume_step >= 0 and resume_step not in {r["step"] for r in records}:
            lost = f"has no record of step {resume_step}, from whose checkpoint this run goes on"
            why = "it was written by a run in another workdir, or lines are lost"
            self._say(f"warning: {self._path}: {lost}: {why}")
        return records

    def record(self, step: int, values: dict) -> None:
        """One line of metrics.jsonl: numbers, lists of counts, lists of strings."""
        if not parallel.is_main_process():
            return
        record = {"step": step}
        for tag, value in (values | {"time/wall": round(time.time(), 3)}).items():
            record[tag] = value if isinstance(value, list) else number(value)
        self._lines.append(json.dumps(record) + "\n")
        self._write()
        self._trackers.record(step, record)

    def lines(self, folder: str, step: int, rows: Iterable[dict]) -> None:
        """JSON lines to `folder`/step_NNNNNN.jsonl, on disk with the next record."""
        if not parallel.is_main_process():
            return
        # NaN and infinity, which JSON lacks, become null.
        rows = json.loads(json.dumps(list(rows)), parse_constant=lambda name: None)
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        if folder == "rollouts" and self._shows(step):
            self._trackers.samples(step, rows)
        self._files[self._workdir / folder / f"step_{step:06d}.jsonl"] = text

    def alarm(self, step: int, in_row: int, alarms: list[str]) -> None:
        """To those who do not read the log: trackers, and log.alarm_command."""
        if parallel.is_main_process():
            self._trackers.alarm(step, alarms)
            self._alarm_command.start(step, in_row, alarms)

    def _write(self) -> None:
        try:
            written = list(self._files)
            for path in written:
                path.parent.mkdir(exist_ok=True)
                files.write(path, self._files[path])
                del self._files[path]
            if new := "".join(self._lines):
                self._append(new.encode())
            self._lines.clear()
            self._plot(new, written)
            self._failing = False
        except OSError as error:
            self._close_board()
            if not self._failing:
                late = "records wait in memory" if self._lines else "TensorBoard's curves wait"
                self._say(f"warning: {self._path}: {error.strerror}; {late}")
            self._failing = True

    def _append(self, new: bytes) -> None:
        with self._path.open("r+b") as file:
            file.truncate(self._size)  # of a line that was cut off
            file.seek(self._size)
            file.write(new)
            file.flush()
            os.fsync(file.fileno())  # a checkpoint must not be newer than its records
        self._size += len(new)

    def _plot(self, new: str, written: Sequence[pathlib.Path]) -> None:
        """Add to TensorBoard's file; a new one begins with all records and the newest samples."""
        if not self._c.log.tensorboard:
            return
        # tensorboardX brings torch in where that is installed.
        from dapo_jax.log import tensorboard as board

        if self._board is None:
            self._board = board.Board(self._workdir / "tensorboard", self._c)
            new = self._path.read_text()
            written = sorted((self._workdir / "rollouts").glob("step_*.jsonl"))
        for record in map(json.loads, new.splitlines()):
            self._board.record(record)
        due = [f for f in written if f.parent.name == "rollouts" and self._shows(_step(f))]
        for file in due[-board.TEXTS :]:
            rows = (row for _, row in files.json_lines(file) if row)  # without damaged lines
            self._board.samples(_step(file), rows)
        self._board.flush()

    def _shows(self, step: int) -> bool:
        """Whether dashboards get this step's samples."""
        every = self._c.log.text_every
        return every > 0 and step % every == 0

    def _close_board(self) -> None:
        with contextlib.suppress(OSError):
            if self._board:
                self._board.close()
        self._board = None

    def close(self) -> None:
        if parallel.is_main_process():
            self._write()
        self._close_board()
        self._trackers.close()
        self._alarm_command.close()


def _step(file: pathlib.Path) -> int:
    """The step in a file name: step_000012.jsonl -> 12."""
    return int(re.sub(r"\D", "", file.name) or 0)


def number(value) -> float | int | None:
    """JSON has no NaN or infinity: null, which plots as a gap."""
    if isinstance(value, int | np.integer):
        return int(value)
    value = float(value)
    return value if np.isfinite(value) else None


def read(path: pathlib.Path) -> list[dict]:
    """The records of a metrics.jsonl; lines that are none, cut off or damaged, are left out."""
    return _records(path)[0]


def _records(path: pathlib.Path) -> tuple[list[dict], list[int]]:
    """(records, numbers of the lines that are none)."""
    lines = dict(files.json_lines(path)) if path.exists() else {}
    damaged = [n for n, r in lines.items() if not _is_record(r)]
    return [r for n, r in lines.items() if n not in damaged], damaged


def _is_record(row: dict | None) -> bool:
    """Whether `Writer.record` may have written it: numbers, and lists where lists belong."""
    listed = lambda tag, x: isinstance(x, list) and tags.LISTS.fullmatch(tag)
    number = lambda x: x is None or (isinstance(x, int | float) and not abs(x) > 1e308)
    known = row and type(row.get("step")) is int
    return bool(known) and all(number(x) or listed(tag, x) for tag, x in row.items())
