"""Where wall time went: a pure function of recorded events, and the book that records them."""

import types

import pytest

from dapo_jax.log import goodput


def ledger(*events) -> goodput.Ledger:
    """events: (time, name, other fields)."""
    out = goodput.Ledger()
    for time, name, *more in events:
        out = goodput.add(out, {"time": time, "event": name, **(more[0] if more else {})})
    return out


def step(at: float, n: int, compile_s: float = 0.0) -> list[tuple]:
    """6 s of sampling, 3 of updating, 1 of saving from `at` on."""
    compiled = {"compile_s": compile_s} if compile_s else {}
    return [
        (at, "rollout"), (at + 6, "update", compiled), (at + 9, "step", {"step": n}),
        (at + 9.5, "save"),
    ]  # fmt: skip


FIRST = [
    (0, "start-up"),
    (8, "resume", {"step": 0, "compile_s": 3.0}),
    (8, "evaluation"),
    (10, "save"),
]


def lost(**seconds) -> dict[str, float]:
    return dict.fromkeys(goodput.LOST, 0.0) | seconds


def test_a_run_left_alone():
    got = ledger(*FIRST, *step(12, 1, 4.0), *step(22, 2), (32, "leave", {"finished": True}))
    assert got.steps == {1: 5, 2: 9} and got.starts == 1
    assert got.lost == lost(start=5, compile=7, evaluation=2, save=4)
    assert got.shares()["time/goodput"] == 14 / 32
    assert sum(got.shares().values()) == pytest.approx(1)


def test_cut_off_taken_away_and_done_again():
    """Told to leave within step 3; away for 100 s; goes on after step 1, so 2 is done again; killed
    within it, and nobody knows when."""
    events = [
        *FIRST, *step(12, 1), *step(22, 2), (32, "rollout"), (36, "leave", {"finished": False}),
        (136, "start-up"), (140, "resume", {"step": 1}), *step(140, 2), (150, "rollout"),
        (210, "start-up"), (215, "resume", {"step": 2}), *step(215, 3),
        (225, "leave", {"finished": True}),
    ]  # fmt: skip
    got = ledger(*events)
    assert got.steps == {1: 9, 2: 9, 3: 9} and got.starts == 3
    assert got.lost == lost(
        restart=9 + 4 + 60, away=100, start=5 + 4 + 5, compile=3, evaluation=2, save=6
    )
    assert sum(got.steps.values()) + sum(got.lost.values()) == 225
    assert goodput.summary(got) == (
        "  wall time 0.06 h in 3 starts: 12.0% in steps that count (goodput), 44.4% no process,"
        " 32.4% steps done again or cut off, 6.2% start-up, 2.7% saving, 1.3% compilation,"
        " 0.9% evaluation"
    )


def test_the_time_after_a_finished_run_is_nobody_s():
    done = [*FIRST, *step(12, 1), (22, "leave", {"finished": True})]
    again = [(9000, "start-up"), (9004, "resume", {"step": 1}), *step(9004, 2)]
    assert sum(ledger(*done, *again).lost.values()) == 22 - 9 + 4 + 0.5


def test_a_clock_that_is_set_back_takes_nothing_away():
    got = ledger(*FIRST, (12, "rollout"), (5, "update"), (20, "step", {"step": 1}))
    assert got.steps == {1: 8} and min(got.lost.values()) == 0


def test_compilation_is_never_more_than_the_time_there_was():
    got = ledger((0, "start-up"), (4, "resume", {"step": 0, "compile_s": 99.0}))
    assert got.lost == lost(compile=4)


def test_without_any_time_there_are_no_shares():
    assert goodput.Ledger().shares() == {}
    assert "0.00 h" in goodput.summary(ledger((1, "start-up")))


def test_the_book_goes_on_where_the_last_one_was_cut_off(tmp_path, monkeypatch):
    clock = iter([10.0, 11.0, 12.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(goodput.time, "time", lambda: next(clock))
    state = types.SimpleNamespace(counters=types.SimpleNamespace(step=1))
    book = goodput.Book(tmp_path, began=9.0)
    book.note("resume", step=0)
    book.phase("rollout")
    book.step(state, None)
    file = tmp_path / "events.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"time": 13, "eve')
    cut = file.read_text()
    again = goodput.Book(tmp_path, began=15.0)
    assert file.read_text() == cut  # nothing is touched before it is known where this one begins
    again.note("resume", step=1)
    assert again.ledger.steps.keys() == {1} and again.ledger.starts == 2
    assert again.ledger == goodput.read(file)  # what is in memory is what is on disk
    assert file.read_text().startswith(whole)


def test_compilation_is_counted(tmp_path):
    import jax

    book = goodput.Book(tmp_path, goodput.time.time())
    jax.jit(lambda x: x * 3 + len(str(tmp_path)))(1.0)
    book.note("resume", step=0)
    assert 0 < book.ledger.lost["compile"] < 60
