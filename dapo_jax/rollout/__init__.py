"""Sampling: the draw, the jitted decode loop, and the host engine. Knows token ids only."""
