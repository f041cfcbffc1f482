"""What an update takes of a device: nothing of tokens x vocabulary, state where it belongs."""

import math
from types import SimpleNamespace

import jax
import jax.extend
import numpy as np
import pytest
from test_update import RULES, mesh_of

from dapo_jax import config, parallel
from dapo_jax.dapo import objective, update
from dapo_jax.model import learner, qwen2

SHAPE = qwen2.Shape(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rope_theta=1e4, rms_eps=1e-6, tie_embeddings=True,
    remat="full", attention_chunk=64, head_chunk=2,
)  # fmt: skip
A, R, T = 2, 4, 512
ADAM = learner.optimizer(0.9, 0.999, 1e-8, 0.1, 1.0)


def make_programs(shape=SHAPE, sizes=(1, 1, 1), **kwargs):
    return update.Trainer(shape, learner.Setup(mesh_of(*sizes), RULES, ADAM, "float32", **kwargs))


def largest(jaxpr):
    """Elements of the largest value anywhere in a program, inner ones included."""
    size = 0
    for eqn in jaxpr.eqns:
        size = max([size, *(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)])
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            size = max(size, largest(inner))
    return size


def test_no_array_of_tokens_by_vocabulary():
    def traced(head_chunk):
        shape = SHAPE._replace(hidden_size=8, attention_chunk=8, head_chunk=head_chunk)
        programs = make_programs(shape)
        return largest(programs.update.trace(*programs.abstract(A, R, 48)).jaxpr.jaxpr)

    forbidden = R * 48 * SHAPE.vocab_size
    assert traced(head_chunk=8) == forbidden // 6  # the logits of one chunk, and nothing larger
    assert traced(head_chunk=48) >= forbidden  # the measure does see it where it is made


def fresh(programs):
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    params = programs.init_params(key)
    abstract = programs.abstract(A, R, T)[2].rows
    cells = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), abstract)
    cells = cells._replace(weight_AxRxT=cells.weight_AxRxT / R / T)
    rows = parallel.to_device(cells, programs.row_sharding)
    batch = update.Batch(rows, *[rows.sampled_logp_AxRxT] * 2, np.int32(1))
    knobs = update.Knobs(*map(np.float32, (1e-3, 1)), objective.coefficients(config.base().loss))
    return params, programs.init_opt_state(params), batch, knobs


@pytest.mark.slow
def test_offloaded_moments_rest_in_host_memory_and_change_nothing():
    results = {}
    for offload in (False, True):
        programs = make_programs(sizes=(1, 2, 1), offload=offload)
        args = fresh(programs)
        for _ in range(2):
            params, opt_state, _ = programs.update(*args)
            args = (params, opt_state, *args[2:])
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(opt_state) if x.ndim}
        assert kinds == {"pinned_host" if offload else jax.devices()[0].default_memory().kind}
        results[offload] = jax.device_get((params, opt_state))
    jax.tree.map(np.testing.assert_array_equal, results[False], results[True])


def test_devices_without_host_memory_are_named():
    memories = lambda: [SimpleNamespace(kind="device")]
    device = SimpleNamespace(device_kind="toy", addressable_memories=memories)
    toy = SimpleNamespace(devices=np.array([device]))
    with pytest.raises(ValueError, match=r"toy devices have no pinned host.*optim.offload=False"):
        parallel.check_host_memory(toy)
