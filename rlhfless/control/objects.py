"""The objects of the API, as clients see them. Times are unix seconds."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from rlhfless.control.lifecycle import Status

T = TypeVar("T")


class ApiObject(BaseModel):
    """Of all objects."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ProblemObject(ApiObject):
    """One wrong field."""

    param: str | None
    message: str
    mend: str | None


class ErrorObject(ApiObject):
    """Why something failed."""

    code: str
    """For programs; does not change."""
    message: str
    param: str | None = None
    """Dotted field of the request."""
    problems: list[ProblemObject] = []
    """All of them; empty if there is only the message."""


class ErrorBody(ApiObject):
    """The body of every answer that is no success."""

    error: ErrorObject


class ListObject(ApiObject, Generic[T]):
    """A page of a list, newest first unless said otherwise."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    """There are further ones: ask with `after` set to the last one's id."""


class CheckpointObject(ApiObject):
    """A saved model in Hugging Face format, with what a resumed run needs."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    """Such as step-000020."""
    step: int
    location: str
    """Folder or URL."""
    best: bool
    """By `checkpoint.best_by`."""
    score: float | None
    created_at: float


class RunObject(ApiObject):
    """One run."""

    object: Literal["run"] = "run"
    id: str
    name: str
    status: Status
    status_reason: str
    """What it does or waits for, in words."""
    status_since: float
    created_at: float
    started_at: float | None
    """Its first step began."""
    finished_at: float | None
    step: int
    """The last step that is done."""
    steps: int
    latest: dict[str, float | None]
    """The metrics that were measured last, by name."""
    cost_usd: float
    device_hours: float
    left_s: Annotated[float | None, Field(description="Predicted time to its end, at the pace of the last steps.")]
    attempt: int
    """Drivers that have worked on it: 1 unless it was paused, or its driver died."""
    priority: int
    metadata: dict[str, str]
    owner: str
    latest_checkpoint: CheckpointObject | None
    last_event: int
    """Id of its newest event; 0 before the first."""
    error: ErrorObject | None
    spec: dict[str, Any]
    """With every default, once it is validated."""


class EventObject(ApiObject):
    """What happened in a run."""

    object: Literal["event"] = "event"
    id: int
    """Counts from 1 in each run, without gaps: what `after` and `Last-Event-ID` name."""
    run_id: str
    created_at: float
    level: Literal["info", "warning", "error"]
    type: str
    """`status`, `message`, `metrics`, `evaluation` or `checkpoint`."""
    message: str
    data: dict[str, Any]


class FunctionUsage(ApiObject):
    """Devices held by a function of a run."""

    function: str
    kind: str
    """Of the devices, as the price book names it."""
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
    """Of the chosen devices, by function and phase, in bytes."""
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


class Series(ApiObject):
    """One metric over the steps."""

    name: str
    unit: str
    help: str
    steps: list[int]
    at: list[float]
    values: list[float | None]


class MetricsObject(ApiObject):
    """Time series of a run."""

    object: Literal["metrics"] = "metrics"
    run_id: str
    step: int
    """The last step that is in it: ask with `after_step` for what follows."""
    series: list[Series]


class RolloutObject(ApiObject):
    """A sample to read."""

    object: Literal["rollout"] = "rollout"
    run_id: str
    step: int
    prompt_id: str
    sample_index: int
    prompt: str
    response: str
    finish_reason: str
    response_tokens: int
    weights: str
    """Version that drew it."""
    rewards: dict[str, float | None]
    """By part."""
    reward: float | None
    """Of all parts together."""
    failures: dict[str, str]
    """Parts that could not be computed, and why; empty as a rule."""


class Bar(ApiObject):
    """What a device did for a while."""

    function: str
    work: str | None
    """None: it was held."""
    step: int | None
    state: str
    start_s: float
    end_s: float


class DeviceRow(ApiObject):
    """One device of a run."""

    device: str
    bars: list[Bar]


class TimelineObject(ApiObject):
    """Devices over the last steps."""

    object: Literal["timeline"] = "timeline"
    run_id: str
    rows: list[DeviceRow]


class SampleScore(ApiObject):
    """The rewards of one sample."""

    parts: dict[str, float | None]
    reward: float | None
    """Of all parts together; None if one has failed."""
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


class ReplicaNow(ApiObject):
    """What a driver says of a replica of its run."""

    function: str
    replica: str
    state: str
    since: float
    weights: str | None
    """Version that it serves."""
    devices: list[str]
    kind: str
    node: str
    usd_per_hour: float


class ReplicaObject(ReplicaNow):
    """A replica of a function, now."""

    object: Literal["function"] = "function"
    run_id: str


class HolderObject(ApiObject):
    """A run that holds devices, or waits for them."""

    run_id: str
    name: str
    granted: int
    """Devices that it may hold; 0 while it waits."""
    held: int
    """Devices that it uses: more than granted only until its step ends."""
    minimum: int
    maximum: int
    asked_at: float


class DeviceKindObject(ApiObject):
    """Devices of one kind, now."""

    object: Literal["devices"] = "devices"
    kind: str
    total: int
    free: int
    """Neither promised to a run nor held by one."""
    runs: list[HolderObject]
    """In the order in which they asked."""
