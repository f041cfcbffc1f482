"""What cannot be read is tried again and is never damage; what is damaged is set aside and kept."""

import collections
import functools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from etils.epath import backend

from dapo_jax.checkpoint import checkpoint, resume, retry, workdir
from dapo_jax.dapo.state import State
from dapo_jax.hosts import start


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds that were waited, in place of waiting."""
    waited = []
    monkeypatch.setattr(retry, "sleep", waited.append)  # not that of other threads
    return waited


def save(folder, *steps):
    with checkpoint.manager(folder, keep=9) as m:
        for step in steps:
            state = State({"w": jnp.arange(9.0) + step}, {"m": jnp.zeros(2)})
            checkpoint.save(m, state.count(step=step), {})


def newest(folder):
    """(step of the state that a resume finds, what it said)."""
    like = State({"w": jax.ShapeDtypeStruct((9,), "float32")}, {"m": jnp.zeros(2)})
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places, said = jax.tree.map(lambda _: here, like), []
    state = resume.newest(folder, like, places, lambda saved: None, said.append)
    assert state.params["w"][0] == state.counters.step
    return state.counters.step, said


class Unreachable(Exception):
    """As gcsfs raises a 503: no OSError."""

    __module__ = "gcsfs.retry"


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """`failing(times, error)`: each file's use fails so many times before it succeeds."""
    places = (str(tmp_path), "gs://")

    def fail(times, error):
        failures = collections.Counter()

        def wrap(self, real, path, *args, **kwargs):
            failures[str(path)] += 1
            if failures[str(path)] <= times and str(path).startswith(places):
                raise error
            return real(self, path, *args, **kwargs)

        for kind in (backend._OsPathBackend, type(backend.fsspec_backend)):
            for name in ("read_bytes", "read_text", "open", "listdir", "makedirs"):
                if real := getattr(kind, name, None):
                    monkeypatch.setattr(kind, name, functools.partialmethod(wrap, real))
        return failures

    return fail


ERRORS = [OSError(5, "Input/output error"), TimeoutError("slow"), Unreachable("503")]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_disk_that_fails_now_and_then_costs_seconds_and_no_checkpoint(
    tmp_path, failing, waits, capsys, error
):
    save(tmp_path / "c", 1, 2)
    failures = failing(2, error)
    assert newest(tmp_path / "c") == (2, [])
    assert any("seal.json" in path for path in failures)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "2"]
    assert not (tmp_path / "c.damaged").exists()
    assert waits[:2] == [1, 2]
    said = capsys.readouterr().err
    assert "warning: process 0: " in said and "cannot be read (" in said and "again in 2 s" in said


def test_a_disk_that_stays_away_ends_the_run_and_nothing_is_set_aside(tmp_path, failing, waits):
    save(tmp_path / "c", 1, 2)
    failing(10**9, ERRORS[0])
    with pytest.raises(OSError, match="cannot be read .*11 times .*no damage.*the same command"):
        newest(tmp_path / "c")
    assert tuple(waits) == retry.WAITS_S
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "2"]


def test_what_is_temporary_and_what_is_not():
    for error, temporary in (
        (ValueError('UNAVAILABLE: Error reading "gs://b/x": HTTP response code: 503'), True),
        (ValueError("UNKNOWN: Error reading local file: [OS error 5: EIO]"), True),
        (PermissionError(13, "Permission denied"), True),
        (ValueError("DATA_LOSS: checksum does not match"), False),
        (ValueError("NOT_FOUND: no such key"), False),
        (FileNotFoundError(2, "No such file"), False),
        (KeyError("UNKNOWN: a field"), False),
    ):
        wrapped = RuntimeError("while reading")
        wrapped.__cause__ = error
        assert retry.temporary(error) == retry.temporary(wrapped) == temporary


def test_a_second_damaged_one_of_a_step_does_not_replace_the_first(tmp_path):
    save(tmp_path / "c", 3)
    for name in ("4", "4.2", "4.3"):
        save(tmp_path / "c", 4)
        (tmp_path / "c" / "4" / "state" / "metadata").write_text(name)
        step, said = newest(tmp_path / "c")
        assert step == 3 and "checkpoint of step 4 is damaged" in said[0]
    kept = {p.parts[-3]: p.read_text() for p in tmp_path.glob("c.damaged/*/state/metadata")}
    assert kept == {name: name for name in ("4", "4.2", "4.3")}


def test_a_bucket_that_fails_now_and_then_opens_and_is_sent_to(bucket, failing):
    (bucket / "x").mkdir()
    (bucket / "x" / "metrics.jsonl").write_text("{}\n")
    failing(3, Unreachable("503"))
    home = workdir.open_workdir("gs://b/x")
    assert (home.local / "metrics.jsonl").read_text() == "{}\n"
    (home.local / "more").write_text("")
    failing(1, Unreachable("503"))
    with pytest.raises(OSError, match="503"):  # which the run answers by trying after the next step
        workdir.send(home)


def test_a_compiled_program_that_cannot_be_read_is_tried_again(waits, monkeypatch):
    """To JAX it would not be there; the host would wait for one that has it, who tells nobody."""

    class Cache:
        get = Mock(side_effect=[Unreachable("503"), Unreachable("503"), b"program"])

    cache = Cache()
    monkeypatch.setattr(start.jax_cache, "_get_cache", lambda client: cache)
    for _ in range(2):  # two runs of one process
        start._retry_reads("gs://b/x/xla")
    assert cache.get("jit_f") == b"program" and waits == [1, 2]
