"""The limits that a spec sets on the whole run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfless.scaling.prices import SECONDS_PER_HOUR
from rlhfless.spec import LimitsSpec


@dataclass(frozen=True, slots=True)
class Spent:
    """What all attempts of a run have spent together."""

    cost_usd: float
    device_s: float
    held_s: float
    """Time in which the run held devices."""


def reached(limits: LimitsSpec, spent: Spent) -> str:
    """The limit that is reached, with its key and figures; empty if none is."""
    figures = (
        ("max_cost_usd", limits.max_cost_usd, spent.cost_usd),
        ("max_device_hours", limits.max_device_hours, spent.device_s / SECONDS_PER_HOUR),
        ("max_wall_clock_s", limits.max_wall_clock_s, spent.held_s),
    )
    for key, limit, value in figures:
        if limit is not None and value >= limit:
            return f"limits.{key} is {limit:g}, and the run has used {value:.4g}"
    return ""
