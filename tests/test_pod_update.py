"""Two layers of the 32B update, compiled for the slice that its config is made for."""

import pytest
from levels import needs_libtpu

from dapo_jax import config, plan
from dapo_jax.config import presets
from dapo_jax.dapo import update
from dapo_jax.model import learner, qwen2
from dapo_jax.plan import hlo
from dapo_jax.plan.constants import VALUES
from dapo_jax.pods import topology

pytestmark = [pytest.mark.slow, pytest.mark.nightly, needs_libtpu]  # by day: test_compile.py's


def test_the_32b_update_is_in_place_and_gathers_what_the_cost_model_says():
    """State in place, no resharding of whole arrays, no product twice but the head's (.13) and of
    scores in splash's backward pass (.07). Whole rows of the residual stream come from gathers, no
    more than the cost model counts, and none from a sum that every device gets whole. (On a slice
    of eight chips XLA makes such sums.) All 64 layers on a chip: benchmarks/pod_plan.py."""
    c = presets.dapo_math("32B")
    shape = plan.network(c)._replace(num_layers=2)
    mesh = topology.laid(topology.devices("v5p:4x4x8"), config.resolve_mesh(c, 128))
    tx = learner.optimizer(0.9, 0.999, 1e-8, 0.0, 1.0)
    setup = learner.Setup(mesh, c.sharding.train.to_dict(), tx, c.model.dtype)
    trainer = update.Trainer(shape, setup)
    T, rows, micro_batches = config.row_tokens(c), 32, 2
    traced = trainer.update.trace(*trainer.abstract(micro_batches, rows, T))
    assert (T, mesh.size) == (22_528, 128)
    work = topology.matmul_flops(traced.jaxpr.jaxpr, while_trips=micro_batches)
    attention = T * shape.num_heads * shape.head_dim * shape.num_layers
    multiplied = qwen2.param_count(shape) - shape.vocab_size * shape.hidden_size  # not looked up
    needed = 6 * (multiplied + attention) * micro_batches * rows * T
    assert 1.15 < work / needed <= 1.2

    program, log = topology.compile_watched(traced.lower())
    assert "Involuntary full rematerialization" not in log
    memory, text = topology.memory(program), program.as_text()
    state = 12 * qwen2.param_count(shape) / mesh.size  # float32 weights and two moments
    assert memory.arguments == pytest.approx(state, rel=0.02)
    assert memory.aliased == pytest.approx(state, rel=0.001)
    assert "splash_m" in text
    row = T * shape.hidden_size * 2  # bytes
    found = {"all-gather": 0, "all-reduce": 0}
    for turns, lines in hlo.in_loops(text):
        for size, kind, _ in hlo.instructions(lines):
            found[kind] = found.get(kind, 0) + (turns == shape.num_layers and size == row)
    assert found["all-reduce"] == 0
    # The others are gathered in windows, hidden in part behind the products that read them.
    counted = VALUES["update_moved"]
    assert 0.5 * counted <= found["all-gather"] <= counted
