"""Problem files: schemas, answers, duplicates, damage, encoding, order, the inspect command."""

import json
import os
import re
import sys
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tables import cases, write_rows

from dapo_jax.data import __main__ as data, problems as P, prompts, references


def verl(text, answer):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": text}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
    }


def error(*args, **kwargs):
    """The message of the ValueError of `read`: one line."""
    with pytest.raises(ValueError) as e:
        P.read(*args, **kwargs)
    assert "\n" not in str(e.value)
    return str(e.value)


class Letters:
    """A stand-in tokenizer: one token a character; a chat costs one token more at the front."""

    def encode(self, text):
        return [ord(c) for c in text if c != "~"]

    def chat(self, messages):
        return [1, *self.encode(prompts.plain_text(messages))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("case", cases("good_rows"), ids=lambda case: str(case["row"])[:60])
def test_good_rows(tmp_path, name, case):
    """Each form of a row. messages: a text stands in the paper's prompt."""
    how = dict(case.get("how", {}))
    mapping = P.columns(how.pop("columns", ""))
    file = write_rows(tmp_path / name, [case["row"]])
    (problem,), report = P.read(file, how=P.Reading(columns=mapping, **how))
    told = case["messages"]
    assert problem.messages == (
        prompts.in_template(told) if isinstance(told, str) else tuple(map(tuple, told))
    )
    assert (problem.answer, problem.source) == (case["answer"], case["source"])
    assert report == (1, 1, 0, (), (), bool(mapping))
    rest = {k: v for k, v in case["row"].items() if k != mapping.get("prompt")}
    assert problem.row == (rest if "whole" in how else {})


LONG = "9" * 5000  # int() refuses so many digits


@pytest.mark.parametrize(
    "case",
    [*cases("reference_answers"), dict(value=LONG, integer=LONG)],
    ids=lambda case: str(case)[:60],
)
def test_integers_and_what_is_none(case):
    value = case["value"]
    if isinstance(value, dict) and "decimal" in value:
        value = Decimal(value["decimal"])
    if "integer" in case:
        assert references.integer(value) == case["integer"]
        return
    with pytest.raises(ValueError) as e:
        references.integer(value, "answer")
    assert e.value.args[:2] == ("answer", value) or value != value
    assert case["refused"] in e.value.args[2]


def test_a_reference_in_markdown_stays_whole(tmp_path):
    text = "#### Facts\nIt rains.\n\n#### Why\nClouds."
    file = write_rows(tmp_path / "a.jsonl", [{"prompt": "q", "answer": text}])
    assert P.read(file, how=P.Reading(references.any_answer))[0][0].answer == text


def test_other_columns_of_parquet_are_not_read(tmp_path):
    table = pa.Table.from_pylist([verl("1+1?", "2")])
    clock = pa.array([2**62], pa.timestamp("us"))  # a date no Python object can hold
    pq.write_table(table.append_column("extra_info", clock), tmp_path / "a.parquet")
    assert len(P.read(tmp_path / "a.parquet")[0]) == 1
    pq.write_table(pa.table({"problem": ["q"], "answer": clock}), tmp_path / "b.parquet")
    assert "b.parquet: cannot be read" in error(tmp_path / "b.parquet")


BAD_ROWS = [
    *cases("bad_rows"),
    dict(bytes="[" * 100_000, field="row", value="[[[", reason="not valid JSON"),
    dict(bytes=f'{{"a": {LONG}}}', field="row", value="999", reason="not valid JSON"),
]


@pytest.mark.parametrize("case", BAD_ROWS, ids=lambda case: case["value"] + case["reason"])
def test_bad_rows_are_named_or_skipped(tmp_path, case):
    row = case["bytes"].encode("latin-1") if "bytes" in case else case["row"]
    file = write_rows(tmp_path / "a.jsonl", [verl("fine", "1"), b"", row, verl("also", "2"), row])
    how = P.Reading(**case.get("how", {}))
    message = error(file, how=how)
    assert message.startswith(f"{file} row 3: {case['field']}") and len(message) < 450
    assert case["value"] in message and case["reason"] in message
    assert "2 of 4 rows are refused; data.on_bad='skip'" in message
    kept, report = P.read(file, "skip", how)
    assert [p.answer for p in kept] == ["1", "2"]
    assert message.startswith(report.refused[0]) and report.rows == 4
    assert report.refused[1] == report.refused[0].replace("row 3", "row 5")


def test_duplicates_and_conflicts_over_files(tmp_path):
    pairs = (("x", "1e5"), ("y", "2"), ("x", "01"), ("x", "1"), ("x ", "3"))
    a = write_rows(tmp_path / "a.jsonl", [verl(*pair) for pair in pairs])
    other = verl("x", "3")
    other["prompt"][0]["role"] = "system"
    pairs = (("y", "5"), ("w", "4"), ("y", "2"), ("y", "6"))
    b = write_rows(tmp_path / "b.parquet", [*(verl(*pair) for pair in pairs), other])
    kept, report = P.read([a, b], on_bad="skip")
    found = [" ".join((*p.messages[0], p.answer)) for p in kept]
    assert found == ["user x 1", "user x  3", "user w 4", "system x 3"]
    assert kept[0].id == "7a4af8d8021f8ec6"  # samples of an evaluation are drawn by it
    assert (report.rows, report.unique, report.duplicates, len(report.refused)) == (10, 5, 5, 1)
    assert report.conflicts == (f"2 at {a} row 2; 5 at {b} row 1; 6 at {b} row 4",)


def test_missing_files_name_their_neighbours(tmp_path):
    write_rows(tmp_path / "train_17k.jsonl", [verl("x", "1")])
    (tmp_path / "notes.txt").write_text("")
    message = error(tmp_path / "train_17.jsonl")
    assert "no such file; near it: " in message and "train_17k.jsonl" in message
    assert "notes.txt" not in message
    assert "train_17k.jsonl" in error(tmp_path)  # a folder
    assert error(tmp_path / "gone" / "a.jsonl").endswith("a.jsonl: no such file")
    assert "expected .parquet, .jsonl, .jsonl.gz" in error(tmp_path / "notes.txt")
    assert "no problem file was named" in error([])


@pytest.mark.parametrize("case", cases("bad_files"), ids=lambda case: case["named"][:50])
def test_bad_files(tmp_path, case):
    (tmp_path / case["name"]).write_text(case["text"])
    message = error(tmp_path / case["name"], "skip" if "usable" in case["named"] else "refuse")
    assert case["named"].format(tmp_path) in message


def test_damaged_files_are_named_even_when_bad_rows_are_skipped(tmp_path):
    rows = [verl(f"{os.urandom(40).hex()}?", str(i)) for i in range(2000)]
    lines, table = (write_rows(tmp_path / name, rows) for name in ("a.jsonl.gz", "a.parquet"))
    packed, whole = lines.read_bytes(), table.read_bytes()
    damaged = [
        (lines, packed[:-400], " after row"),
        (lines, packed[:2000] + b"\0" * 99 + packed[2099:], ""),  # it may show before the first row
        (lines, b"plain text", ", is it damaged"),
        *((table, left, "") for left in (whole[:-400], whole[:500], b"")),
        (table, whole[:2000] + b"\xff" * 5000 + whole[7000:], ""),
    ]
    for file, left, where in damaged:
        file.write_bytes(left)
        assert error(file, on_bad="skip").startswith(f"{file}: cannot be read{where}")


def test_parquet_without_the_columns_or_rows_or_with_one_twice(tmp_path):
    message = error(write_rows(tmp_path / "a.parquet", [{"text": "x", "label": 1}]), on_bad="skip")
    assert "a.parquet: has the columns text, label; needs the fields verl_row, or" in message
    schema = pa.schema([("problem", pa.string()), ("answer", pa.string())])
    pq.write_table(schema.empty_table(), tmp_path / "a.parquet")
    assert "no rows" in error(tmp_path / "a.parquet")
    twice = pa.Table.from_arrays([pa.array([x]) for x in "q12"], ["question", "answer", "answer"])
    pq.write_table(twice, tmp_path / "a.parquet")
    assert "two columns have the name 'answer'; rename one" in error(tmp_path / "a.parquet")


BAD_COLUMNS = ["a=a", "=a", "prompt", "answer", "prompt=", "source= ", "prompt=a.", "answer=.a"]
BAD_COLUMNS += ["source=a..b", "prompt=a,prompt=b", "source=a,prompt"]


@pytest.mark.parametrize("listed", BAD_COLUMNS)
def test_a_mapping_of_columns_is_whole_or_refused(listed):
    assert P.columns(" answer = a.b,, prompt=c ") == {"answer": "a.b", "prompt": "c"}
    with pytest.raises(
        ValueError, match=f"{re.escape(repr(listed))} is not of the form prompt=NAM"
    ):
        P.columns(listed)


def test_byte_order_mark_and_crlf(tmp_path):
    row = json.dumps(verl("x", "1")).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row)
    _, report = P.read(tmp_path / "a.jsonl")
    assert (report.rows, report.unique, report.duplicates) == (2, 1, 1)


def test_encode():
    four = [P.Problem(t, (("user", t),), "1", "s") for t in ("abc", "abcdef", "é", "abcd")]
    filtered = P.encode(four, Letters(), 4, chat=False)
    cut = P.encode(four, Letters(), 3, chat=True, on_long="left_truncate")
    texts = lambda got: ["".join(map(chr, row)) for row in got.ids]
    assert texts(filtered) == ["abc", "é", "abcd"] and filtered.n_long == 1
    assert texts(cut) == ["abc", "def", "\x01é", "bcd"] and cut.n_long == 3
    assert filtered.problems == [four[0], *four[2:]] and cut.problems == four


def test_encode_joins_messages_without_chat_and_refuses_what_does_not_fit():
    encode = lambda *messages, most=9: P.encode(
        [P.Problem("q", messages, "1", "s")], Letters(), most, chat=False
    )
    assert encode(("system", "ab"), ("user", "c")).ids == [[97, 98, 10, 99]]
    with pytest.raises(ValueError, match="s: all 1 prompts are longer than 1 tokens; raise"):
        encode(("user", "abc"), most=1)
    with pytest.raises(ValueError, match="problem q: the tokenizer makes no token"):
        encode(("user", "~"))


def test_stream_covers_each_epoch_once_in_an_order_of_seed_and_position():
    # Pinned: a Grain release that shuffles otherwise would change resumed runs.
    pinned = [39, 38, 27, 36, 35, 48, 42, 28, 47, 2]
    stream = P.stream(range(50), seed=0)
    assert [stream[i] for i in reversed(range(10))] == pinned[::-1]
    assert stream[10**12 + 7] == P.stream(range(50), seed=0)[10**12 + 7]
    orders = [P.stream(range(30), seed) for seed in range(5)]
    epochs = {tuple(order[e * 30 + i] for i in range(30)) for order in orders for e in range(5)}
    assert len(epochs) == 25  # no seed is a shifted copy of another
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert [P.stream(["one"], seed=3)[i] for i in range(3)] == ["one"] * 3
    with pytest.raises(ValueError, match="no problems"):
        P.stream([], seed=1)


def test_inspect(tmp_path, capsys):
    made = [("abc", "-7"), ("abc", "-7"), ("x" * 50, "12"), ("y", "1"), ("y", "2"), ("q", "pi")]
    rows = [verl(*pair) for pair in [*made, ("\x1b[31mred", LONG)]]
    rows[0]["data_source"] = "\x1b]0;title\x07"
    assert data.main(["inspect", str(write_rows(tmp_path / "a.jsonl", rows))]) == 0
    out, err = capsys.readouterr()
    numbers = dict(line.split()[:2] for line in out.splitlines()[:12] if line[:1].strip())
    assert numbers["answers"] == "-7" and numbers["characters"] == "p0"
    counts = {"rows": 7, "unique": 5, "duplicates": 2, "conflicts": 1, "refused": 1, "kept": 3}
    assert {k: int(numbers[k]) for k in counts} == counts
    assert "a.jsonl row 6: reward_model.ground_truth = 'pi': not an integer" in out
    assert "p0 3  p50 8  p90 50  p99 50  p100 50" in out
    assert out.count("--- problem") == 3 and "as plain text\nabc" in out and not err
    assert "\\u{1b}[31mred" in out and not {"\x1b", "\x07"} & set(out)


INSPECT_ERRORS = ["b.jsonl", "a.jsonl", "a.jsonl --chat_template=x", "a.jsonl --tokenizer={}"]
INSPECT_ERRORS += ["c.jsonl --columns=prompt=nothing", "c.jsonl --columns=prompt=a,prompt=b"]


@pytest.mark.parametrize("flags", INSPECT_ERRORS)
def test_inspect_errors_are_one_line(tmp_path, capsys, flags):
    write_rows(tmp_path / "a.jsonl", [verl("q", "pi")])
    write_rows(tmp_path / "c.jsonl", [verl("q", "1")])
    assert data.main(["inspect", *f"{tmp_path}/{flags}".format(tmp_path).split()]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1


def test_inspect_survives_a_closed_pipe(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    file = write_rows(tmp_path / "a.jsonl", [verl("q", "1")])
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert data.main(["inspect", str(file)]) == 0
