"""Does a config fit a slice or some GPUs, and how long is a step? Needs neither.

    from dapo_jax import plan
    shape = plan.network(config)
    plan.memory(config, shape, {"data": 1, "fsdp": 16, "tensor": 8})     bytes by phase and item
    plan.plan(config, slices.parse("v5p-256"), plan.Traffic(256, 5120), room=0.1)    all, as JSON

Memory: shapes, footprint, layouts. Time: constants, simulate, roofline, step, staleness. The
compiler's word: compile, hlo, kernels. In front: planner, gpus, report, __main__.
"""

from dapo_jax.plan.footprint import GB, check, memory, mistakes, peaks, waves
from dapo_jax.plan.gpus import plan
from dapo_jax.plan.roofline import Scene
from dapo_jax.plan.shapes import network, published, value_model
from dapo_jax.plan.simulate import Traffic

__all__ = ["GB", "Traffic", "check", "memory", "mistakes", "network", "peaks", "plan", "published"]
__all__ += ["Scene", "value_model", "waves"]
