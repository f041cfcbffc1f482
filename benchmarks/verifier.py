"""How often the verifier agrees with the labels of real model responses, and how fast it is.

    python -m benchmarks verifier --assets=FOLDER        (or the environment's DAPO_JAX_ASSETS)

Reads FOLDER/verifier/*.jsonl.gz, one response a line: `source`, `response`, `gold`, `label` (true,
false or null, as published by the source of the responses). Agreement is counted where the label is
certain: present, for an integer reference, on a response that states an answer at its end.
The responses answer prompts of many styles, few of which ask for an `Answer:` line: in mode `dapo`
the table therefore shows what that mode cannot read, not an error of it.
"""

import gzip
import json
import os
import re
import time
from collections import Counter, defaultdict
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Flag
from dapo_jax.data.verifier import MODES, verify

FLAGS = {
    "assets": Flag("", "", "folder of the responses"),
    "seconds": Flag(0.1, 1.0, "CPU-seconds of the measured speed"),
}
# Kept apart from the verifier's own notion of an answer, so that it cannot excuse itself.
_INTEGER = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d+")
_STATED = re.compile(r"(?:answer[^\n]{0,60}?(?:is|:)|####|\\boxed|^A:)\D*\d", re.I | re.M)


def load_responses(assets: Path) -> list[dict]:
    """All rows under `assets`/verifier. Raises ValueError if there are none."""
    files = sorted((assets / "verifier").glob("*.jsonl.gz"))
    rows = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
    if not rows:
        raise ValueError(f"no responses in {assets / 'verifier'}: expected *.jsonl.gz files there")
    return rows


def is_certain(row: dict) -> bool:
    """Has the row a label of its source, an integer reference and an answer at its end?"""
    is_integer = _INTEGER.fullmatch(row["gold"].replace("{,}", ","))
    stated = _STATED.search(row["response"][-300:])
    return row["label"] is not None and is_integer is not None and stated is not None


def verdicts_per_second(rows: list[dict], mode: str, seconds: float) -> float:
    """Verdicts per second of CPU time over whole passes through `rows`."""
    start, passes = time.process_time(), 0
    while (spent := time.process_time() - start) < seconds:
        for row in rows:
            verify(row["response"], row["gold"], mode)
        passes += 1
    return passes * len(rows) / spent


def agreement(table: harness.Table, rows: list[dict], mode: str) -> None:
    """A row per source, and the shortest response of each kind of disagreement."""
    counts, examples = defaultdict(Counter), {}
    for row in rows:
        verdict = verify(row["response"], row["gold"], mode)
        wrong = is_certain(row) and verdict.correct != row["label"]
        for count in (counts[row["source"]], counts["all"]):
            count["rows"] += 1
            count["accepted"] += verdict.correct
            count["certain"] += is_certain(row)
            count["false accepts" if verdict.correct else "false rejects"] += wrong
        if wrong:
            kind = "accepted, labelled wrong" if verdict.correct else "rejected, labelled right"
            examples[kind] = min(examples.get(kind, row), row, key=lambda r: len(r["response"]))
    for source, count in sorted(counts.items()):
        wrong = count["false accepts"] + count["false rejects"]
        share = f"{1 - wrong / count['certain']:.2%}" if count["certain"] else "no labels"
        table.row(mode, source, *(f"{count[name]:,}" for name in COUNTS), share)
    for kind, row in examples.items():
        table.note(f"{mode}, {kind}: reference {row['gold']}, {row['response'][-90:]!r}")


COUNTS = ("rows", "accepted", "certain", "false accepts", "false rejects")


def measure(args) -> list[harness.Table]:
    assets = args.assets or os.environ.get("DAPO_JAX_ASSETS")
    if not assets:
        raise SystemExit("error: where are the responses? --assets=FOLDER or DAPO_JAX_ASSETS")
    rows = load_responses(Path(assets))
    table = harness.Table("mode", "source", *COUNTS, "agreement")
    for mode in MODES:
        agreement(table, rows, mode)
        speed = verdicts_per_second(rows, mode, args.seconds)
        table.note(f"{mode}: {speed:,.0f} verdicts per CPU-second.")
    return [table]
