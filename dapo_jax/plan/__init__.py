"""Does a config fit a slice, and how long is a step? Needs no TPU.

    from dapo_jax import plan
    shape = plan.network(config)
    plan.memory(config, shape, {"data": 1, "fsdp": 16, "tensor": 8})     bytes by phase and item
    plan.plan(config, slices.parse("v5p-256"), plan.Traffic(256, 5120), room=0.1)    all, as JSON

Memory: shapes (of the models, a table), footprint (bytes per device; can it run), layouts (what
fits, the quickest first). Time: constants (a table, each with its source), simulate (the schedule
of a rollout of assumed lengths), roofline (a config on a slice, and the seconds of each phase),
step (their sum, its low and high), staleness. The compiler's word: compile (XLA:TPU's memory of all
programs of a step), hlo (their collectives), kernels (bundles of the decode kernel). In front:
planner, report (templates), __main__. Nothing but itself imports this package.
"""

from dapo_jax.plan.footprint import GB, check, memory, mistakes, peaks, waves
from dapo_jax.plan.planner import plan
from dapo_jax.plan.roofline import Scene
from dapo_jax.plan.shapes import network, published, qwen2_5, value_model
from dapo_jax.plan.simulate import Traffic

__all__ = ["GB", "Traffic", "check", "memory", "mistakes", "network", "peaks", "plan", "published"]
__all__ += ["Scene", "qwen2_5", "value_model", "waves"]
