"""The 32B update, compiled for a pod as benchmarks/pod_update.py does it."""

import pytest
from levels import needs_libtpu

from benchmarks import pod_update
from dapo_jax import plan
from dapo_jax.config import presets
from dapo_jax.dapo import update
from dapo_jax.model import learner
from dapo_jax.plan import hlo
from dapo_jax.plan.constants import VALUES
from dapo_jax.pods import topology

pytestmark = [pytest.mark.slow, needs_libtpu]


def test_the_32b_update_fits_its_pod():
    pod = pod_update.PODS[1]
    r = pod_update.compiled_apart(pod, "O0")
    assert (pod.topology, pod.fsdp, pod.tensor, r["row_tokens"]) == ("v5p:4x4x8", 16, 8, 22_528)
    state = 12 * 32_763_876_352 / 128  # float32 weights and two moments, a 128th of them a chip
    assert r["arguments"] == pytest.approx(state, rel=0.02)
    assert r["aliased"] == pytest.approx(state, rel=0.001)  # updated in place
    assert r["peak"] <= 10e9 < r["limit"]
    assert 1.2 < r["work_ratio"] <= 1.38
    assert r["splash"] and not r["rematerialized"]


def test_a_layer_of_the_update_gathers_what_the_cost_model_says():
    """Two layers of 32B on its slice, as shipped: whole rows of the residual stream come from
    gathers, no more than the cost model counts, and none from a sum that every device gets whole.
    (On a slice of eight chips XLA makes such sums.)"""
    c = presets.dapo_math("32B")
    shape = plan.network(c)._replace(num_layers=2)
    mesh = topology.make_mesh("v5p:4x4x8", c.mesh.to_dict())
    tx = learner.optimizer(0.9, 0.999, 1e-8, 0.0, 1.0)
    setup = learner.Setup(mesh, c.sharding.train.to_dict(), tx, c.model.dtype)
    trainer = update.Trainer(shape, setup)
    text = trainer.update.trace(*trainer.abstract(2, 32, 22528)).lower().compile().as_text()
    row = 22528 * 5120 * 2  # bytes
    found = {"all-gather": 0, "all-reduce": 0}
    for turns, lines in hlo.in_loops(text):
        for size, kind, _ in hlo.instructions(lines):
            found[kind] = found.get(kind, 0) + (turns == shape.num_layers and size == row)
    assert found["all-reduce"] == 0
    # The others are gathered in windows, hidden in part behind the products that read them.
    counted = VALUES["update_moved"]
    assert 0.5 * counted <= found["all-gather"] <= counted
