"""A warm start on worked examples of one's own: every form of row, what is refused, the same bits
each time. test_pages.py runs the page."""

import dataclasses
import json
import logging
import re
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import stubbed_train
from tables import cases, write_rows
from test_train import arrays, assert_same_bits, small

from dapo_jax import build, parallel, train
from dapo_jax.data import arithmetic, problems, tokenizer, worked
from dapo_jax.data.settings import Data
from dapo_jax.run import warmup

DATA = Data(max_prompt_tokens=8)
PLAIN = problems.Reading(template="{problem}")
PROMPT, RESPONSE = "f 4 g + 2 ?", "f 4 Answer: 6"
USER, SAID = {"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "tokenizer.model"
    arithmetic.write_tokenizer(file)
    return tokenizer.load(file)


def read(folder, rows, words, data=DATA, most=6, name="worked.jsonl"):
    return worked.read(str(write_rows(folder / name, rows)), words, False, data, most, PLAIN)


FORMS = [
    {"prompt": PROMPT, "response": RESPONSE},
    {"question": PROMPT, "prompt": "not this", "completion": RESPONSE, "level": 3},
    {"problem": PROMPT, "response": RESPONSE},
    {"prompt": [USER], "completion": [SAID]},
    {"messages": [USER, SAID]},
]


def test_every_form_of_row_is_the_same_pair(words, tmp_path):
    want = (words.encode(PROMPT), [*words.encode(RESPONSE), min(words.stop_ids)])
    assert read(tmp_path, FORMS, words) == ([want] * 5, "warm-up: 5 of 5 rows")
    for row in FORMS:
        pairs, _ = read(tmp_path, [row], words, name="worked.parquet")
        assert pairs == [want]


def test_rows_are_what_the_embedded_warm_up_is_made_of(words, tmp_path):
    traces = [t for t in arithmetic.traces(200, seed=3) if t.ends]
    rows = [dict(prompt=t.prompt, response=t.response) for t in traces]
    pairs, _ = read(tmp_path, rows, words, Data(), 32)
    assert pairs == list(warmup.encode(traces, words)) and len(pairs) > 100


@pytest.mark.parametrize("case", cases("worked_refused"), ids=lambda case: case["wrong"])
def test_a_bad_row_is_named_or_skipped(case, words, tmp_path):
    good, row = {"prompt": PROMPT, "response": RESPONSE}, case["row"]
    with pytest.raises(ValueError, match=r"/worked\.jsonl row 2: ") as error:
        read(tmp_path, [good, row], words)
    assert case["wrong"] in str(error.value) and "\n" not in str(error.value)
    skip = dataclasses.replace(DATA, on_bad="skip")
    pairs, note = read(tmp_path, [good, row], words, skip)
    assert len(pairs) == 1 and note.endswith("1 of 2 rows, 1 without a response that fits skipped")
    with pytest.raises(
        ValueError, match="no usable row .* 1 of 1 rows refused, .* the first: .* row 1: "
    ):
        read(tmp_path, [row], words, skip)


def test_long_prompts_go_by_data_on_long(words, tmp_path):
    rows = [{"prompt": p, "response": "f"} for p in ("f 4 g + 2 h - 3", "f 4 g + 2 h - 3 ?")]
    pairs, note = read(tmp_path, rows, words)
    assert len(pairs) == 1 and note.endswith("1 of 2 rows, 1 prompts over 8 tokens (filter)")
    pairs, _ = read(tmp_path, rows, words, dataclasses.replace(DATA, on_long="left_truncate"))
    assert pairs[1][0] == words.encode(rows[1]["prompt"])[-8:]


def test_foreign_columns_are_one_line(words, tmp_path):
    with pytest.raises(ValueError, match=r"a\.parquet: has the columns text; needs messages, or a"):
        read(tmp_path, [{"text": "f"}], words, name="a.parquet")


def test_chats_end_as_the_template_ends_them(assets, tmp_path):
    """And their prompts are those of training by reinforcement."""
    template = assets / "tokenizer" / "chat_template_qwen2.5_instruct.jinja"
    qwen = tokenizer.load(assets / "tokenizer" / "tokenizer.json", template)
    data = Data(max_prompt_tokens=200)
    row = {"prompt": "What is 2+2?", "response": "4, \\boxed{4}"}
    file, how = write_rows(tmp_path / "a.jsonl", [row]), problems.Reading(system="Be brief.")
    for chat, end in ((True, "<|im_end|>"), (False, "<|endoftext|>")):
        ((prompt, response),), _ = worked.read(str(file), qwen, chat, data, 50, how)
        rl = write_rows(tmp_path / "rl.jsonl", [{"prompt": row["prompt"], "answer": "4"}])
        same, _ = problems.read(rl, how=how)
        assert prompt == problems.encode(same, qwen, 200, chat).ids[0]
        assert qwen.decode(response, skip_special=False) == row["response"] + end


def mine(**changes):
    """The smallest config with a warm-up on worked.jsonl."""
    c = small(0)
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = -1, 1, 1
    c.supervised_warmup.files, c.data.template = "worked.jsonl", "plain"
    c.supervised_warmup.lr, c.supervised_warmup.batch, c.supervised_warmup.steps = 3e-3, 16, 40
    c.update({k.replace("__", "."): v for k, v in changes.items()})
    return c


@pytest.fixture
def sevens(tmp_path, monkeypatch):
    """48 rows, all of which answer 7, in the folder of the test, which is the current one."""
    monkeypatch.chdir(tmp_path)
    rows = [dict(prompt=t.prompt, response="Answer: 7") for t in arithmetic.traces(48)]
    write_rows(tmp_path / "worked.jsonl", rows)


@pytest.mark.slow
def test_a_run_imitates_with_the_same_bits_after_a_kill_and_reads_once(
    sevens, tmp_path, monkeypatch, capsys
):
    assert train.train(mine(), tmp_path / "a")
    assert "warm-up: 48 of 48 rows; 40 steps of 16" in capsys.readouterr().out
    schedule, steps = warmup.schedule, iter(range(6))

    def killed(done):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return schedule(done)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(warmup, "schedule", killed)
        train.train(mine(), tmp_path / "b")
    assert train.train(mine(), tmp_path / "b")
    assert_same_bits(*(arrays(tmp_path / run, 0)["params"] for run in "ab"))
    heard = [json.loads(line) for line in (tmp_path / "a/eval/step_000000.jsonl").open()]
    assert np.mean([e == "7" for row in heard for e in row["extracted"]]) > 0.9
    (tmp_path / "worked.jsonl").write_text("not read any more")
    assert train.train(mine(), tmp_path / "a")
    assert "resumed after step 0" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_step_runs_is_compiled_beside_the_warm_up(sevens, tmp_path, monkeypatch, caplog):
    """Once, and not by the thread that runs it; what a compilation raises ends the start."""
    c = mine(steps=1, supervised_warmup__steps=1)
    stubbed_train.forget_programs()
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        with caplog.at_level(logging.WARNING):
            assert train.train(c, tmp_path / "run", score=stubbed_train.JUDGE)
    finally:
        jax.config.update("jax_log_compiles", False)
    told = re.compile(r"Compiling jit\((\w+)\)")
    found = [(told.match(r.getMessage()), r.threadName) for r in caplog.records]
    by = [(name[1], thread) for name, thread in found if name]
    names = ("prefill", "decode_full", "decode_top_p", "_log_probs", "_update")
    assert sorted(n for n, _ in by if n in names) == sorted(names)
    assert {t for n, t in by if n in names}.isdisjoint(t for n, t in by if n == "_supervise")

    broken = Mock(**{"lower.side_effect": ValueError("of the compiler")})
    call = parallel.Call(broken, ())
    monkeypatch.setattr(build, "calls", lambda *arguments: {"update": call})
    with pytest.raises(ValueError, match="of the compiler"):
        train.train(c, tmp_path / "b")


def test_rows_are_read_before_weights_and_the_row_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "worked.jsonl", [{"prompt": PROMPT}])
    with pytest.raises(ValueError, match=r"^worked\.jsonl row 1: row = \['prompt'\]: needs"):
        train.train(mine(), tmp_path / "a")
    with pytest.raises(ValueError, match=r"config\.supervised_warmup\.files: none\.jsonl: no such"):
        train.train(mine(supervised_warmup__files="none.jsonl"), tmp_path / "b")


def test_all_rows_once_in_an_order_of_the_seed(words):
    rows = [([i], [i]) for i in range(10)]
    order = lambda seed, n: list(warmup.Shown("rows", 0, 0.0, rows, seed, 1).pairs(n, words))
    assert sorted(order(0, 10)) == rows and order(0, 10) == order(0, 25)[:10]
    assert sorted(order(0, 20)[10:]) == rows and order(0, 10) != order(1, 10)
