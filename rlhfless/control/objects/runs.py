"""Objects of runs, and of their events, metrics, checkpoints and rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfless.control.lifecycle import Status
from rlhfless.control.objects.common import ApiObject, ErrorObject


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
    """The reward of all parts together."""
    failures: dict[str, str]
    """Parts that could not be computed, and why; empty as a rule."""
