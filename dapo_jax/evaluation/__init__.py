"""Named evaluation sets and the scores of an evaluation."""
