"""GRPO's advantages (arXiv 2402.03300, section 4.1.2): how much better a response was than the others of its group."""

from __future__ import annotations

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import FloatLike, rewards_with_kl
from rlhfless.algorithms.statistics import STD_FLOOR, centred, group_std
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import GroupRelativeSpec


class GroupRelative:
    """The part of an algorithm that makes its advantages."""

    def __init__(self, settings: GroupRelativeSpec) -> None:
        self._normalize_std, self._kl = settings.normalize_std, settings.kl

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Group relative advantages, `[tokens]`. Raises ValueError if the batch has no rewards, or one that is not
        finite."""
        rewards = rewards_with_kl(batch, self._kl)
        return batch.spread(group_advantages(rewards, batch.sequence_groups, normalize_std=self._normalize_std))


def group_advantages(rewards: FloatLike, group_id: IntArray, *, normalize_std: bool) -> FloatArray:
    """Advantages `[sequences]` from `rewards` and `group_id`, `[sequences]` each.

    A = R - mean of the group, divided by its (unbiased) standard deviation + 1e-6 unless `normalize_std` is False. A
    group whose rewards are all equal, or that has one sample, gives no signal: its advantages are exactly 0.
    """
    values = centred(rewards, group_id)
    return (values / (group_std(values, group_id) + STD_FLOOR) if normalize_std else values).astype(np.float32)
