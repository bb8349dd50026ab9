"""Decoupled clip and dynamic sampling policy optimisation (DAPO, arXiv 2503.14476): GRPO's advantages and PPO's clip,
with DAPO's settings. Dynamic sampling is the loop's (rlhfless.loop.redraws), by what the settings need."""

from __future__ import annotations

from rlhfless.algorithms.group_relative import GroupRelative
from rlhfless.algorithms.policy_loss import ClippedLoss
from rlhfless.spec import DAPOSpec


class DAPO(GroupRelative[DAPOSpec], ClippedLoss[DAPOSpec]):
    """The algorithm `dapo` (see rlhfless.algorithms.base)."""
