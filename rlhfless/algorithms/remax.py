"""ReMax (arXiv 2310.10505, section 4.1): REINFORCE whose baseline is the reward of the greedy response to the prompt.

    A_t = r_t + r_{t+1} + ... - R(greedy)

r_t is as in REINFORCE++: the KL of token t, if it is part of the reward, and the response's reward at its last token.
"""

from __future__ import annotations

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.gae import gae
from rlhfless.algorithms.kl import finite_rewards, token_rewards
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.records import FloatArray
from rlhfless.spec import ReMaxSpec


class ReMax(ClippedLoss[ReMaxSpec]):
    """The algorithm `remax` (see rlhfless.algorithms.base)."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Rewards to go minus the baseline, `[tokens]`. Raises ValueError if the batch lacks rewards or baselines."""
        if batch.baselines is None:
            raise ValueError("advantages need the rewards of greedy responses, and the batch has no baselines")
        by_token = token_rewards(batch, finite_rewards(batch), self._settings.kl)
        to_go = gae(by_token, np.zeros(len(by_token)), batch.response_lengths, 1.0, 1.0)
        baselines = batch.baselines[batch.sequence_id[batch.response_mask]]
        return batch.placed(to_go - baselines).astype(np.float32)
