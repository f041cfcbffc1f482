"""The published files: how many of their rows are problems; every answer by the verifier that its
set has by default, the answer itself right and another one wrong; the prompts of AIME-2024."""

import hashlib
import re

import pyarrow.parquet as pq
import pytest

from dapo_jax.data import answers, problems, prompts, published, references

SETS = published.SETS
# File, verifier; where answers are integers: rows, distinct prompts, conflicts, refused, kept.
FILES = [
    ("gsm8k_test.jsonl.gz", SETS["gsm8k-test"].protocol.verifier, (1319, 1319, 0, 0, 1319)),
    ("gsm8k_train.jsonl.gz", "auto", (7473, 7473, 0, 0, 7473)),
    ("math_train_int.jsonl.gz", "auto", (4701, 4701, 0, 0, 4701)),
    ("amc23.jsonl", SETS["amc23"].protocol.verifier, (40, 40, 0, 0, 40)),
    ("dapo_aime-2024_original.parquet", SETS["aime24"].protocol.verifier, (960, 30, 0, 0, 30)),
    ("aime24.jsonl", SETS["aime24"].protocol.verifier, (30, 30, 0, 0, 30)),
    ("dapo_math_17k_verl.jsonl.gz", "dapo", (17917, 17290, 11, 5, 17274)),
    ("math500.jsonl.gz", SETS["math500"].protocol.verifier, (500, 500, 0, 188, 312)),
]
# Integers of more than 17 digits that went through a float.
DAMAGED = {"dapo_math_17k_verl.jsonl.gz": [1001, 3225, 5196, 8137, 12111]}


@pytest.mark.parametrize(("file", "verifier", "counts"), FILES, ids=[f[0] for f in FILES])
def test_rows_and_right_and_wrong(file, verifier, counts, assets):
    path = assets / "math" / file
    found, report = problems.read(path, "skip")
    dropped = (len(report.conflicts), len(report.refused))
    assert (report.rows, report.unique, *dropped, len(found)) == counts
    if verifier != "dapo":
        found, report = problems.read(path, "skip", problems.Reading(references.any_answer))
        assert len(found) == report.unique == counts[1]
    assert [int(re.search(r" row (\d+)", r)[1]) for r in report.refused] == DAMAGED.get(file, [])
    if verifier == "math":
        pytest.importorskip("math_verify", reason="needs math-verify (requirements-peers.txt)")
    for p in found:
        mode = answers.chosen(p.answer, p.messages[-1][1], p.source)
        mode = mode if verifier == "auto" else verifier
        said = "so {}\nAnswer: {}" if mode == "dapo" else "so 7, that is \\boxed{{{}}}"
        for answer, right in ((p.answer, True), ("-98765", False)):
            response = said.format(7, answer) if mode == "dapo" else said.format(answer)
            assert answers.verify(response, p.answer, mode).correct == right, (p.id, p.answer)


def test_aime_is_the_same_in_both_files_and_word_for_word_in_the_template(assets):
    file = assets / "math" / "dapo_aime-2024_original.parquet"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SETS["aime24"].sha256
    assert set(problems.read(file)[0]) == set(problems.read(assets / "math" / "aime24.jsonl")[0])
    for row in pq.read_table(file).to_pylist():
        messages = tuple((m["role"], m["content"]) for m in row["prompt"])
        raw = row["extra_info"]["raw_problem"]
        assert prompts.raw_problem(messages) == raw and prompts.in_template(raw) == messages
