"""API objects of a run's plan and of compared plans."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ApiObject(BaseModel):
    """Base of all objects of the API."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class PlannedCost(ApiObject):
    """The time and cost of a run as predicted before it began: means, each with the low and high end of its band."""

    steps: int
    step_s: float
    wall_s: float
    wall_low_s: float
    wall_high_s: float
    cost_usd: float
    cost_low_usd: float
    cost_high_usd: float
    band: str = ""
    """What the bands cover."""


class PlannedModel(ApiObject):
    """A teacher or judge of a planned run, beside a pool of devices that it would have for the whole run."""

    function: str
    kind: str
    devices: int
    """Devices of this kind that it holds while it works."""
    share: float
    """Fraction of the time in which it works."""
    pool_usd: float
    """Price of as many devices for the duration of the run."""


class PlannedDevices(ApiObject):
    """The plan of a run on a number of devices of a kind."""

    kind: str
    count: int
    placement: str
    fits: bool
    problems: list[str]
    """Why the run does not fit."""
    nearest_change: str | None
    """The change of the spec after which the run fits."""
    predicted: PlannedCost | None
    costs_usd: dict[str, float | None]
    """The cost at the prices of the bundled table, by source (`rent`, `hyperscaler`): null where it has none of the
    kind; empty without a prediction."""
    reason: str | None
    """Why nothing is predicted although the run fits."""
    no_engine: str | None
    """Why no run can be started on these devices, although one can be planned for them."""
    models: list[PlannedModel] = []
    """The teachers and judges on these devices; empty without a prediction."""


class PlannedSchedule(ApiObject):
    """A schedule of a run on the chosen devices, at the expected lengths."""

    schedule: str
    max_staleness: int
    """Versions that samples may be behind the learner."""
    step_s: float | None
    step_usd: float | None
    wall_s: float | None
    """Of the run."""
    cost_usd: float | None
    refused: str | None
    """Why it brings nothing there, or why nothing is predicted; null for one that is worth its older samples."""
    chosen: bool
    """Whether it meets the contract best, of those whose samples are no older than the spec's schedule lets them."""


class PlannedSize(ApiObject):
    """A size of an elastic run."""

    devices: int
    step_s: float | None
    """Seconds per step; null without a prediction."""
    cost_usd: float | None
    """Of the whole run at this size."""


class PlannedSizes(ApiObject):
    """The sizes between which an elastic run changes."""

    kind: str
    minimum: int
    """The run waits until it gets this many devices, and never has fewer."""
    maximum: int
    """The run never has more devices: its `max`, or the size that meets its contract best."""
    sizes: list[PlannedSize]
    """The sizes on which the run fits, fewest devices first, including those above `maximum`."""
    reason: str | None
    """Why the time per step is not predicted; it is then taken to be inverse to the number of devices."""


class PlanObject(ApiObject):
    """The memory, time and cost of a run, before it is started."""

    object: Literal["plan"] = "plan"
    spec: dict[str, Any]
    """The spec with every default, settled for the chosen devices."""
    steps: int
    sequence_tokens: int
    parameters: int
    chosen: PlannedDevices
    """The plan on the devices that the spec names, or that the service has."""
    memory: dict[str, Any]
    """The memory of the chosen devices, by function and phase, in bytes."""
    schedules: list[PlannedSchedule]
    """The schedules side by side on the chosen devices; empty if the run does not fit."""
    schedule_reason: str | None
    """Why one of them is chosen, and which overlap is refused; null if none is predicted."""
    sizes: PlannedSizes | None = None
    """The sizes of an elastic run; null for a run of one size."""
    lengths: str
    """The source of the response lengths."""
    missing: list[str]
    """The missing inputs of a better plan."""


class ComparedDevices(PlannedDevices):
    """The plan of a run on a number of devices of a kind, in a placement, beside others."""

    changes: dict[str, Any]
    """The keys of the spec that say so, by dotted name, beside `placement.kind` and `placement.devices`."""
    quantization: str
    """`generation.quantization`: `off` or `fp8`."""
    speculation: str
    """`generation.speculation.method`."""
    share_prefixes: bool
    """`learner.share_prefixes`."""
    latency: str | None
    """What the engine's seconds were taken from; null without a prediction."""
    on_front: bool
    """Whether no other one is both faster and cheaper."""
    step_usd: float | None
    usd_per_million_tokens: float | None
    """Per million response tokens."""
    energy_kwh: float | None
    """Of a step, at most: busy devices at the power that they are built for."""
    shares: dict[str, float]
    """By function: the share of the time in which it works. The largest is the bottleneck."""


class ChangedChoice(ApiObject):
    """The choice among compared rows if one assumption were another."""

    change: str
    """The other prices, or the other response lengths."""
    stays: bool
    """Whether the fastest and the cheapest row are the same as without it."""
    fastest: int
    """Number of the fastest row then, from 1."""
    cheapest: int
    unknown: list[str]
    """Kinds of devices that have no such price: their rows were left out."""


class ComparisonObject(ApiObject):
    """A run on kinds and numbers of devices, and in placements, side by side."""

    object: Literal["comparison"] = "comparison"
    steps: int
    rows: list[ComparedDevices]
    """The front first; then the others that fit, each by the contract, the best first; then what does not fit. With a
    deadline, what keeps it comes before what does not."""
    tried: int
    """Number of choices that were tried: all of the named devices; without any, the best of the price book's."""
    left_out: int
    """Number of them that are beyond `limit`."""
    sensitivity: list[ChangedChoice]
    """At each source of prices of the bundled table, and at responses of 70 and 130 % of the length."""
    lengths: str
    """The source of the response lengths."""
