"""TensorBoard's event file, from records of metrics.jsonl and rows of rollouts/.

Each card has the description of its tag (log/tags.md); "Custom Scalars" has them in panels.
"""

import pathlib
import shutil
import time
from collections.abc import Iterable, Sequence

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from dapo_jax.log import layout, tags

TEXTS = 20  # steps whose samples a new file begins with; TensorBoard shows ten
_SHOWN = 2000  # characters of a response on a card


class Board:
    """Empties `folder` and writes a new event file there. OSError, also of the methods: the file
    cannot be written; close this board and make another."""

    def __init__(self, folder: pathlib.Path, config):
        folder.mkdir(exist_ok=True)  # it may be a link
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        self._longest = config.rollout.max_response_tokens
        self._described, self._laid_out = set(), False
        self._wall: dict[int, float] = {}  # step -> when it was recorded, seconds since 1970
        self._writer = EventsWriter(str(folder / "events"))

    def record(self, record: dict) -> None:
        """Write a record of metrics.jsonl as one event, with the record's time."""
        if isinstance(wall := record.get("time/wall"), int | float):
            self._wall[record["step"]] = wall
        points = [p for tag, value in record.items() if (p := self._point(tag, value))]
        self._write(record["step"], points)
        if record["step"] > 0 and not self._laid_out:  # TensorBoard reads the first layout alone
            self._laid_out = True
            self._write(record["step"], layout.summary_of(self._described).value)

    def samples(self, step: int, rows: Iterable[dict]) -> None:
        if text := "\n\n---\n\n".join(map(_card, rows)):
            self._write(step, summary.text("samples", text).value)

    def _point(self, tag: str, value) -> Summary.Value | None:
        """The point of a value; None for null, empty counts and types that cannot be drawn."""
        if tag in ("step", "time/wall"):  # of the event itself
            return None
        if isinstance(value, int | float):
            # summary.scalar takes five times as long, for arrays and a warning about NaN.
            point = Summary.Value(tag=summary._clean_tag(tag), simple_value=value)
        elif not isinstance(value, list):
            return None
        elif value and all(isinstance(v, str) for v in value):
            point = summary.text(tag, "\n\n".join(value)).value[0]
        elif all(isinstance(v, int | float) for v in value) and sum(value) > 0:
            edges = np.asarray(tags.edges(tag, len(value), self._longest), float)
            # Only counts were kept: the sums assume values in the middle of their bins.
            middle = (edges[1:] + edges[:-1]) / 2
            sums = (sum(value), middle @ value, middle**2 @ value)
            drawn = edges[0], edges[-1], *sums, edges[1:].tolist(), value
            point = summary.histogram_raw(tag, *drawn).value[0]
        else:
            return None
        if tag not in self._described:  # once: TensorBoard keeps what comes first
            self._described.add(tag)
            point.metadata.summary_description = tags.describe(tag)
        return point

    def _write(self, step: int, points: Sequence[Summary.Value]) -> None:
        wall = self._wall.get(step, time.time())  # records of older versions have none
        self._writer.write_event(Event(step=step, wall_time=wall, summary=Summary(value=points)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _card(row: dict) -> str:
    """A row of rollouts/ as Markdown; None for fields that are missing."""
    verdict = "right" if row.get("correct") else "wrong"
    if row.get("truncated"):
        verdict += ", truncated"
    numbers = ", ".join(f"{f} {row.get(f)}" for f in ("reward", "tokens", "mean_entropy"))
    text = str(row.get("response", ""))
    if (cut := len(text) - _SHOWN) > 0:
        text = f"{text[: _SHOWN // 2]}\n[{cut:,} characters]\n{text[-_SHOWN // 2 :]}"
    answers = f"answer {row.get('answer')}, found {row.get('extracted')}"
    asked = _quoted(str(row.get("prompt", "")))
    return f"**{verdict}**, {numbers}; {answers}\n\n{asked}\n\n{_quoted(text)}"


def _quoted(text: str) -> str:
    """The text as a code block, which Markdown leaves as it is."""
    return "\n".join("    " + line for line in text.splitlines())
