"""GRPO's advantages (arXiv 2402.03300, section 4.1.2): how much better a response was than the others of its group."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import FloatLike, rewards_with_kl
from rlhfless.algorithms.statistics import STD_FLOOR, centred, group_std
from rlhfless.records import FloatArray, IntArray
from rlhfless.spec import GroupRelativeSpec

S = TypeVar("S", bound=GroupRelativeSpec)


class GroupRelative(Generic[S]):
    """The part of an algorithm that makes its advantages."""

    def __init__(self, settings: S) -> None:
        self._settings = settings

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Group relative advantages, `[tokens]`. Raises ValueError if the batch has no rewards."""
        settings = self._settings
        rewards = rewards_with_kl(batch, settings.kl)
        return batch.spread(group_advantages(rewards, batch.sequence_groups, normalize_std=settings.normalize_std))


def group_advantages(rewards: FloatLike, group_id: IntArray, *, normalize_std: bool) -> FloatArray:
    """Advantages `[sequences]` from `rewards` and `group_id`, `[sequences]` each.

    A = R - mean of the group, divided by its (unbiased) standard deviation + 1e-6 unless `normalize_std` is False. A
    group whose rewards are all equal, or that has one sample, gives no signal: its advantages are exactly 0.
    """
    values = centred(rewards, group_id)
    return (values / (group_std(values, group_id) + STD_FLOOR) if normalize_std else values).astype(np.float32)
