"""How often the verifier agrees with the labels of real model responses, and how fast it is.

    python benchmarks/verifier.py --assets=FOLDER        (or the environment's DAPO_JAX_ASSETS)

Reads FOLDER/verifier/*.jsonl.gz, one response a line: `source`, `response`, `gold`, `label` (true,
false or null, as published by the source of the responses). Agreement is counted where the label is
certain: present, for an integer reference, on a response that states an answer at its end.
The responses answer prompts of many styles, few of which ask for an `Answer:` line: in mode `dapo`
the table therefore shows what that mode cannot read, not an error of it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from dapo_jax.data.verifier import MODES, Verdict, verify

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


def disagreement(row: dict, verdict: Verdict) -> str:
    """A name for the reason why `verdict` differs from the label of `row`."""
    last_answer = row["response"][row["response"].lower().rfind("answer") :]
    if verdict.correct:
        if not row["gold"].removeprefix("-").isdigit():
            return "accepted: the label's source did not read the commas of the reference"
        if "=" in last_answer:
            return "accepted: a calculation ends in the reference; its first number got the label"
        return "accepted: the reference is stated, yet the label says wrong"
    if verdict.extracted is None:
        return "rejected: no answer found"
    if _INTEGER.fullmatch(verdict.extracted):
        return "rejected: another integer is stated, yet the label says right"
    return "rejected: the answer found is not a bare integer"


def verdicts_per_second(rows: list[dict], mode: str, seconds: float = 1.0) -> float:
    """Verdicts per second of CPU time over whole passes through `rows`."""
    start, passes = time.process_time(), 0
    while (spent := time.process_time() - start) < seconds:
        for row in rows:
            verify(row["response"], row["gold"], mode)
        passes += 1
    return passes * len(rows) / spent


def report(rows: list[dict], mode: str) -> None:
    """Print the table of agreement by source, then each class of disagreement with an example."""
    counts, classes = defaultdict(Counter), defaultdict(list)
    for row in rows:
        verdict = verify(row["response"], row["gold"], mode)
        count = counts[row["source"]]
        count["rows"] += 1
        count["accepted"] += verdict.correct
        if is_certain(row):
            count["certain"] += 1
            count["false accepts"] += verdict.correct and not row["label"]
            count["false rejects"] += row["label"] and not verdict.correct
            if verdict.correct != row["label"]:
                classes[disagreement(row, verdict)].append((row, verdict))
    for count in list(counts.values()):
        counts["all"].update(count)

    columns = ("rows", "accepted", "certain", "false accepts", "false rejects")
    print(f"\nmode {mode}: {verdicts_per_second(rows, mode):,.0f} verdicts per CPU-second")
    print(f"{'source':32}" + "".join(f"{name:>15}" for name in (*columns, "agreement")))
    for source, count in counts.items():
        wrong = count["false accepts"] + count["false rejects"]
        share = f"{1 - wrong / count['certain']:.2%}" if count["certain"] else "no labels"
        print(f"{source:32}" + "".join(f"{count[n]:15,}" for n in columns) + f"{share:>15}")
    for name, members in sorted(classes.items(), key=lambda item: -len(item[1])):
        row, verdict = min(members, key=lambda member: len(member[0]["response"]))
        print(f"{len(members):6,}  {name}")
        print(f"        e.g. reference {row['gold']}, got {(verdict.extracted or '-')[:40]!r}")
        print(f"             from {row['response'][-90:]!r}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", default=os.environ.get("DAPO_JAX_ASSETS"))
    assets = parser.parse_args(arguments).assets
    if not assets:
        sys.exit("error: where are the responses? Give --assets=FOLDER or set DAPO_JAX_ASSETS")
    try:
        rows = load_responses(Path(assets))
    except ValueError as error:
        sys.exit(f"error: {error}")
    for mode in MODES:
        report(rows, mode)


if __name__ == "__main__":
    main(sys.argv[1:])
