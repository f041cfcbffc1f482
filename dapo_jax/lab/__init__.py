"""Studies of finished runs and comparisons of many: outside the training path."""
