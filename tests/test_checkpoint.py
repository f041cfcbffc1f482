"""Checkpoints: bit-equal, on any mesh."""

import functools
import shutil

import jax
import numpy as np
import optax
import pytest
from test_qwen2 import mesh_of

from dapo_jax import config, parallel
from dapo_jax.checkpoint import checkpoint, groups as flat_groups
from dapo_jax.dapo.dynamic_sampling import Group
from dapo_jax.dapo.reward import Grades
from dapo_jax.dapo.state import Counters, State
from dapo_jax.model import qwen2
from dapo_jax.rollout.engine import Response

CONFIG = config.base()
CONFIG.model.num_layers = 1
SHAPE = qwen2.shape_from_config(CONFIG)
TX = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
ABSTRACT = qwen2.abstract(SHAPE)
COUNTERS = Counters(
    step=3, rounds=7, updates=24, position=101, accept_rate=0.3, empty_steps=1, skipped_in_row=2,
    tokens=12345678901, samples=999,
)  # fmt: skip


def layout(mesh_shape) -> State:
    mesh = mesh_of(mesh_shape)
    params = parallel.shardings(qwen2.metadata(SHAPE, "axes"), mesh, CONFIG.sharding.train)
    replicated = lambda _: parallel.replicated(mesh)
    opt = optax.tree_map_params(
        TX, lambda _, s: s, LIKE.opt_state, params, transform_non_params=replicated
    )
    return State(params, opt, params, [])


LIKE = State(ABSTRACT, jax.eval_shape(TX.init, ABSTRACT), ABSTRACT, [])


def groups(n=2, G=3, seed=0):
    rng = np.random.default_rng(seed)

    def response():
        k = int(rng.integers(1, 9))
        logps, entropies = rng.normal(size=(2, k)).astype(np.float32)
        tokens = rng.integers(0, 48, k).astype(np.int32)
        return Response(tokens, logps, entropies, bool(rng.random() < 0.5))

    return [
        Group(
            int(2**40 + i),
            rng.integers(0, 48, 3 + i).tolist(),
            [response() for _ in range(G)],
            Grades(rng.normal(size=G), rng.random(G) < 0.5 if i % 2 == 0 else None),
        )
        for i in range(n)
    ]


def same_arrays(a, b):
    """Trees of the same structure, dtypes and bits."""
    same = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(lambda x, y: same(np.asarray(x), np.asarray(y)), a, b)


def same_state(a: State, b: State):
    same_arrays(a[:4], b[:4])
    assert a.counters == b.counters


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Step 3, written from eight devices; (directory, the state on the host)."""
    directory, rng = tmp_path_factory.mktemp("checkpoints"), np.random.default_rng(0)
    number = lambda x: np.asarray(rng.normal(size=x.shape) * 10, x.dtype).reshape(x.shape)
    state = State(*jax.tree.map(number, LIKE[:3]), groups(), COUNTERS)
    places = zip(state[:3], layout((1, 4, 2))[:3], strict=True)
    placed = State(*(parallel.to_device(a, s) for a, s in places), *state[3:])
    with checkpoint.manager(directory, keep=2) as m:
        checkpoint.save(m, placed, config.leaves(CONFIG))
    return directory, state


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1, 4, 2), (1, 1, 1), (1, 2, 1), (2, 1, 2)], ids=str)
def test_eight_devices_to_others_and_back(saved, tmp_path, mesh_shape):
    directory, state = saved
    with checkpoint.manager(directory, keep=2) as m:
        assert m.latest_step() == 3
        there = checkpoint.restore(m, 3, LIKE, layout(mesh_shape))
    same_state(there, state)
    assert there.params["embed"].sharding == layout(mesh_shape).params["embed"]
    with checkpoint.manager(tmp_path, keep=2) as m:
        checkpoint.save(m, there, config.leaves(CONFIG))
        m.wait_until_finished()
        same_state(checkpoint.restore(m, 3, LIKE, layout((1, 4, 2))), state)


def test_restore_params_of_another_run(saved, tmp_path):
    directory, state = saved
    shardings = layout((1, 2, 1)).params
    params = checkpoint.restore_params(str(directory), ABSTRACT, shardings)
    same_arrays(params, state.params)
    assert params["embed"].sharding == shardings["embed"]
    with pytest.raises(ValueError, match=f"^{tmp_path}: no checkpoint in it$"):
        checkpoint.restore_params(str(tmp_path), ABSTRACT, layout((1, 1, 1)).params)


@pytest.mark.parametrize("item", ["_saved_shapes", "read_json"])
def test_a_step_that_a_run_removes_meanwhile_is_not_called_damaged(
    saved, tmp_path, monkeypatch, item
):
    shutil.copytree(saved[0], tmp_path / "run")
    read = getattr(checkpoint, item)
    gone = lambda m, step: [shutil.rmtree(m.directory / str(step)), read(m, step)][1]
    monkeypatch.setattr(checkpoint, item, gone)
    with pytest.raises(ValueError, match="run step 3: was removed while it was read") as error:
        checkpoint.restore_params(tmp_path / "run", ABSTRACT, layout((1, 1, 1)).params)
    assert not isinstance(error.value, checkpoint.Damaged)


def test_a_state_without_its_fields_is_damaged(monkeypatch):
    whole = Counters(3)._asdict() | dict(config={}, versions={}, content={"arrays": {}})
    wrong = dict(config=0), dict(versions=[]), dict(content={}), dict(content=1), dict(step=2)
    for change in wrong:
        monkeypatch.setattr(checkpoint, "read_json", lambda *_, change=change: whole | change)
        with pytest.raises(checkpoint.Damaged, match="state has other fields than were saved"):
            checkpoint.read_state(None, 3)


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("in_flight", [False, True])
def test_groups_round_trip(n, in_flight):
    want = groups(n, G=4, seed=n)
    if in_flight:  # not judged yet
        more = lambda r: r._replace(versions=np.full(len(r.tokens), n, np.int32), ended=n > 1)
        want = [g._replace(grades=None, responses=[*map(more, g.responses)]) for g in want]
    flat = flat_groups.flatten(want)
    assert all(a.ndim == 1 and a.size and a.dtype.kind in "if" for a in flat.values())
    same_arrays(flat_groups.unflatten(flat), want)
