"""Group relative policy optimisation (arXiv 2402.03300): GRPO's advantages and PPO's clip."""

from __future__ import annotations

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.policy_loss import clipped_policy_loss
from rlhfless.spec import GRPOSpec


class GRPO(GroupRelative):
    """The algorithm `grpo` (see rlhfless.algorithms.base)."""

    def __init__(self, settings: GRPOSpec) -> None:
        super().__init__(settings)
        self._settings = settings

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """PPO's clipped loss of each token."""
        return clipped_policy_loss(inputs, self._settings)
