"""The objects of the API, as clients see them. Times are unix seconds."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field

from rlhfless.control.lifecycle import Status
from rlhfless.planning.objects import ApiObject, PlannedCost

T = TypeVar("T")


MOST_INTEGER = 2**63 - 1
"""Largest integer that a database stores."""


class ProblemObject(ApiObject):
    """A wrong field of a request."""

    param: str | None
    message: str
    hint: str | None


class ErrorObject(ApiObject):
    """An error: why a request or a run has failed."""

    code: str
    """The kind of error, for programs; never changes."""
    message: str
    param: str | None = None
    """The dotted field of the request."""
    problems: list[ProblemObject] = Field(default_factory=list)
    """All wrong fields; empty if there is only the message."""


class ErrorBody(ApiObject):
    """The body of every answer with an error."""

    error: ErrorObject


class ListObject(ApiObject, Generic[T]):
    """A page of a list, newest first unless said otherwise."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    """Whether there is a next page. Request it with `after` set to the id of the last object."""


class CheckpointObject(ApiObject):
    """A saved model in Hugging Face format, with the state that a resumed run needs."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    """The id, such as step-000020."""
    step: int
    location: str
    """Folder or URL of the checkpoint."""
    best: bool
    """Whether the checkpoint is the best by `checkpoint.best`."""
    score: float | None
    """The value of `metric` after this step; null if it was not measured then."""
    metric: str = ""
    """The metric of `checkpoint.best`; empty if the driver did not name it."""
    created_at: float


class RunObject(ApiObject):
    """A run."""

    object: Literal["run"] = "run"
    id: str
    name: str
    status: Status
    status_reason: str
    """What the run does or waits for, as text."""
    status_since: float
    created_at: float
    started_at: float | None
    """Start of the first step."""
    finished_at: float | None
    step: int
    """The last finished step."""
    steps: int
    latest: dict[str, float | None]
    """The newest value of each metric, by name."""
    cost_usd: float
    device_hours: float
    left_s: float | None
    """Predicted seconds until the run ends, at the pace of the last steps."""
    attempt: int
    """Number of drivers so far: 1 unless the run was paused or a driver died."""
    priority: int
    metadata: dict[str, str]
    owner: str
    latest_checkpoint: CheckpointObject | None
    best_checkpoint: CheckpointObject | None = None
    last_event: int
    """Id of the run's newest event; 0 before the first."""
    error: ErrorObject | None
    spec: dict[str, Any]
    """The spec; with every default once it is validated."""


class EventObject(ApiObject):
    """An event of a run."""

    object: Literal["event"] = "event"
    id: int
    """Number of the event, from 1 in each run, without gaps; `after` and `Last-Event-ID` refer to it."""
    run_id: str
    created_at: float
    level: Literal["info", "warning", "error"]
    type: str
    """`status`, `message`, `metrics`, `evaluation` or `checkpoint`."""
    message: str
    data: dict[str, Any]


class Series(ApiObject):
    """A metric over the steps."""

    name: str
    unit: str
    help: str
    steps: list[int]
    at: list[float]
    values: list[float | None]


class MetricsObject(ApiObject):
    """The metrics of a run over time."""

    object: Literal["metrics"] = "metrics"
    run_id: str
    step: int
    """The last step of the series. Use it as `after_step` to get later steps."""
    series: list[Series]


class TurnCall(ApiObject):
    """A call of an environment, with its answer."""

    tool: str
    """Empty for an answer to the turn's text."""
    arguments: Any
    outcome: str
    """`result`, `refused` (by the tool) or `invalid` (no such tool, or wrong arguments)."""
    answer: str
    wait_s: float


class TurnObject(ApiObject):
    """A turn of the model in an episode."""

    text: str
    parsed: str
    """What it contains: `calls`, `text`, `invalid` or `unfinished`."""
    reward: float | None
    calls: list[TurnCall]


class RolloutObject(ApiObject):
    """A sample of a run, for people to read."""

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
    """The weight version that generated the sample."""
    rewards: dict[str, float | None]
    """The reward of each part."""
    reward: float | None
    """The weighted sum of the parts."""
    failures: dict[str, str]
    """The parts that could not be computed, with the reasons."""
    split: str = "train"
    """`train`, or `held_out` for a sample of an evaluation after the step."""
    data_set: str = ""
    """The name of the prompt's set, if that has one."""
    greedy: bool = False
    """Whether each token is the most likely one."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """The other columns of the prompt's row, which rewards get; long values are cut."""
    expected: dict[str, str] = Field(default_factory=dict)
    """The expected answer by reward, as the reward compares it."""
    special_tokens: list[str] = Field(default_factory=list)
    """Special tokens that are in the prompt or the response."""
    turns: list[TurnObject] = Field(default_factory=list)
    """The turns of an episode; empty in a run without an environment."""
    episode_status: str = ""
    """How the episode ended."""


class Bar(ApiObject):
    """A time span in which a device was held or worked."""

    function: str
    work: str | None
    """The kind of work; None while the device was only held."""
    step: int | None
    state: str
    start_s: float
    end_s: float


class DeviceRow(ApiObject):
    """A device of a run over time."""

    device: str
    bars: list[Bar]


class TimelineObject(ApiObject):
    """The devices of a run over its last steps."""

    object: Literal["timeline"] = "timeline"
    run_id: str
    rows: list[DeviceRow]


class DeviceWork(ApiObject):
    """A call of a run's function on its devices, as its driver reports it."""

    function: str
    work: str
    step: int
    devices: list[str]
    """Names of the devices in the cluster, the same for all runs."""
    start_s: float
    end_s: float


class RunBar(ApiObject):
    """A time span in which a run's function worked on a device."""

    run_id: str
    function: str
    work: str
    step: int
    start_s: float
    end_s: float


class SharedDeviceRow(ApiObject):
    """A device of the cluster over time."""

    device: str
    bars: list[RunBar]


class DevicesTimelineObject(ApiObject):
    """The recent work of runs on devices, as their drivers have reported since the service started."""

    object: Literal["devices_timeline"] = "devices_timeline"
    rows: list[SharedDeviceRow]


class ReplicaNow(ApiObject):
    """A replica of a run, as its driver reports it."""

    model_config = ConfigDict(extra="ignore")  # see rlhfless.control.delivery.PROTOCOL

    function: str
    replica: str
    state: str
    since: float
    weights: str | None
    """The weight version that the replica serves."""
    devices: list[str]
    kind: str
    node: str
    usd_per_hour: float


class ReplicaObject(ReplicaNow):
    """A replica of a function, now."""

    object: Literal["function"] = "function"
    run_id: str


class FleetShareNow(ApiObject):
    """What a run uses of a shared engine."""

    model_config = ConfigDict(extra="ignore")

    busy_s: float
    waiting: int = 0
    running: int = 0
    present: bool = True


class FleetEngineNow(ApiObject):
    """An engine that several runs share, as a run's driver reports it (rlhfless.functions.calls.SharedNow)."""

    model_config = ConfigDict(extra="ignore")  # see rlhfless.control.delivery.PROTOCOL

    fleet: str
    engine: str
    incarnation: str
    terms: dict[str, Any]
    slots: int
    kind: str
    devices: int
    started_s: float
    up_s: float
    now_s: float
    runs: dict[str, FleetShareNow]


class FleetRunObject(ApiObject):
    """A run of a fleet."""

    run_id: str
    present: bool = False
    """Whether it is in the fleet now."""
    busy_device_s: float = 0.0
    """Device time that it pays for: its part of the engines' iterations, by tokens."""
    share: float = 0.0
    """Its part of the busy time of all runs."""
    waiting: int = 0
    """Requests that wait for the engines."""
    running: int = 0
    """Requests that the engines work on."""


class FleetEngineObject(ApiObject):
    """An engine of a fleet, now or at its end."""

    name: str
    incarnation: str
    started_at: float
    seen_at: float
    """When a run last reported it."""
    up: bool
    kind: str
    """Device kind."""
    devices: int
    slots: int
    """Weight versions of all runs that it can have at the same time."""
    provisioned_device_s: float
    """Sum of the three below."""
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float
    """Device time of its start."""


class FleetObject(ApiObject):
    """Runs that share engines, since the service started. No run pays for idle time and starts."""

    object: Literal["fleet"] = "fleet"
    id: str
    terms: dict[str, Any]
    """Keys that are equal in the specs of its runs."""
    engines: list[FleetEngineObject]
    runs: list[FleetRunObject]
    """The runs, those with the most device time first; also those that have left."""
    provisioned_device_s: float
    busy_device_s: float
    idle_device_s: float
    cold_device_s: float


class ReservationObject(ApiObject):
    """The devices that a run holds or waits for."""

    run_id: str
    name: str
    granted: int
    """Devices that the run may hold; 0 while it waits."""
    held: int
    """Devices that the run uses: more than granted only until its step ends."""
    minimum: int
    maximum: int
    asked_at: float
    tenants: int = 1
    """Maximum number of runs that share the devices by time-slicing, including this one."""
    sizes: list[int] = Field(default_factory=list)
    """Numbers of devices that an elastic run can have; empty for others."""
    size_reason: str = ""
    """Why an elastic run has this number of devices."""


class DeviceKindObject(ApiObject):
    """The devices of a kind, now."""

    object: Literal["devices"] = "devices"
    kind: str
    total: int
    free: int
    """Devices that are neither granted to a run nor held by one."""
    runs: list[ReservationObject]
    """Runs that hold or wait for devices, in the order of their requests."""


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
