"""Response lengths with a long tail, as reasoning models have them."""

import numpy as np

from dapo_jax.plan import simulate


def log_normal(n: int, cap: int, mean: float, sigma: float = 0.9, seed: int = 0) -> np.ndarray:
    """int [n]: log-normal lengths in TOKENS, cut at `cap`, with `mean` after the cut. They are
    the n quantiles in random order, so that every n has the same distribution."""
    mu = simulate.log_mean(mean, sigma, cap, n)
    lengths = simulate.cut(mu, sigma, simulate.normal_quantiles(n), cap)
    return np.random.default_rng(seed).permutation(lengths)
