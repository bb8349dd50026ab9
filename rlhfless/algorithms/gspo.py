"""Group sequence policy optimisation (arXiv 2507.18071): the ratio of a response as a whole.

    s_i = exp(mean over t of (log p - log p_old))        the ratio of token t: sg[s_i] p_t / sg[p_t]

All tokens of a response have the same ratio and are clipped together, and each has its own gradient (GSPO-token,
section 4.3, with one advantage per response, which is GSPO, eq. 5).
"""

from __future__ import annotations

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.clip import clip_metrics, clipped
from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.kl import bounded
from rlhfless.algorithms.policy_loss import policy_loss
from rlhfless.algorithms.sequences import sequence_mean
from rlhfless.spec import GSPOSpec


class GSPO(GroupRelative[GSPOSpec]):
    """The algorithm `gspo` (see rlhfless.algorithms.base)."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """PPO's clipped loss with the response's ratio."""
        of_sequence = sequence_mean(inputs, inputs.logprobs - inputs.old)
        ratio = bounded(of_sequence + inputs.logprobs - inputs.logprobs.detach()).exp()
        metrics = clip_metrics(inputs, ratio, self._settings)
        return policy_loss(inputs, clipped(inputs, ratio, self._settings), metrics, self._settings)
