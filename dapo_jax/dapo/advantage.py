"""Group-relative advantage (paper Eq. 9)."""

import numpy as np


def group_normalize(
    rewards_NxG: np.ndarray,
    *,
    ddof: int,
    epsilon: float,
    counted_NxG: np.ndarray | None = None,
) -> np.ndarray:
    """(r - mean) / (std + epsilon) within each group; every token of a response gets its value.

    `ddof=1` and `epsilon=1e-6` are what verl uses. Responses outside `counted_NxG` are left out of
    mean and std and get 0; a group with fewer than two counted responses is all zeros, since
    nothing can be compared in it. float32 [N, G].
    """
    r = np.asarray(rewards_NxG, np.float64)
    counted = np.ones(r.shape, bool) if counted_NxG is None else counted_NxG
    n_Nx1 = counted.sum(1, keepdims=True)
    mean_Nx1 = np.where(counted, r, 0).sum(1, keepdims=True) / np.maximum(n_Nx1, 1)
    gap = np.where(counted, r - mean_Nx1, 0)
    std_Nx1 = np.sqrt((gap**2).sum(1, keepdims=True) / np.maximum(n_Nx1 - ddof, 1))
    # Equal rewards can leave rounding noise of 1e-17, which a division by 1e-6 is no cure for.
    # (A response alone has no gap either.)
    flat_Nx1 = np.abs(gap).max(1, keepdims=True) <= 1e-12
    advantage = np.where(flat_Nx1, 0.0, gap / np.where(flat_Nx1, 1.0, std_Nx1 + epsilon))
    return advantage.astype(np.float32)
