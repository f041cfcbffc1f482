"""How a run begins: warm-up, given weights, resume."""
