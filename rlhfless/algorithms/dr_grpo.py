"""GRPO done right (Dr. GRPO, arXiv 2503.20783, section 3.2): A = R - mean of the group, and a sum over tokens that is
divided by a constant."""

from __future__ import annotations

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import rewards_with_kl
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.algorithms.statistics import centred
from rlhfless.records import FloatArray
from rlhfless.spec import DrGRPOSpec


class DrGRPO(ClippedLoss[DrGRPOSpec]):
    """The algorithm `dr_grpo` (see rlhfless.algorithms.base)."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Rewards minus their group's mean, `[tokens]`. Raises ValueError as group_relative does."""
        rewards = rewards_with_kl(batch, self._settings.kl)
        return batch.spread(centred(rewards, batch.sequence_groups)).astype(np.float32)
