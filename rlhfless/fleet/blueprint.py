"""How a function's replicas are built, and how many of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhfless.scaling.function_kinds import Bounds, FunctionKind
from rlhfless.scaling.placement import Allocation


@dataclass(frozen=True)
class Blueprint:
    """How to build a function's replicas."""

    kind: FunctionKind
    deployment: type
    settings: Callable[[Allocation], Any]
    """The deployment's settings for a replica in an allocation whose devices are bound."""
    allocations: tuple[Allocation, ...]
    """The allocations of replica 0, 1, ...; their number is the largest number of replicas at a time."""
    bounds: Bounds
