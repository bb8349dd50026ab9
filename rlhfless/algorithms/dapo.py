"""Decoupled clip and dynamic sampling policy optimisation (DAPO, arXiv 2503.14476): GRPO's advantages and PPO's clip,
with DAPO's settings. Dynamic sampling is the loop's (rlhfless.loop.redraws), by what the settings need."""

from __future__ import annotations

from rlhfless.algorithms.base import LossInputs, LossOutputs
from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.policy_loss import clipped_policy_loss
from rlhfless.spec import DAPOSpec


class DAPO(GroupRelative):
    """The algorithm `dapo` (see rlhfless.algorithms.base)."""

    def __init__(self, settings: DAPOSpec) -> None:
        super().__init__(settings)
        self._settings = settings

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """PPO's clipped loss of each token."""
        return clipped_policy_loss(inputs, self._settings)
