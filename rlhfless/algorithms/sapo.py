"""Soft adaptive policy optimisation (arXiv 2511.20347, eq. 5 and 6): a soft gate in place of the clip.

    -A f(r),  f(r) = 4/tau sigmoid(tau (r - 1)),  tau = `temperature_positive` where A > 0, else `temperature_negative`

f'(1) = 1: near the old policy the gradient is the policy gradient, and it fades as the ratio moves away on either side.
"""

from __future__ import annotations

import torch

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.clip import log_ratio_of
from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.policy_loss import policy_loss
from rlhfless.spec import SAPOSpec


class SAPO(GroupRelative[SAPOSpec]):
    """The algorithm `sapo` (see rlhfless.algorithms.base)."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """The gated loss of each token."""
        settings, advantages = self._settings, inputs.advantages
        positive, negative = map(advantages.new_tensor, (settings.temperature_positive, settings.temperature_negative))
        steepness = torch.where(advantages > 0, positive, negative)
        gate = 4 / steepness * torch.sigmoid(steepness * (log_ratio_of(inputs).exp() - 1))
        return policy_loss(inputs, -gate * advantages, {}, settings)
