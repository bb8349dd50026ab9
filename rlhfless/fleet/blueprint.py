"""What a function's replicas are made from, and how many of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhfless.records import FunctionName
from rlhfless.scaling.placement import Allocation


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no scaling policy goes beyond: `scaling.generation.min_actors` and `scaling.hold_*` of the spec."""

    fewest: int = 0
    """So many replicas are not released."""
    reason: str = ""
    """Which key of the spec says so."""
    idle: bool = True
    """Replicas may wait between two uses; if not, they are released after each."""


@dataclass(frozen=True)
class Blueprint:
    """How to build a function's replicas."""

    function: FunctionName
    deployment: type
    settings: Callable[[Allocation], Any]
    """The deployment's settings for a replica in an allocation."""
    allocations: tuple[Allocation, ...]
    """Where replica 0, 1, ... sit; as many as there may be at a time."""
    bounds: Bounds = Bounds()
    takes_allocation: bool = True
    """False: the replica's parts ask Ray for the allocation themselves (the learner's ranks)."""
