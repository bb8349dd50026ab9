"""The objects of the API, as clients see them. Times are unix seconds."""

from rlhfless.control.objects.common import (
    MOST_INTEGER,
    ApiObject,
    ErrorBody,
    ErrorObject,
    ListObject,
    ProblemObject,
)
from rlhfless.control.objects.costs import (
    FunctionUsage,
    MeasuredCost,
    PlannedCost,
    PlannedDevices,
    PlanObject,
    RewardTrialObject,
    SampleScore,
    SimulationObject,
    StaticFleet,
    UsageObject,
)
from rlhfless.control.objects.fleet import (
    Bar,
    DeviceKindObject,
    DeviceRow,
    HolderObject,
    ReplicaNow,
    ReplicaObject,
    TimelineObject,
)
from rlhfless.control.objects.runs import CheckpointObject, EventObject, MetricsObject, RolloutObject, RunObject, Series

__all__ = [
    "MOST_INTEGER",
    "ApiObject",
    "Bar",
    "CheckpointObject",
    "DeviceKindObject",
    "DeviceRow",
    "ErrorBody",
    "ErrorObject",
    "EventObject",
    "FunctionUsage",
    "HolderObject",
    "ListObject",
    "MeasuredCost",
    "MetricsObject",
    "PlanObject",
    "PlannedCost",
    "PlannedDevices",
    "ProblemObject",
    "ReplicaNow",
    "ReplicaObject",
    "RewardTrialObject",
    "RolloutObject",
    "RunObject",
    "SampleScore",
    "Series",
    "SimulationObject",
    "StaticFleet",
    "TimelineObject",
    "UsageObject",
]
