"""The seal tells a whole step directory from any other; the content knows every bit of an array."""

import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from dapo_jax.checkpoint import checkpoint, seal
from dapo_jax.dapo.state import State


@pytest.fixture
def step(tmp_path):
    """A whole step directory as Orbax leaves it."""
    state = State({"w": jnp.arange(9.0)}, {"m": jnp.zeros(2)}).count(step=12)
    with checkpoint.manager(tmp_path / "c", keep=2) as m:
        checkpoint.save(m, state, {})
    return epath.Path(tmp_path / "c" / "12")


def all_files(step):
    return [p for p in pathlib.Path(step).rglob("*") if p.is_file()]


def test_every_damage_to_any_file_breaks_the_seal(step):
    seal.check(step)
    rng = random.Random(0)
    assert len(all_files(step)) > 15
    for file in all_files(step):
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        versions = [b"", data[:-1], data[: len(data) // 2], None]
        if file.name != "commit_success.txt":  # nothing reads the path that Orbax notes in it
            versions += [data + b"\n", bytes(flipped)]
        for version in versions:
            file.unlink()
            if version is not None:
                file.write_bytes(version)
            committed = file.name == "_CHECKPOINT_METADATA" and version in (
                data + b"\n",
                bytes(flipped),
            )
            if not committed:  # a JSON that says the same, or another time of the commit
                with pytest.raises(seal.Damaged):
                    seal.check(step)
            file.write_bytes(data)
        seal.check(step)


def test_what_does_not_belong_breaks_the_seal(step):
    (step / "arrays" / "more").write_text("x")
    with pytest.raises(seal.Damaged, match="arrays/more does not belong to it"):
        seal.check(step)


def test_large_files_are_sealed_by_their_size(step, monkeypatch):
    monkeypatch.setattr(seal, "HASHED", 100)
    (step / seal.SEAL).unlink()
    seal.write(step)
    seal.check(step)
    (large,) = (step / "state").glob("metadata")
    data = large.read_bytes()
    large.write_bytes(data[::-1])
    seal.check(step)  # `content` is there for that
    large.write_bytes(data[:-1])
    with pytest.raises(seal.Damaged, match="state/metadata is not what was written"):
        seal.check(step)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_content_sees_every_bit_of_every_element(dtype):
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.integers(0, 100, (3, 5)), dtype))
    number = seal.content({"a": {"x": jnp.asarray(x)}})["a.x"]
    for element in range(x.size):
        for bit in range(8 * x.itemsize):
            raw = bytearray(x.tobytes())
            raw[element * x.itemsize + bit // 8] ^= 1 << bit % 8
            y = np.frombuffer(bytes(raw), x.dtype).reshape(x.shape)
            assert seal.content({"a": {"x": jnp.asarray(y)}})["a.x"] != number


def test_content_does_not_know_the_mesh():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    assert seal.content({"x": jnp.asarray(x)}) == seal.content({"x": jax.device_put(x, spread)})


def test_digest_sees_names_types_shapes_and_values():
    x = np.arange(6, dtype=np.int32)
    others = [{"y": x}, {"x": x.astype(np.int64)}, {"x": x.reshape(2, 3)}, {"x": x[::-1]}, {}]
    assert len({seal.digest(o) for o in [{"x": x}, *others]}) == 6
