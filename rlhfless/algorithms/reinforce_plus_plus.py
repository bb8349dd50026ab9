"""REINFORCE++ (arXiv 2501.03262): the return of each token, whitened over the tokens of the step, in place of a critic.

    G_t = r_t + gamma G_{t+1}        A_t = (G_t - mean of G) / std of G

r_t has the KL of token t, if it is part of the reward, and the response's reward at the last drawn token; with
`group_baseline` that is first shifted by the mean of its group (REINFORCE++-baseline). An environment's tokens are
passed over: the return before them is the one after them.
"""

from __future__ import annotations

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.gae import gae
from rlhfless.algorithms.kl import rewards_of, token_rewards
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.algorithms.statistics import centred, whitened
from rlhfless.records import FloatArray
from rlhfless.spec import ReinforcePlusPlusSpec


class ReinforcePlusPlus(ClippedLoss[ReinforcePlusPlusSpec]):
    """The algorithm `reinforce_plus_plus` (see rlhfless.algorithms.base)."""

    def advantages(self, batch: PackedBatch) -> FloatArray:
        """Whitened returns, `[tokens]`. Raises ValueError as group_relative does."""
        rewards = rewards_of(batch)
        if self._settings.group_baseline:
            rewards = centred(rewards, batch.sequence_groups)
        by_token = token_rewards(batch, rewards, self._settings.kl)
        # Without values and with lambda 1 an advantage is the return.
        returns = gae(by_token, np.zeros(len(by_token)), batch.response_lengths, self._settings.gamma, 1.0)
        return batch.placed(whitened(returns)).astype(np.float32)
