"""Response lengths with a long tail, as reasoning models have them."""

import math
import statistics

import numpy as np


def log_normal(n: int, cap: int, mean: float, sigma: float = 0.9, seed: int = 0) -> np.ndarray:
    """int [n]: log-normal lengths in TOKENS, cut at `cap`, with `mean` after the cut. They are
    the n quantiles in random order, so that every n has the same distribution."""
    normal = statistics.NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / n) for i in range(n)])
    low, high = 0.0, 2 * math.log(cap)
    for _ in range(60):
        mu = (low + high) / 2
        lengths = np.clip(np.round(np.exp(mu + sigma * z)), 1, cap)
        low, high = (mu, high) if lengths.mean() < mean else (low, mu)
    return np.random.default_rng(seed).permutation(lengths.astype(int))
