"""How a function's replicas are built, and how many of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhfless.records import FunctionName
from rlhfless.scaling.placement import Allocation


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on every scaling policy: `scaling.generation.min_actors` and `scaling.hold_*` of the spec."""

    fewest: int = 0
    """The number of replicas that are never released."""
    reason: str = ""
    """The key of the spec that sets the limit."""
    idle: bool = True
    """Replicas may stay idle between two uses; if False, they are released after each use."""


@dataclass(frozen=True)
class Blueprint:
    """How to build a function's replicas."""

    function: FunctionName
    deployment: type
    settings: Callable[[Allocation], Any]
    """The deployment's settings for a replica in an allocation whose devices are bound."""
    allocations: tuple[Allocation, ...]
    """The allocations of replica 0, 1, ...; their number is the largest number of replicas at a time."""
    bounds: Bounds = Bounds()
