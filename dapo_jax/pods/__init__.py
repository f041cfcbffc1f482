"""TPU slices: their names and chips, and programs compiled for one that nobody has at hand.

slices: Cloud's names, the chips behind them, peak figures. topology: described devices, the memory
that XLA:TPU assigns to a compiled program, exact matrix work. Nothing is executed and no TPU is
needed. The planner (dapo_jax/plan) is built on both.
"""
