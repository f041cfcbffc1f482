"""A start fetches nothing twice, and nothing at all that a checkpoint has."""

import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from absl import flags
from jax.experimental.compilation_cache import compilation_cache

from dapo_jax import config, parallel
from dapo_jax.checkpoint import workdir
from dapo_jax.data import arithmetic
from dapo_jax.hosts import start
from dapo_jax.model import hf, qwen2


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder that is the hub, with org/tiny in it: random weights of the base config's shape."""
    folder = tmp_path_factory.mktemp("hub")
    words = arithmetic.write(tmp_path_factory.mktemp("data"), train=64, heldout=16).tokenizer.parent
    shape = qwen2.shape_from_config(config.base())
    (folder / "org").mkdir()
    params = qwen2.init(shape, jax.random.key(0))
    hf.save(folder / "org" / "tiny", shape, params, tokenizer_dir=words)
    return folder


@pytest.fixture
def asked(hub, monkeypatch):
    """The patterns of each call of the hub."""
    calls = []

    def snapshot_download(name, allow_patterns):
        calls.append(allow_patterns)
        return str(hub / name)

    monkeypatch.setattr(hf.huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def named(path="org/tiny", init_from=""):
    c = config.base()
    c.model.path, c.init_from = str(path), init_from
    return c


def found(config, folder) -> pathlib.Path | None:
    home = workdir.open_workdir(folder)
    return start.model_directory(config, home, home.checkpoints)


def test_the_hub_is_asked_once_and_not_where_there_is_a_checkpoint(hub, asked, tmp_path):
    assert found(named(), tmp_path / "run") == hub / "org/tiny" and "*.safetensors" in asked[0]
    kept = {p.name for p in (tmp_path / "run/base").iterdir()}
    assert "config.json" in kept and "model.safetensors" not in kept
    (tmp_path / "run/checkpoints/7").mkdir(parents=True)
    again = found(named(), tmp_path / "run")
    assert again == tmp_path / "run/base" and len(asked) == 1
    assert hf.read_shape(again) == hf.read_shape(hub / "org/tiny")
    (again / "model_path").unlink()  # a kill while they were copied
    max(again.iterdir()).unlink()
    found(named(), tmp_path / "run")
    assert {p.name for p in again.iterdir()} == kept
    found(named(init_from="runs/a/checkpoints"), tmp_path / "other")  # weights that others give
    assert len(asked) == 3 and "*.safetensors" not in [*asked[1], *asked[2]]
    assert found(config.base(), tmp_path / "other") is None
    own = found(named(hub / "org/tiny"), tmp_path / "own")
    assert own == hub / "org/tiny" and len(asked) == 3 and not (tmp_path / "own/base").exists()


def test_another_model_s_small_files_are_not_used(hub, asked, tmp_path):
    shutil.copytree(hub / "org/tiny", hub / "org/other", dirs_exist_ok=True)
    (tmp_path / "run/checkpoints/7").mkdir(parents=True)
    found(named(), tmp_path / "run")
    assert found(named("org/other"), tmp_path / "run") == hub / "org/other" and len(asked) == 2
    assert found(named("org/other"), tmp_path / "run") == tmp_path / "run/base" and len(asked) == 2


def test_a_model_in_a_bucket(hub, bucket):
    shutil.copytree(hub / "org/tiny", bucket / "tiny")
    (bucket / "tiny/optimizer.bin").write_text("not wanted")
    whole = hf.resolve("gs://b/tiny")
    assert hf.read_shape(whole) == hf.read_shape(hub / "org/tiny")
    names = {p.name for p in whole.iterdir()}
    assert "model.safetensors" in names and "optimizer.bin" not in names
    small = {p.name for p in hf.resolve("gs://b/tiny", weights=False).iterdir()}
    assert small == names - {"model.safetensors"}
    with pytest.raises(ValueError, match="^gs://b/none: no directory of config.json and safetens"):
        hf.resolve("gs://b/none")


@pytest.fixture
def cache(monkeypatch):
    """`cache(home, processes, given, alike)`: (directory, whether programs are handed on)."""
    names = ("jax_compilation_cache_dir", "jax_share_binary_between_hosts")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(compilation_cache, "reset_cache", lambda: None)
    monkeypatch.setattr(start, "_retry_reads", lambda where: None)

    def begin(home, processes, given, alike):
        monkeypatch.setattr(start, "_alike", lambda: alike)
        jax.config.update(names[0], given)
        jax.config.update(names[1], False)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        start.share_programs(home)
        return tuple(getattr(jax.config, name) for name in names)

    yield begin
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_programs_are_kept(cache, tmp_path, bucket):
    (bucket / "x/xla").mkdir(parents=True)
    (bucket / "x/xla/jit_f-cache").write_text("large")
    here, there = (workdir.open_workdir(name) for name in (tmp_path / "run", "gs://b/x"))
    for *asked, kept_in, handed_on in (
        (here, 1, None, True, None, False),
        (here, 4, None, True, f"{tmp_path}/run/xla", True),
        (there, 1, None, True, "gs://b/x/xla", False),
        (there, 4, None, True, "gs://b/x/xla", True),
        (there, 4, "/of/each/host", True, "/of/each/host", False),  # process 0 alone finds anything
        (there, 4, "gs://b/cache", True, "gs://b/cache", True),
        # Hosts that call a program by other names would wait for what nobody makes.
        (here, 4, None, False, None, False),
    ):
        assert cache(*asked) == (kept_in, handed_on)
    workdir.send(there)
    assert not (there.local / "xla").exists() and (bucket / "x/xla/jit_f-cache").exists()


def test_a_broadcast_keeps_every_bit(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(parallel, "_PIECE", 1 << 10)
    pieces = []
    of_process_0 = lambda bits: pieces.append(bits.nbytes) or bits
    monkeypatch.setattr(parallel.multihost_utils, "broadcast_one_to_all", of_process_0)
    for x in (np.array([-0.0, math.nan, 1.5]), np.arange(5000, dtype=np.uint8), np.zeros((0, 3))):
        before = x.tobytes()
        parallel.broadcast(x)
        assert x.tobytes() == before
    assert set(pieces) == {1 << 10}


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_starts_that_come_to_nothing_are_counted(where, bucket, tmp_path, monkeypatch):
    """By all that a launcher has started since a checkpoint or a response was kept."""
    flags.FLAGS.mark_as_parsed()
    monkeypatch.setattr(flags.FLAGS["terminated_status"], "value", 75)
    name = str(tmp_path / "run") if where == "disk" else "gs://b/run"
    top = tmp_path / "run" if where == "disk" else bucket / "run"

    def starts(times: int) -> None:
        for _ in range(times):
            home = workdir.open_workdir(name)
            start.count(home, str(top / "checkpoints"))

    starts(start.MOST_STARTS)
    for progress in ("journal/000000.p.x", "journal/000000.p.y", "checkpoints/1/x"):
        (top / progress).parent.mkdir(parents=True, exist_ok=True)
        (top / progress).write_text("")
        starts(start.MOST_STARTS)
    (top / "journal/000000.p.y").write_text("a record")
    starts(start.MOST_STARTS)
    for _ in range(2):  # the second tells it, too
        with pytest.raises(ValueError, match=r"20 starts in a row .* remove .*starts\.json to"):
            starts(1)
    (top / "starts.json").write_text("{")  # cut off
    starts(start.MOST_STARTS)
    monkeypatch.setattr(flags.FLAGS["terminated_status"], "value", 0)
    starts(2)  # by hand
