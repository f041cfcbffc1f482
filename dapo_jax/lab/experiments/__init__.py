"""Experiments on the paper's techniques: many small runs, and what they show together."""
