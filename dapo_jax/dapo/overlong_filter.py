"""Overlong Filtering (paper section 3.4): what a truncated response counts for.

off    it is trained on like any other
loss   it leaves the loss and stays, with its reward, in the mean and std of its group: the
       paper "masks the loss of truncated samples" and says no more
group  it leaves the loss and the statistics of its group
"""

import numpy as np

from dapo_jax.dapo.dynamic_sampling import Group


def masks(truncated_NxG: np.ndarray, overlong_filter: str) -> tuple[np.ndarray, np.ndarray]:
    """bool [N, G] each: (responses whose tokens are trained on, responses that count in the mean
    and std of their group)."""
    everything = np.ones_like(truncated_NxG, bool)
    trained_NxG = everything if overlong_filter == "off" else ~truncated_NxG
    counted_NxG = ~truncated_NxG if overlong_filter == "group" else everything
    return trained_NxG, counted_NxG


def teaches(group: Group, overlong_filter: str) -> bool:
    """What Dynamic Sampling asks of a group: whether the responses that count can be told apart."""
    truncated_G = np.array([r.truncated for r in group.responses], bool)
    return group.mixed_among(masks(truncated_G, overlong_filter)[1])
