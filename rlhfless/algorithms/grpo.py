"""Group relative policy optimisation (arXiv 2402.03300): GRPO's advantages and PPO's clip."""

from __future__ import annotations

from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.spec import GRPOSpec


class GRPO(GroupRelative[GRPOSpec], ClippedLoss[GRPOSpec]):
    """The algorithm `grpo` (see rlhfless.algorithms.base)."""
