"""Where wall time went: a pure function of recorded events, and the book that records them."""

import json
import resource
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


RESUMED = {"step": 0, "compile_s": 3.0}
FIRST = [(0, "start-up"), (8, "resume", RESUMED), (8, "evaluation"), (10, "save")]


def lost(**seconds) -> dict[str, float]:
    return dict.fromkeys(goodput.LOST, 0.0) | seconds


def test_cut_off_taken_away_and_done_again():
    """Told to leave within step 3; away for 100 s; goes on after step 1, so 2 is done again; killed
    within it, and nobody knows when. The time after the finished run is nobody's."""
    events = [
        *FIRST, *step(12, 1, 4), *step(22, 2), (32, "rollout"), (36, "leave", {"finished": False}),
        (136, "start-up"), (140, "resume", {"step": 1}), *step(140, 2), (150, "rollout"),
        (210, "start-up"), (215, "resume", {"step": 2}), *step(215, 3),
        (225, "leave", {"finished": True}), (9000, "start-up"), (9004, "resume", {"step": 3}),
    ]  # fmt: skip
    got = ledger(*events)
    assert got.steps == {1: 5, 2: 9, 3: 9} and got.starts == 4
    assert got.lost == lost(
        restart=9 + 4 + 60, away=100, start=5 + 4 + 5 + 4, compile=3 + 4, save=6
    )
    assert got.evaluated == {0: 2}
    assert sum(got.steps.values()) + 2 + sum(got.lost.values()) == 225 + 4
    assert got.shares()["time/goodput"] == 25 / 229
    assert sum(got.shares().values()) == pytest.approx(1)
    assert goodput.summary(got) == (
        "  wall time 0.06 h in 4 starts: 10.9% in steps that count (goodput; 0.9% their"
        " evaluations), 43.7% no process, 31.9% what was done again or cut off, 7.9% start-up,"
        " 3.1% compilation, 2.6% saving"
    )


def test_an_evaluation_counts_once_and_with_its_step():
    """Cut off before the first step, and once more after a step that is done again."""
    later = [(35, "resume", {"step": 0}), (35, "evaluation"), (38, "save"), *step(40, 1)[:3]]
    first = ledger(*FIRST[:3], (10, "leave", {"finished": False}), (30, "start-up"), *later)
    assert first.evaluated == {0: 3} and first.lost["restart"] == 2
    cut = [(49, "evaluation"), (54, "leave", {"finished": False}), (60, "start-up")]
    again = ledger(*FIRST, *step(40, 1)[:3], *cut, (61, "resume", {"step": 0}))
    assert again.evaluated == {0: 2} and again.steps == {}
    undone = ledger(*FIRST, *step(40, 1)[:3], *cut[:2])
    assert undone.evaluated == {0: 2, 1: 5}
    assert again.lost["restart"] == undone.lost["restart"] + 9 + 5


def redone(*kept_of_step) -> goodput.Ledger:
    """Step 1, and 4 s of sampling of step 2; then both (or 2 alone), 10 s away, once more."""
    first, *rest = kept_of_step
    again = [(38, "start-up"), (40, "resume", {"step": 2 - len(kept_of_step)})]
    for n, kept in enumerate((first, *rest), 3 - len(kept_of_step)):
        at = 30 + 10 * n
        again += [*step(at, n)[:2], (at + 9, "step", {"step": n, "kept": kept})]
    cut = [(22, "rollout"), (26, "leave", {"finished": False})]
    return ledger(*FIRST, *step(12, 1), *cut, *again)


# 6 s drew the other three quarters; no more counts than there was.
@pytest.mark.parametrize(("kept", "counted"), [(0.0, 0.0), (0.25, 2.0), (0.6, 4.0), (1.0, 4.0)])
def test_what_the_journal_kept_of_a_step_that_was_cut_off_counts(kept, counted):
    got = redone(kept)
    assert got.steps == {1: 9, 2: 9 + counted}
    assert got.lost["restart"] == 4 - counted
    gone = sum(got.lost.values()) + sum(got.steps.values()) + got.evaluated[0]
    assert gone == got.since  # nothing is counted twice


def test_of_a_step_that_is_undone_its_sampling_counts_and_its_update_does_not():
    """Step 1 was whole, 6 s of sampling and 3 of updating; no checkpoint held it."""
    got = redone(1.0, 0.0)
    assert got.steps == {1: 9 + 6, 2: 9} and got.lost["restart"] == 3 + 4
    assert not {1, 2} & got.undone.keys()
    # Of the minute until the next start of a killed run 6 s count: the kept half would take them.
    again = [(72, "start-up"), (75, "resume", {"step": 0}), *step(75, 1)[:2]]
    got = ledger(*FIRST, (12, "rollout"), *again, (84, "step", {"step": 1, "kept": 0.5}))
    assert got.steps == {1: 9 + 6} and got.lost["restart"] == 60 - 6


def test_an_event_of_a_long_run_copies_nothing():
    got = ledger(*FIRST, *step(12, 1))
    parts = (got.steps, got.evaluated, got.lost, got.sampled, got.undone)
    got = goodput.add(got, {"time": 23.0, "event": "rollout"})
    now = (got.steps, got.evaluated, got.lost, got.sampled, got.undone)
    assert all(a is b for a, b in zip(parts, now, strict=True))


def test_odd_clocks():
    """Set back; more compilation than there was time; no time at all."""
    got = ledger(*FIRST, (12, "rollout"), (5, "update"), (20, "step", {"step": 1}))
    assert got.steps == {1: 8} and min(got.lost.values()) == 0
    got = ledger((0, "start-up"), (4, "resume", {"step": 0, "compile_s": 99.0}))
    assert got.lost == lost(compile=4)
    assert goodput.Ledger().shares() == {}
    assert "0.00 h" in goodput.summary(ledger((1, "start-up")))


def test_the_book_goes_on_where_the_last_one_was_cut_off(tmp_path, monkeypatch):
    clock = iter([10.0, 11.0, 12.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(goodput.time, "time", lambda: next(clock))
    state = types.SimpleNamespace(counters=types.SimpleNamespace(step=1))
    record = types.SimpleNamespace(stats=types.SimpleNamespace(tokens=8, replayed=2))
    book = goodput.Book(tmp_path, began=9.0)
    book.note("resume", step=0)
    book.phase("rollout")
    book.step(state, record)
    file = tmp_path / "events.jsonl"
    assert json.loads(file.read_text().splitlines()[-1])["kept"] == 0.25
    whole = file.read_text()
    file.write_text(whole + '{"time": 13, "eve')
    cut = file.read_text()
    again = goodput.Book(tmp_path, began=15.0)
    assert file.read_text() == cut  # nothing is touched before it is known where this one begins
    again.note("resume", step=1)
    assert again.ledger.steps.keys() == {1} and again.ledger.starts == 2
    assert again.ledger == goodput.read(file)  # what is in memory is what is on disk
    assert file.read_text().startswith(whole)


def test_a_full_disk_loses_the_events_that_it_refuses_alone(tmp_path):
    book, file = goodput.Book(tmp_path, began=9.0), tmp_path / "events.jsonl"
    book.note("resume", step=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 9, limits[1]))
    try:
        book.note("rollout")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.read_text().endswith("\n")  # it was cut off
    book.note("step", step=1)
    assert goodput.read(file).step == 1
