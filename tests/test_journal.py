"""What was finished is drawn once: read back bit for bit, and never where it does not belong."""

import errno
import os
import pathlib
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from etils import epath
from test_engine import DRAW, SHAPE, assert_same_bits, make_engine

from dapo_jax import algorithm, config
from dapo_jax.build import Machine
from dapo_jax.checkpoint import remembered
from dapo_jax.checkpoint.journal import Journal
from dapo_jax.checkpoint.workdir import Workdir
from dapo_jax.dapo.state import State
from dapo_jax.dapo.update import Batch
from dapo_jax.data.problems import Problem
from dapo_jax.hosts.leaving import Leave
from dapo_jax.model import qwen2
from dapo_jax.reward import grading
from dapo_jax.reward.grading import Grade, Judge
from dapo_jax.rollout.engine import UNWATCHED, Request

REQUESTS = [Request([p + 1, 2, 3], 10 + p, g) for p in range(6) for g in range(4)]


@pytest.fixture(scope="module")
def params():
    return jax.jit(qwen2.init, static_argnums=0)(SHAPE, jax.random.key(1))


@pytest.fixture(scope="module")
def draw(params):
    """`draw(journal, ...)`: (responses, numbers of the sampler) with the journal as the store."""
    engine, policy = make_engine(chunk=4), params

    def draw(journal, params=policy, check=lambda: None, draw=DRAW, requests=REQUESTS, **observer):
        watch = UNWATCHED._replace(**observer)
        watch = remembered.watch(watch, journal, check) if journal else watch
        machine = Machine(*[None] * 4, engine, None, {}, watch=watch)
        return engine.generate(machine.decode_params(params), requests, draw, machine.watch)

    return draw


@pytest.fixture(scope="module")
def whole(draw):
    """What nothing happened to."""
    return draw(None)


def opened(folder, say=print, step=3, remote=None, inputs=None, **fields) -> Journal:
    c = config.base()
    c.update(fields)
    home = Workdir(str(folder), folder, remote, {})
    return Journal(home, c, inputs or {"data": "d"}, step, say)


def cut(draw, journal, chunks, each=lambda: None) -> None:
    """Break off drawing after so many chunks, and close the journal. each: called before each
    chunk."""
    left = iter(range(chunks - 1))

    def check():
        each()
        if next(left, None) is None:
            raise Leave

    with journal, pytest.raises(Leave):
        draw(journal, check=check)


def files(folder) -> list[pathlib.Path]:
    return sorted((folder / "journal").glob("*"))


def leave_only(file) -> None:
    for other in {*file.parent.iterdir()} - {file}:
        other.unlink()


def test_what_was_finished_is_not_drawn_again(draw, whole, tmp_path):
    """Cut twice, then whole, then all from the journal. `progress` follows the chunks alone: the
    watchdog takes it for a sign of life of the sampler."""
    drawn, said = [], []
    for chunks in (4, 5):
        cut(draw, opened(tmp_path), chunks)
    for _ in range(2):
        told = []
        with opened(tmp_path, said.append) as journal:
            responses, stats = draw(journal, progress=told.append)
        assert_same_bits(responses, whole[0])
        assert stats.tokens == whole[1].tokens == sum(len(r.tokens) for r in responses)
        assert len(told) == stats.chunks and sum(told) < len(REQUESTS)
        drawn.append(stats.tokens - stats.replayed)
    assert 0 < drawn[0] < 0.8 * whole[1].tokens and drawn[1] == 0 == stats.chunks
    assert stats.occupancy == 0
    assert said[-1] == f"step 4: {len(REQUESTS)} responses or grades are there already"


def changes(params):
    """(fields and inputs of the journal, arguments of `draw`) under which nothing is found."""
    for settings in (dict(seed=1), {"model.dtype": "bfloat16"}, {"rollout.slots": 8}):
        yield settings, {}
    yield dict(inputs={"data": "other"}), {}
    for change in (dict(seed=6), dict(temperature=0.8), dict(stop_strings=("x",))):
        yield {}, dict(draw=DRAW._replace(**change))
    for change in (
        lambda r: r._replace(stream=r.stream + 100), lambda r: r._replace(sample=r.sample + 4),
        lambda r: r._replace(prompt=[*r.prompt, 4]), lambda r: r._replace(limit=5),
    ):  # fmt: skip
        yield {}, dict(requests=[change(r) for r in REQUESTS])
    yield {}, dict(params=jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1e-6), params))


def test_what_belongs_to_others_is_never_found(draw, params, tmp_path):
    with opened(tmp_path) as journal:  # each write is appended to the one file
        draw(journal, progress=lambda _: journal.flush())
    (file,) = files(tmp_path)
    for settings, arguments in changes(params):
        with opened(tmp_path, **settings) as journal:
            _, stats = draw(journal, **arguments)
        assert stats.replayed == 0 < stats.tokens
        leave_only(file)
    free = {"steps": 7, "eval.k": 9, "checkpoint.every": 3, "log.samples": 1, "guard.stop_after": 2}
    with opened(tmp_path, **free) as journal:  # they change no response
        _, stats = draw(journal)
    assert stats.replayed == stats.tokens
    other = jax.tree.map(lambda x: x + 1, params)
    with opened(tmp_path) as journal:
        draw(journal, other)
    (file_of_other,) = {*files(tmp_path)} - {file}
    file.rename(file_of_other)  # a name alone is not trusted
    with opened(tmp_path) as journal:
        _, stats = draw(journal, other)
    assert stats.replayed == 0 < stats.tokens


def test_a_file_that_is_cut_or_damaged_loses_its_records_alone(draw, whole, tmp_path):
    with opened(tmp_path) as journal:
        draw(journal)
    (file,) = files(tmp_path)
    data, rng = file.read_bytes(), np.random.default_rng(0)
    places = rng.integers(0, len(data), 12)
    broken = [data[: rng.integers(len(data))] for _ in range(6)]
    broken += [data[:i] + bytes([data[i] ^ 255]) + data[i + 1 :] for i in places]
    kept = []
    for text in [*broken, b"", bytes(100), data[:-1] + data]:
        file.write_bytes(text)
        with opened(tmp_path) as journal:
            responses, stats = draw(journal)
        assert_same_bits(responses, whole[0])
        kept.append(stats.replayed)
        leave_only(file)
    assert kept[-1] > 0 and max(kept[:-3]) > 0.9 * whole[1].tokens and kept[-3:-1] == [0, 0]


def test_files_go_when_a_checkpoint_holds_what_they_led_to(draw, params, tmp_path):
    said, other = [], jax.tree.map(lambda x: x + 1, params)
    with opened(tmp_path, said.append, step=3) as journal:
        draw(journal)
        journal.at(4)
        draw(journal, other)
        journal.flush()
        assert [f.name[:7] for f in files(tmp_path)] == ["000003.", "000004."]
        journal.covered(4)
    assert [f.name[:7] for f in files(tmp_path)] == ["000004."]
    with opened(tmp_path, step=5) as journal:
        journal.covered(5)
    assert files(tmp_path) == [] == said


def test_files_are_not_removed_while_others_are_added(tmp_path):
    journal = opened(tmp_path)
    tidy = threading.Thread(target=journal._tidy)
    with journal._writing:
        tidy.start()
        tidy.join(0.1)
        assert tidy.is_alive()
    tidy.join()


def test_beyond_the_limit_nothing_is_kept_and_nothing_ends(draw, whole, tmp_path):
    with opened(tmp_path) as journal:
        draw(journal)
    (file,) = files(tmp_path)
    said, limit = [], {"checkpoint.journal_gb": 1.5 * file.stat().st_size / 1e9}
    with opened(tmp_path, said.append, step=9, inputs={"data": "other"}, **limit) as journal:
        responses, _ = draw(journal)
    assert_same_bits(responses, whole[0])
    assert files(tmp_path) == [file]
    assert len(said) == 1 and "config.checkpoint.journal_gb allows no more" in said[0]


def test_a_full_disk_gets_no_file_at_each_try(tmp_path, monkeypatch):
    said, counts = [], []
    journal = opened(tmp_path, said.append)
    monkeypatch.setattr(journal, "_policy", "p")
    for failing in (False, True, True, True, False):
        wrong = OSError(errno.ENOSPC, "No space left on device") if failing else None
        monkeypatch.setattr(os, "fsync", Mock(side_effect=wrong))
        journal.put(bytes(16), b"x")
        journal.flush()
        counts.append(len(files(tmp_path)))
    assert counts == [1, 1, 1, 1, 2] and len(said) == 1


def test_in_a_bucket_each_write_is_an_object(draw, whole, tmp_path, bucket):
    remote = epath.Path("gs://b/run")
    journal = opened(tmp_path, remote=remote)
    cut(draw, journal, 6, journal.flush)
    assert len(files(bucket / "run")) > 2 and not (tmp_path / "journal").exists()
    with opened(tmp_path, remote=remote) as journal:
        responses, stats = draw(journal)
        assert_same_bits(responses, whole[0])
        assert 0 < stats.replayed < stats.tokens
        journal.covered(99)
    assert files(bucket / "run") == []


def test_off_it_writes_and_asks_nothing(draw, whole, tmp_path):
    journal = opened(tmp_path, **{"checkpoint.journal_gb": 0.0})
    assert not journal.on
    responses, stats = draw(journal)
    cut(draw, journal, 2)  # a run still leaves between two chunks
    assert_same_bits(responses, whole[0])
    assert stats == whole[1] and not (tmp_path / "journal").exists()


def test_a_judge_of_one_s_own_is_asked_once(params, tmp_path):
    asked = []
    grades = {
        "number": np.float32(0.25),
        "bool": True,
        "grade": Grade(1 / 3, parts={"a": np.float64(1 / 3), "right": np.True_}),
    }

    def score(problem, response):
        asked.append(response)
        return grades[response]

    problem, said = Problem("q", (), "1", ""), []
    for _ in range(2):
        with opened(tmp_path) as journal:
            judge = remembered.judge(Judge(score), journal)
            journal.open(params)
            said.append(grading.said(judge, [(problem, tuple(grades))]))
    assert asked == [*grades] and said[0] == said[1]
    assert type(said[1][1].right) is bool and said[1][0] == Grade(0.25)
    with opened(tmp_path) as journal:
        rules = Judge(score, shadow=score)
        assert remembered.judge(rules, journal) is rules


def test_a_whole_record_of_other_content_is_damaged():
    grades = ["", "null", "3", "[]", "{", "[" * 90000, *(f'{{"score": 1, {x}}}' for x in (
        '"score": "1"', '"score": NaN', '"more": 1', '"right": 1', '"answer": 2', '"parts": [1]',
    ))]  # fmt: skip
    for text in grades:
        journal = SimpleNamespace(get=lambda _, text=text: text.encode(), key=lambda *_: b"")
        assert remembered.Grades(journal).get([(Problem("q", (), "1", ""), "said")]) == [None]
    nan = np.float32(np.nan).tobytes()
    minus = b"\0" + b"\xff" * 4 + bytes(8)
    numbers = [bytes(5) + x for x in (nan * 2, nan + bytes(4), bytes(4) + nan)]
    for odd in (b"", bytes(1), bytes(12), b"\2" + bytes(12), minus, *numbers):
        assert remembered._response(odd) is None
    assert remembered._response(bytes(13)).tokens == [0]


def test_on_other_devices_a_response_is_drawn_again_and_a_reply_is_not_asked_again(
    draw, whole, params, tmp_path, monkeypatch
):
    """It is on disk as soon as `keep` returns."""
    for devices in (jax.device_count(), 3):
        monkeypatch.setattr(jax, "device_count", lambda n=devices: n)
        with opened(tmp_path) as journal:
            store = remembered.Responses(journal)
            store.open(params)
            if devices != 3:
                store.put(REQUESTS[0], DRAW, whole[0][0])
                store.keep({b"who": b"what was said"})
                assert files(tmp_path)[0].read_bytes().endswith(b"what was said")
            found = store.recall(b"who"), store.get(REQUESTS[:1], DRAW)
    assert found == (b"what was said", [None])


@pytest.mark.parametrize(("old", "what"), [("reuse", "update"), ("recompute", "log-probs")])
def test_a_step_is_broken_off_between_two_programs(old, what):
    """Updates, and old log-probs before them. The one before is done by then."""
    done, loss = [], SimpleNamespace(old_logprobs=old)
    made = SimpleNamespace(block_until_ready=lambda: done.append("waited"))

    def check():
        if done.count(what) == 2:
            raise Leave

    trainer = SimpleNamespace(
        update=lambda params, opt_state, *_: done.append("update") or (params, opt_state, made),
        log_probs=lambda *_: done.append("log-probs") or made,
    )
    machine = Machine(*[None] * 3, trainer, None, None, {}, watch=UNWATCHED._replace(check=check))
    given = State(None, None), [Batch(*[None] * 4)] * 4, SimpleNamespace(temperature=1.0)
    with pytest.raises(Leave):
        algorithm.update_policy(loss, machine, *given)
    assert done == [what, "waited", what, "waited"]
