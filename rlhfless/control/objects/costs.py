"""Objects of usage, cost, rewards and simulations."""

from __future__ import annotations

from typing import Any, Literal

from rlhfless.control.objects.common import ApiObject, ErrorObject
from rlhfless.planning.objects import PlannedCost


class FunctionUsage(ApiObject):
    """Device time and cost of a function of a run."""

    function: str
    kind: str
    """The kind of the devices, as the price book names it."""
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    """Device time while replicas started."""
    cost_usd: float
    cold_starts: int
    invocations: int


class StaticFleet(ApiObject):
    """The best fleet of fixed size for the same steps, simulated on the run's own trace."""

    actors: int
    cost_usd: float
    wall_s: float
    same_cost_usd: float
    """Cost of the run's own fleet in the same simulation, for a comparison with the static fleet."""
    steps: int
    """Number of simulated steps."""


class MeasuredCost(ApiObject):
    """The measured time and cost of a step: means of the steps after the first, which has the starts."""

    steps: int
    step_s: float
    step_usd: float


class UsageObject(ApiObject):
    """The usage and cost of a run so far."""

    object: Literal["usage"] = "usage"
    run_id: str
    functions: list[FunctionUsage]
    device_s: float
    cost_usd: float
    best_static: StaticFleet | None
    """None until enough steps are done to simulate them."""
    planned: PlannedCost | None
    """None if the run was not planned."""
    measured: MeasuredCost | None
    """None before the second step."""


class SampleScore(ApiObject):
    """The rewards of one sample."""

    parts: dict[str, float | None]
    reward: float | None
    """The reward of all parts together; None if one has failed."""
    failures: dict[str, str]


class RewardTrialObject(ApiObject):
    """The rewards of a request's samples."""

    object: Literal["reward_trial"] = "reward_trial"
    data: list[SampleScore]
    """The scores, in the order of the samples."""
    wall_s: float


class SimulationObject(ApiObject):
    """A queued, running or ended simulation."""

    object: Literal["simulation"] = "simulation"
    id: str
    status: Literal["queued", "running", "succeeded", "failed"]
    created_at: float
    finished_at: float | None
    result: dict[str, Any] | None
    """The result, with `rows` by policy."""
    error: ErrorObject | None
