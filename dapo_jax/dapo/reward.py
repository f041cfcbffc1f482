"""Rule-based reward with Soft Overlong Punishment (paper Eq. 7 and 13)."""

import numpy as np


def overlong_penalty(
    length: np.ndarray, max_tokens: int, buffer_tokens: int, factor: float
) -> np.ndarray:
    """Eq. 13, as verl computes it: 0 up to L_max - L_cache tokens, then a ramp down to -factor at
    L_max. `length` counts response tokens, the stop token included. float64, shape of `length`."""
    if not factor:
        return np.zeros(np.shape(length))
    over = np.asarray(length, np.float64) - (max_tokens - buffer_tokens)
    if not buffer_tokens:  # no ramp: the full penalty beyond L_max, which no response exceeds
        return np.where(over > 0, -factor, 0.0)
    return np.minimum(-over / buffer_tokens * factor, 0.0)


def shaped(
    correct: np.ndarray,
    length: np.ndarray,
    *,
    right: float,
    wrong: float,
    max_tokens: int,
    buffer_tokens: int,
    factor: float,
) -> np.ndarray:
    """Reward of each response: outcome (Eq. 7) plus length penalty (Eq. 13). The filter of dynamic
    sampling never sees it, only `correct`: shaped rewards differ within all-wrong groups."""
    outcome = np.where(correct, right, wrong)
    return outcome + overlong_penalty(length, max_tokens, buffer_tokens, factor)
