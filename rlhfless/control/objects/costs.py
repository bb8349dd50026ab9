"""Objects of usage, cost and computations."""

from __future__ import annotations

from typing import Any, Literal

from rlhfless.control.objects.common import ApiObject, ErrorObject


class FunctionUsage(ApiObject):
    """Devices held by a function of a run."""

    function: str
    kind: str
    """The kind of the devices, as the price book names it."""
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    """While it started."""
    cost_usd: float
    cold_starts: int
    invocations: int


class StaticFleet(ApiObject):
    """The best fleet that never changes, for the same steps: simulated on this run's own trace."""

    actors: int
    cost_usd: float
    wall_s: float
    same_cost_usd: float
    """This run's own fleet in the same simulation: what the static fleet is to be compared with."""
    steps: int
    """Steps that were simulated."""


class PlannedCost(ApiObject):
    """What was predicted of a run before it began: means, each between the two ends of its band."""

    steps: int
    step_s: float
    wall_s: float
    wall_low_s: float
    wall_high_s: float
    cost_usd: float
    cost_low_usd: float
    cost_high_usd: float


class MeasuredCost(ApiObject):
    """What was measured of what is planned: means of the steps after the first one, which has the starts."""

    steps: int
    step_s: float
    step_usd: float


class PlannedDevices(ApiObject):
    """A run on so many devices of a kind."""

    kind: str
    count: int
    placement: str
    fits: bool
    problems: list[str]
    """Why it does not fit."""
    nearest_change: str | None
    """After which it fits."""
    predicted: PlannedCost | None
    reason: str | None
    """Why nothing is predicted although it fits."""


class PlanObject(ApiObject):
    """What a run would need, take and cost."""

    object: Literal["plan"] = "plan"
    spec: dict[str, Any]
    """With every default, and what the devices decide."""
    steps: int
    sequence_tokens: int
    parameters: int
    chosen: PlannedDevices
    """On the devices that the spec names, or that the service has."""
    memory: dict[str, Any]
    """The memory of the chosen devices, by function and phase, in bytes."""
    alternatives: list[PlannedDevices]
    """The cheapest that keeps the deadline first."""
    lengths: str
    """Where the response lengths come from."""
    missing: list[str]
    """What would make a better answer."""


class UsageObject(ApiObject):
    """What a run has used so far."""

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
    """Rewards of given samples."""

    object: Literal["reward_trial"] = "reward_trial"
    data: list[SampleScore]
    """In the order of the samples."""
    wall_s: float


class SimulationObject(ApiObject):
    """A simulation that was asked for."""

    object: Literal["simulation"] = "simulation"
    id: str
    status: Literal["queued", "running", "succeeded", "failed"]
    created_at: float
    finished_at: float | None
    result: dict[str, Any] | None
    """`rows` by policy."""
    error: ErrorObject | None
