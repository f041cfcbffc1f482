"""DAPO (arXiv 2503.14476) in JAX: a sharded Flax Qwen2.5, a jitted sampler and a jitted update."""
