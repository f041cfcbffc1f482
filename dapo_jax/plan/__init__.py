"""Does a config fit a slice, and how long is a step? Needs no TPU."""
