"""Files as users have them: formats, patterns, the hub, published sets, answers made into integers.
test_pages.py runs their page."""

import datetime
import hashlib
import json
from decimal import Decimal

import hub
import pytest
from tables import cases, write_rows

from dapo_jax import build, config
from dapo_jax.config import validation
from dapo_jax.data import __main__ as data, integers, problems as P, prompts, published, rows
from dapo_jax.data.references import any_answer


def answers(name):
    return [p.answer for p in P.read(name)[0]]


@pytest.mark.parametrize("name", [f"a{s}" for s in rows.SUFFIXES])
def test_every_format_gives_the_same_problems(tmp_path, name):
    made = [{"question": "1, 2?\n3", "answer": "3"}, {"question": 'a "b"', "answer": "4.0"}]
    found, _ = P.read(write_rows(tmp_path / name, made))
    assert [p.messages for p in found] == [prompts.in_template(r["question"]) for r in made]
    assert [(p.answer, p.source) for p in found] == [("3", "a"), ("4", "a")]
    (tmp_path / "held.json").write_text(json.dumps({"version": 1, "data": made}))
    assert answers(tmp_path / "held.json") == ["3", "4"]


def test_patterns(tmp_path):
    for i in range(3):
        write_rows(tmp_path / f"{i}.jsonl", [{"problem": f"q{i}", "answer": i}])
    assert answers(f"{tmp_path}/[01].jsonl") == answers(f"{tmp_path}/**/[01].jsonl") == ["0", "1"]
    with pytest.raises(ValueError, match="x\\*.jsonl: no file of that pattern"):
        P.read(f"{tmp_path}/x*.jsonl")


@pytest.mark.parametrize("case", cases("any_answers"), ids=lambda case: str(case["value"]))
def test_answers_of_any_type(case):
    if case["text"] is not None:
        assert any_answer(case["value"]) == case["text"]
        return
    with pytest.raises(ValueError):
        any_answer(case["value"])


@pytest.mark.parametrize("value", [Decimal("0.50"), datetime.date(2024, 1, 2)])
def test_decimals_and_dates_of_parquet_are_text(value, tmp_path):
    file = write_rows(tmp_path / "a.parquet", [{"problem": "q", "answer": value}])
    assert P.read(file, how=P.Reading(any_answer))[0][0].answer == str(value)


def test_data_sets_of_the_hub(server, tmp_path, monkeypatch):
    url, served = server
    hub.asked_at(url, tmp_path / "hub", monkeypatch)
    names = ["README.md", "main/test.jsonl", "main/train-0.jsonl", "main/train-1.jsonl"]
    bodies = [json.dumps({"problem": f"q{i}", "answer": i}).encode() for i in range(4)]
    hub.put(served, "me/sums", dict(zip(names, bodies, strict=True)))
    assert answers("me/sums:main/train-*") == ["2", "3"]
    assert answers("me/sums@main:main/test.jsonl") == ["1"]
    with pytest.raises(ValueError, match=r"me/sums@old:\*: no such file, and not to be had"):
        answers("me/sums@old:*")
    with pytest.raises(ValueError, match=r"me/sums: say which file, as me/sums:FILE .*train-0"):
        answers("me/sums")
    with pytest.raises(ValueError, match=r"me/none: no such file, and not to be had as a data set"):
        answers("me/none")
    c = config.base()
    c.data.train = "me/sums:main/train-*,openai/gsm8k"
    assert validation.missing(c) == []
    c.data.train = "nothere/a.jsonl"
    assert validation.missing(c) == ["config.data.train: nothere/a.jsonl: no such file or folder"]
    (tmp_path / "lr=1").mkdir()
    for name in ("lr=1/a.jsonl", "a,b.jsonl"):
        (file := tmp_path / name).touch()
    c.data.train = str(file)
    line, *_ = validation.missing(c)
    assert line.endswith(
        "/a: no such file or folder (a comma begins another path: rename the one that has it)"
    )
    file = tmp_path / "lr=1" / "a.jsonl"
    c.data.train, c.eval.files = "", f"{file}, b={file}"
    assert validation.missing(c) == []
    assert build.named_files(c.eval.files) == {"a": str(file), "b": str(file)}


def test_prepare_fetches_checks_and_keeps(server, tmp_path, monkeypatch, capsys):
    url, served = server
    body, name = b'{"problem": "q", "answer": 1}\n', "aime25"
    digest, pinned = hashlib.sha256(body).hexdigest(), published.SETS[name]
    monkeypatch.setenv("DAPO_JAX_DATA_HOST", url)

    def prepared(*names: str) -> str:
        status = data.main(["prepare", *names, f"--out={tmp_path}"])
        out, err = capsys.readouterr()
        assert bool(status) == bool(err)
        return out + err

    assert "not to be had" in prepared(name)
    served[f"/{pinned.source}"] = body
    assert f"is another file: SHA-256 {digest}" in prepared(name)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(published.SETS, name, pinned._replace(sha256=digest))
    assert "1 problems of 1 rows, SHA-256 as pinned; 30 problems" in prepared(name)
    assert "(was there)" in prepared(name)
    (tmp_path / "aime25.jsonl").write_text('{"problem": "another", "answer": 1}\n')
    assert "(was there)" not in prepared(name)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("aime25.jsonl", body)]
    assert "aime23: no such set; there are dapo-math-17k, aime24" in prepared("aime23")
    assert "math500" in prepared()


@pytest.mark.parametrize("case", cases("answers_to_integers"), ids=lambda case: case["answer"])
def test_answers_become_integers(case):
    """Those without a form are left as they are."""
    made = integers.asked("Q", case["answer"])
    if case["form"] is None:
        assert made is None
        return
    problem, answer = made
    assert answer == str(case["sum"])
    assert problem.startswith(f"Q\n\nThe original answer is in the form ${case['form']}$, where ")


def test_integers_of_a_file(tmp_path, capsys):
    asked = [dict(problem=f"q{i}", answer=a) for i, a in enumerate(["7", "\\frac12", "x"])]
    roles = [("system", "Be brief."), ("user", "q0")]
    asked[0]["problem"] = [dict(role=role, content=text) for role, text in roles]
    file, out = write_rows(tmp_path / "a.jsonl", asked), tmp_path / "b.jsonl"
    assert data.main(["integers", str(file), str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 problems, of 1 the answer was transformed; 1 left out, 0 rows refused" in said
    seven, half = map(json.loads, out.read_text().splitlines())
    assert seven == dict(problem="q0", answer="7", original_answer="7", data_source="a")
    assert half["answer"] == "3" and half["problem"].startswith("q1\n\nThe original answer")
    assert answers(out) == ["7", "3"]
    assert data.main(["integers", str(file), str(tmp_path / "b.parquet")]) == 1
    assert "b.parquet: what is written are JSON lines; call" in capsys.readouterr().err
