"""Objects of runs, and of their events, metrics, checkpoints and rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhfless.control.lifecycle import Status
from rlhfless.control.objects.common import ApiObject, ErrorObject


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
    """What the run does or waits for, in words."""
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
    left_s: Annotated[float | None, Field(description="Predicted seconds to its end, at the pace of the last steps.")]
    attempt: int
    """Number of drivers that have worked on the run: 1 unless it was paused, or a driver died."""
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
    """The last step of the series: ask with `after_step` for later steps."""
    series: list[Series]


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
    """The weight version that drew the sample."""
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
