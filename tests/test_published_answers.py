"""Every answer of the published files, by the verifier that its set has by default: the answer
itself is right, another one wrong. Rows that are refused are named here."""

import pytest

from dapo_jax.data import answers, problems, published, references

SETS = published.SETS
# File, verifier, rows, rows that are refused.
FILES = [
    ("gsm8k_test.jsonl.gz", SETS["gsm8k-test"].protocol.verifier, 1319, []),
    ("gsm8k_train.jsonl.gz", "auto", 7473, []),
    ("math_train_int.jsonl.gz", "auto", 4701, []),
    ("amc23.jsonl", SETS["amc23"].protocol.verifier, 40, []),
    ("dapo_aime-2024_original.parquet", SETS["aime24"].protocol.verifier, 960, []),
    # Integers of more than 17 digits that went through a float.
    ("dapo_math_17k_verl.jsonl.gz", "dapo", 17917, [1001, 3225, 5196, 8137, 12111]),
    ("math500.jsonl.gz", SETS["math500"].protocol.verifier, 500, []),
]


@pytest.mark.parametrize(("file", "verifier", "rows", "refused"), FILES, ids=[f[0] for f in FILES])
def test_right_and_wrong(file, verifier, rows, refused, assets):
    if verifier == "math":
        pytest.importorskip("math_verify", reason="needs math-verify (requirements-peers.txt)")
    takes = references.integer if verifier == "dapo" else references.any_answer
    found, report = problems.read(assets / "math" / file, "skip", problems.Reading(takes))
    assert (report.rows, [r.row for r in report.refused]) == (rows, refused) and found
    for p in found:
        mode = answers.chosen(p.answer, p.messages[-1][1], p.source)
        mode = mode if verifier == "auto" else verifier
        said = "so {}\nAnswer: {}" if mode == "dapo" else "so 7, that is \\boxed{{{}}}"
        for answer, right in ((p.answer, True), ("-98765", False)):
            response = said.format(7, answer) if mode == "dapo" else said.format(answer)
            assert answers.verify(response, p.answer, mode).correct == right, (p.id, p.answer)
