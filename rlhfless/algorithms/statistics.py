"""Statistics of rewards within groups, and of advantages over a step, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlhfless.algorithms.kl import FloatLike
from rlhfless.records import IntArray

STD_FLOOR = 1e-6
"""Added to the standard deviation, as usual: it bounds the advantage if rewards hardly differ."""

VARIANCE_FLOOR = 1e-8
"""Added to the variance, as usual."""

Statistic = npt.NDArray[np.float64]


def group_sizes(group_id: IntArray) -> IntArray:
    """Sequences in the group of each sequence, `[sequences]`."""
    return np.bincount(group_id)[group_id]


def centred(rewards: FloatLike, group_id: IntArray) -> Statistic:
    """Rewards `[sequences]` minus the mean of their group; exactly 0 in a group whose rewards are all equal."""
    values = np.asarray(rewards, dtype=np.float64)
    means = np.bincount(group_id, values)[group_id] / group_sizes(group_id)
    return np.where(_constant(values, group_id), 0, values - means)


def group_std(centred_rewards: Statistic, group_id: IntArray) -> Statistic:
    """The unbiased standard deviation of the group of each sequence, `[sequences]`; 0 of a single one."""
    squares = np.bincount(group_id, centred_rewards**2)[group_id]
    return np.asarray(np.sqrt(squares / np.maximum(group_sizes(group_id) - 1, 1)))


def whitened(values: FloatLike) -> Statistic:
    """Values shifted and scaled to mean 0 and (unbiased) variance 1; a single one to 0."""
    wide = np.asarray(values, dtype=np.float64)
    if not len(wide):
        return wide
    shifted = wide - wide.mean()
    return np.asarray(shifted / np.sqrt((shifted**2).sum() / max(len(wide) - 1, 1) + VARIANCE_FLOOR))


def _constant(values: Statistic, group_id: IntArray) -> npt.NDArray[np.bool_]:
    """Whether all rewards of the group of each sequence are equal, `[sequences]`.

    Found by comparison, because the mean of equal numbers may have a rounding error.
    """
    groups = int(group_id.max(initial=-1)) + 1
    low = np.full(groups, np.inf)
    high = np.full(groups, -np.inf)
    np.minimum.at(low, group_id, values)
    np.maximum.at(high, group_id, values)
    return np.asarray((low >= high)[group_id])
