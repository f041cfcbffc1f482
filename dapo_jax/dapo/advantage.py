"""Group-relative advantage (paper Eq. 9), and what other recipes divide it by."""

import numpy as np

from dapo_jax.dapo.settings import Advantage


def group_normalize(
    rewards_NxG: np.ndarray, settings: Advantage, counted_NxG: np.ndarray
) -> np.ndarray:
    """(r - mean) / (std + epsilon) within each group; every token of a response gets its value.

    settings.scale: 'batch' divides by one std, that of the gaps of all counted responses (ScaleRL),
    'none' by nothing (Dr. GRPO, RLOO). leave_one_out: the mean is that of the group's other
    responses (RLOO). Responses outside `counted_NxG` enter neither mean nor std and get 0; a group
    with fewer than two counted is all zeros: nothing can be compared. float32 [N, G].
    """
    r = np.asarray(rewards_NxG, np.float64)
    n_Nx1 = counted_NxG.sum(1, keepdims=True)
    mean_Nx1 = np.where(counted_NxG, r, 0).sum(1, keepdims=True) / np.maximum(n_Nx1, 1)
    gap = np.where(counted_NxG, r - mean_Nx1, 0)
    std_Nx1 = np.sqrt((gap**2).sum(1, keepdims=True) / np.maximum(n_Nx1 - settings.ddof, 1))
    if settings.scale == "batch":
        std_Nx1[:] = np.sqrt((gap**2).sum() / max(n_Nx1.sum() - settings.ddof, 1))
    # Equal rewards may differ from their mean by rounding, and dividing that by epsilon would not
    # be zero. Such groups get exactly 0. (A response alone has no gap either.)
    size_Nx1, gap_Nx1 = (np.abs(x).max(1, keepdims=True) for x in (r, gap))
    flat_Nx1 = gap_Nx1 <= 1e-12 * np.maximum(size_Nx1, 1)
    if settings.leave_one_out:
        gap = gap * n_Nx1 / np.maximum(n_Nx1 - 1, 1)
    divisor_Nx1 = 1.0 if settings.scale == "none" else std_Nx1 + settings.epsilon
    return np.where(flat_Nx1, 0.0, gap / np.where(flat_Nx1, 1.0, divisor_Nx1)).astype(np.float32)


def whiten(advantage_NxG: np.ndarray, tokens_NxG: np.ndarray, settings: Advantage) -> np.ndarray:
    """Mean 0 and std 1 over the trained tokens of the batch, a second time (AReaL's `adv_norm`).
    tokens_NxG: trained tokens of each response; float32 [N, G]."""
    A, n = np.asarray(advantage_NxG, np.float64), tokens_NxG.sum()
    gap = A - (A * tokens_NxG).sum() / max(n, 1)
    std = np.sqrt((gap**2 * tokens_NxG).sum() / max(n - settings.ddof, 1))
    return (gap / (std + settings.epsilon)).astype(np.float32)
