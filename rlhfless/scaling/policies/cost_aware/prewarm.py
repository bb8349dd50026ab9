"""Actors that are started for later steps, although this step would not pay for their cold start. Pure.

A cold start takes as long as a step, so no single step would ever pay for one more actor. Its value is the gain of a
plan in which the slots without a replica had a warm one, in this step and each remaining step:

    gain per step x steps left > price of the cold starts

It is considered in the steps 1, 2, 4, 8 ... of a run, and whenever a deadline cannot be kept (`is_due`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhfless.scaling.plan import Plan
from rlhfless.scaling.policies.fleet_options import COLD

STARTED = f"{COLD}, then warm"

FASTER = 0.98
"""A plan counts as faster if it ends two percent earlier."""


def warm_instead(standby: Mapping[int, tuple[str, float]]) -> dict[int, tuple[str, float]]:
    """The standby of all slots if each slot without a replica had a warm one, under a name of its own."""
    return {slot: (STARTED, 0.0) if tier == COLD else (tier, wait_s) for slot, (tier, wait_s) in standby.items()}


def is_due(steps: int, chosen: Plan) -> bool:
    """Whether to consider prewarming in this step, after `steps` steps."""
    return not chosen.feasible or (steps + 1) & steps == 0


def gain_usd(chosen: Plan, other: Plan) -> float:
    """The gain of the other plan in one step: money under a deadline, money and time by the contract's weights;
    infinite if only more actors keep the deadline, or if only time counts."""
    faster = other.step_s < chosen.step_s * FASTER
    if math.isinf(chosen.time_usd_per_s) or not chosen.feasible:
        return math.inf if faster else 0.0
    return chosen.usd - other.usd + chosen.time_usd_per_s * (chosen.step_s - other.step_s)
