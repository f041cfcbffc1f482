"""TPU slices: their names and chips, and programs compiled for one that nobody has at hand."""
