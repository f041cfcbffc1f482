"""The optimizers of the supervised warm-up: Muon for matrices, Adam for the rest, on any mesh."""

import jax
import numpy as np
import optax
import pytest

from dapo_jax import config, parallel
from dapo_jax.dapo import update
from dapo_jax.model import qwen2
from dapo_jax.run import warmup

SHAPE = qwen2.shape_from_config(config.base())
# The weights that multiply, as [layers, inputs, outputs].
MATRICES = {
    "q": (2, 64, 64), "k": (2, 64, 32), "v": (2, 64, 32), "o": (2, 64, 64),
    "gate": (2, 64, 192), "up": (2, 64, 192), "down": (2, 192, 64),
}  # fmt: skip


@pytest.fixture(scope="module")
def first_step():
    """A gradient, small enough not to be clipped, and Muon's first step from it."""
    rng, params = np.random.default_rng(0), qwen2.init(SHAPE, jax.random.key(0))
    grads = jax.tree.map(lambda p: np.float32(1e-4) * rng.normal(size=p.shape), params)
    tx = warmup.optimizer("muon", SHAPE)
    return grads, jax.tree.map(np.asarray, tx.update(grads, tx.init(params), params)[0])


@pytest.mark.parametrize("name", MATRICES)
def test_muon_levels_the_singular_values_of_each_layer_of_a_matrix(name, first_step):
    grads, step = (np.reshape(tree["blocks"][name], MATRICES[name]) for tree in first_step)
    for grad, taken in zip(grads, step, strict=True):
        u, size, vt = np.linalg.svd(grad, full_matrices=False)
        scale = 0.3 * np.sqrt(max(grad.shape))
        along = np.einsum("ir,ij,rj->r", u, taken, vt) / scale  # in the gradient's own directions
        assert np.abs(u * along @ vt * scale - taken).max() < 1e-4 * scale
        # Five steps of the quintic take all but the smallest to .68 to 1.21.
        kept = size > size[0] / 100
        assert kept.mean() > 0.9 and (along[kept] > 0.4).all() and (along < 1.3).all()


def test_adam_has_the_rest(first_step):
    grads, step = first_step
    adam = optax.scale_by_adam(warmup.OPTIMIZER["b1"], warmup.OPTIMIZER["b2"], nesterov=True)
    want, _ = adam.update(grads, adam.init(grads))
    rest = [name for name in step["blocks"] if name not in MATRICES]
    assert sorted(rest) == ["attn_norm", "k_bias", "mlp_norm", "q_bias", "v_bias"]
    wanted, taken = (tree | {name: tree["blocks"][name] for name in rest} for tree in (want, step))
    for name in set(taken) - {"blocks"}:
        np.testing.assert_allclose(taken[name], wanted[name], rtol=1e-5)
    assert set(step) == {"blocks", "embed", "final_norm"}


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_the_optimizers_state_lies_as_its_weights_do(name):
    mesh = parallel.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    rules = config.base().sharding.train.to_dict()
    tx = warmup.optimizer(name, SHAPE)
    trainer = update.Trainer(SHAPE, warmup.learner.Setup(mesh, rules, tx, "float32"))
    of = dict(jax.tree.leaves_with_path(trainer.param_shardings))
    found = {path: set() for path in of}
    for path, sharding in jax.tree.leaves_with_path(trainer.opt_shardings):
        weight = next((path[i:] for i in range(len(path)) if path[i:] in of), None)
        if weight is None:
            assert sharding == parallel.replicated(mesh)  # a count
        else:
            found[weight].add(sharding)
    assert found == {path: {sharding} for path, sharding in of.items()}
    params = trainer.init_params(np.asarray(jax.random.key_data(jax.random.key(0))))
    state = trainer.init_opt_state(params)
    assert jax.tree.map(lambda x: x.sharding, state) == trainer.opt_shardings
