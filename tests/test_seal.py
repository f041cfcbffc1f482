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
    with checkpoint.manager(tmp_path, keep=2) as m:
        checkpoint.save(m, state, {})
    return epath.Path(tmp_path / "12")


def flipped(data: bytes, bit: int) -> bytes:
    byte, mask = bit // 8, 1 << bit % 8
    return data[:byte] + bytes([data[byte] ^ mask]) + data[byte + 1 :]


def test_every_damage_to_any_file_breaks_the_seal(step):
    seal.check(step)
    rng, files = random.Random(0), [p for p in pathlib.Path(step).rglob("*") if p.is_file()]
    assert len(files) > 15
    for file in files:
        data = file.read_bytes()
        versions = [b"", data[:-1], data[: len(data) // 2], None]
        if file.name not in ("commit_success.txt", "_CHECKPOINT_METADATA"):  # nobody reads these
            versions += [data + b"\n", flipped(data, rng.randrange(8 * len(data)))]
        for version in versions:
            file.unlink()
            if version is not None:
                file.write_bytes(version)
            with pytest.raises(seal.Damaged):
                seal.check(step)
            file.write_bytes(data)
        seal.check(step)
    (step / "arrays" / "more").write_text("x")
    with pytest.raises(seal.Damaged, match="arrays/more does not belong to it"):
        seal.check(step)


def test_large_files_are_sealed_by_their_size(step, monkeypatch):
    monkeypatch.setattr(seal, "HASHED", 100)
    (step / seal.SEAL).unlink()
    seal.write(step)
    seal.check(step)
    large = step / "state" / "metadata"
    data = large.read_bytes()
    large.write_bytes(data[::-1])
    seal.check(step)  # `content` is there for that
    large.write_bytes(data[:-1])
    with pytest.raises(seal.Damaged, match="state/metadata is not what was written"):
        seal.check(step)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_content_sees_every_bit_of_every_element(dtype):
    x = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 100, (3, 5)), dtype))
    number = seal.content({"a": {"x": jnp.asarray(x)}})["a.x"]
    for bit in range(8 * x.nbytes):
        y = np.frombuffer(flipped(x.tobytes(), bit), x.dtype).reshape(x.shape)
        assert seal.content({"a": {"x": jnp.asarray(y)}})["a.x"] != number


def test_content_sees_elements_that_change_places(monkeypatch):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for small in (seal._SMALL, -1):  # by NumPy, and by the program
        monkeypatch.setattr(seal, "_SMALL", small)
        numbers = {seal.content({"x": jnp.asarray(y)})["x"] for y in (x, x[::-1], x[:, ::-1])}
        assert len(numbers) == 3


def test_numpy_and_the_program_find_the_same_on_any_mesh(monkeypatch):
    rng = np.random.default_rng(0)
    number = lambda size, dtype: jnp.asarray(rng.integers(0, 99, size), dtype)
    arrays = [number(size, jnp.float32) for size in ((), (0,), (7,), (5, 4, 3))]
    arrays += [number((3, 5), dtype) for dtype in (jnp.bfloat16, jnp.int32, jnp.uint8)]
    arrays += [arrays[2].at[3].set(jnp.nan), arrays[4].at[1].set(jnp.inf)]
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b", "a"))
    arrays += [jax.device_put(number((6, 4), jnp.float32), spread)]
    arrays *= 2  # 20: as numbers and as words their names have other orders
    with monkeypatch.context() as m:
        m.setattr(seal, "_survey", None)
        survey = seal.survey(arrays)
    assert [finite for _, finite in survey.values()] == 2 * (7 * [True] + 2 * [False] + [True])
    monkeypatch.setattr(seal, "_SMALL", -1)
    assert seal.survey(arrays) == survey
    assert [*seal.survey(arrays)] == [str(i) for i in range(20)]  # in the order of the tree


def test_digest_sees_names_types_shapes_and_values():
    x = np.arange(6, dtype=np.int32)
    others = [{"y": x}, {"x": x.astype(np.int64)}, {"x": x.reshape(2, 3)}, {"x": x[::-1]}, {}]
    assert len({seal.digest(o) for o in [{"x": x}, *others]}) == 6
