"""The keys of the scaling policies, for `scaling.policy` of a run and `policies` of a scenario alike.

Each policy has its own keys and no others; `type` selects it (see rlhfless.spec.extension). The defaults of policies of
other systems are the defaults of those systems. docs/policies.md describes each policy.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import MOST_S, Duration, Processes, SpecModel, Steps
from rlhfless.spec.extension import OwnSpec, Seam

Seconds = Annotated[float, Field(ge=0, le=MOST_S)]


class CostAwareSpec(SpecModel):
    """RLHFless's own policy: plans each step from forecasts of its response lengths, under the contract."""

    type: Literal["cost_aware"] = "cost_aware"

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """The probability with which a deadline is to be kept."""


class StaticSpec(SpecModel):
    """A fleet that never changes."""

    type: Literal["static"] = "static"

    actors: Processes | None = None
    """Number of generation actors; by default as many as the devices allow."""


class RayServeSpec(SpecModel):
    """Ray Serve's autoscaler. Defaults: `AutoscalingConfig` of Ray 2.60 (ray/serve/config.py)."""

    type: Literal["queue_reactive_ray_serve"] = "queue_reactive_ray_serve"

    target_ongoing_requests: Annotated[float, Field(gt=0)] = 2.0
    """Running and queued requests per replica."""
    upscale_delay_s: Seconds = 30.0
    downscale_delay_s: Seconds = 600.0
    look_back_period_s: Duration = 30.0
    """Window over which requests are averaged."""
    interval_s: Duration = 0.1
    """Between two decisions: `CONTROL_LOOP_INTERVAL_S` (ray/serve/_private/constants.py)."""


class KnativeSpec(SpecModel):
    """Knative's pod autoscaler. Defaults: the ConfigMap `config-autoscaler` of Knative Serving."""

    type: Literal["queue_reactive_knative"] = "queue_reactive_knative"

    target_concurrency: Annotated[float, Field(gt=0)] = 100.0
    """`container-concurrency-target-default`."""
    target_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """`container-concurrency-target-percentage`."""
    stable_window_s: Duration = 60.0
    panic_window_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`panic-window-percentage`: a panic window of 6 s."""
    panic_threshold: Annotated[float, Field(ge=1)] = 2.0
    """`panic-threshold-percentage`: panic when the short window asks for at least this multiple of the replicas."""
    max_scale_up_rate: Annotated[float, Field(gt=1)] = 1000.0
    max_scale_down_rate: Annotated[float, Field(gt=1)] = 2.0
    scale_to_zero_grace_s: Seconds = 30.0
    """How long the last replica is kept after the decision to scale to zero."""
    interval_s: Duration = 2.0
    """`tick-interval`."""


class KedaSpec(SpecModel):
    """KEDA with the horizontal pod autoscaler under it. Defaults: KEDA's ScaledObject specification and Kubernetes'
    `HorizontalPodAutoscaler` v2."""

    type: Literal["queue_reactive_keda"] = "queue_reactive_keda"

    target_value: Annotated[float, Field(gt=0)] = 5.0
    """Queue length per replica. KEDA's scalers differ; most of its scalers for message queues use 5."""
    polling_s: Duration = 30.0
    """`pollingInterval`: how often KEDA checks for work while there is no replica."""
    cooldown_s: Seconds = 300.0
    """`cooldownPeriod`: the last replica is released after this long without work."""
    sync_s: Duration = 15.0
    """`--horizontal-pod-autoscaler-sync-period`."""
    tolerance: Annotated[float, Field(ge=0)] = 0.1
    """`--horizontal-pod-autoscaler-tolerance`: a ratio this close to 1 changes nothing."""
    downscale_window_s: Seconds = 300.0
    """`behavior.scaleDown.stabilizationWindowSeconds`: the highest recommendation of this time counts."""
    upscale_pods: Processes = 4
    """`behavior.scaleUp`: in each 15 s at most this many replicas more, or twice as many, whichever is more."""


class TailSpec(SpecModel):
    """RLHFuse's fusion of generation with the stages after it (arXiv 2409.13221)."""

    type: Literal["rlhfuse_tail"] = "rlhfuse_tail"

    tail_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of the step's samples that remain when the tail is moved together."""


class RLHFlessPaperSpec(SpecModel):
    """RLHFless as published (arXiv 2602.22718); docs/policies.md gives the source of each figure."""

    type: Literal["rlhfless_published"] = "rlhfless_published"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Lambda: the weight of the normalised time against the normalised cost."""
    window: Steps = 1
    """Window of the EWMA of a prompt's lengths: alpha = 2 / (window + 1), so with 1 only the last visit counts."""
    cut_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Tau: an actor is cut when this share of its samples has ended."""
    first_guess_tokens: Annotated[float, Field(ge=1)] = 128.0
    """Assumed length of a response before any was seen. Later, a prompt without history gets the mean of all
    responses."""
    prewarm_buffer_s: Seconds = 5.0
    """Actors are to be up this long before the next step is expected, by the shortest step so far."""


POLICY_SEAM = Seam(
    "scaling policy",
    built_in=(CostAwareSpec, StaticSpec, RayServeSpec, KnativeSpec, KedaSpec, TailSpec, RLHFlessPaperSpec),
    methods=("decide",),
)

PolicySpec = Annotated[
    CostAwareSpec | StaticSpec | RayServeSpec | KnativeSpec | KedaSpec | TailSpec | RLHFlessPaperSpec | OwnSpec,
    POLICY_SEAM,
]
"""Policies that a live fleet can run. The other policies of the simulator need to know the future, or are these with
another placement."""
