"""TPU slices: their names and chips, and programs compiled for one that nobody has at hand.

slices: Cloud's names, the chips behind them, peak figures. topology: described devices, the memory
that XLA:TPU assigns to a compiled program, exact matrix work. No TPU is needed.
"""
