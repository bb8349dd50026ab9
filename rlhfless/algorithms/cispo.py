"""Clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585, eq. 4): -sg[clip(r)] A log p.

The weight bounds how much a token counts, and never takes its gradient away, as PPO's clip does: tokens of low
probability on which a reasoning turns are those whose ratio moves first.
"""

from __future__ import annotations

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.clip import log_ratio_of
from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.policy_loss import policy_loss
from rlhfless.spec import CISPOSpec


class CISPO(GroupRelative[CISPOSpec]):
    """The algorithm `cispo` (see rlhfless.algorithms.base)."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """REINFORCE's loss of each token, weighted by its bounded ratio."""
        low, high = self._settings.weight_low, self._settings.weight_high
        ratio = log_ratio_of(inputs).exp().detach()
        per_token = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
        metrics = {
            "bounded_low": (ratio < low).sum() * inputs.scale,
            "bounded_high": (ratio > high).sum() * inputs.scale,
        }
        return policy_loss(inputs, per_token, metrics, self._settings)
