"""The settings of the reward models' front and of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.lease import LeaseTerms
from rlhfless.functions.out_of_memory import Planned
from rlhfless.spec import OnFailure, RewardModelSpec


@dataclass(frozen=True, slots=True)
class RewardModelSettings:
    """The settings of a reward model replica."""

    run_id: str
    lease: LeaseTerms
    rewards: tuple[RewardModelSpec, ...]
    on_failure: OnFailure
    rank_bindings: tuple[DeviceBinding, ...]
    call_timeout_s: float
    planned: Planned = field(default_factory=dict)
    """Of one rank."""
