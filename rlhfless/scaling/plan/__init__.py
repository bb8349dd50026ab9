"""The plan of a step's generation. Pure; docs/plan.md describes its inputs, decisions and methods."""

from rlhfless.scaling.plan.contract import (
    CheapestUnderDeadline,
    Contract,
    FastestUnderBudget,
    RunContract,
    Weighted,
    best_of,
    contract_for_step,
    order_of,
)
from rlhfless.scaling.plan.cost import CapacityError
from rlhfless.scaling.plan.options import DeviceOption, FleetOptions, Standby
from rlhfless.scaling.plan.planner import plan
from rlhfless.scaling.plan.responses import Responses, responses
from rlhfless.scaling.plan.step_plan import ActorPlan, Plan

__all__ = [
    "ActorPlan",
    "CapacityError",
    "CheapestUnderDeadline",
    "Contract",
    "DeviceOption",
    "FastestUnderBudget",
    "FleetOptions",
    "Plan",
    "Responses",
    "RunContract",
    "Standby",
    "Weighted",
    "best_of",
    "contract_for_step",
    "order_of",
    "plan",
    "responses",
]
