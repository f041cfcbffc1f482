"""Closed wing: programs for slices that nobody has at hand.

Promise: what is said of a slice is what XLA:TPU says when it compiles the run's own programs for
it; nothing is executed and no TPU is needed.

Doors: `slices.parse`, `compile.check`, `topology.memory`, `cost.pricer`, `kernels.measure`.
Inside: slices (Cloud's names and the chips behind them), topology (described devices, memory, exact
matrix work), hlo (collectives of a compiled program), compile (all programs of a step, each in a
process of its own), simulate (what the slots do in a rollout of assumed lengths), cost (seconds of
a step, from that and constants.py, where each number names its source), kernels (bundles that
libtpu makes of the decode kernels). `python -m dapo_jax.plan` is the command in front of it.
"""
