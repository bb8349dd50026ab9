"""REINFORCE leave-one-out (arXiv 2402.14740, section 3.3): the baseline of a response is the mean reward of the others
of its prompt.

    A_i = R_i - 1/(n-1) sum over j != i of R_j = n/(n-1) (R_i - mean of the group)

In the first update of a step the ratio is 1 and the clipped loss has REINFORCE's gradient; the clip acts in later ones.
"""

from __future__ import annotations

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.kl import rewards_with_kl
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.algorithms.statistics import centred, group_sizes
from rlhfless.records import FloatArray
from rlhfless.spec import RLOOSpec


class RLOO(ClippedLoss[RLOOSpec]):
    """The algorithm `rloo` (see rlhfless.algorithms.base)."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Rewards minus the mean of the others, `[tokens]`; 0 for a sample that is alone in its group. Raises
        ValueError as group_relative does."""
        groups = batch.sequence_groups
        others = np.maximum(group_sizes(groups) - 1, 1)
        values = centred(rewards_with_kl(batch, self._settings.kl), groups) * (others + 1) / others
        return batch.spread(values).astype(np.float32)
