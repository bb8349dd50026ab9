"""The keys of the scaling policies, for `scaling.policy` of a run and `policies` of a scenario alike.

Each policy has its own keys and no others; `type` tells them apart (see rlhfless.spec.extension). The defaults of
policies that others have published are theirs. docs/policies.md describes each policy.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless.spec.base import SpecModel
from rlhfless.spec.extension import OwnSpec, Seam

Seconds = Annotated[float, Field(ge=0)]


class CostAwareSpec(SpecModel):
    """The run's own scaler: plans each step from forecasts of its lengths, under the contract."""

    type: Literal["cost_aware"] = "cost_aware"

    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.99
    """With this probability a deadline is to be kept."""


class StaticSpec(SpecModel):
    """A fleet that never changes."""

    type: Literal["static"] = "static"

    actors: Annotated[int, Field(ge=1)] | None = None
    """Generation actors; as many as there is room for when left out."""


class RayServeSpec(SpecModel):
    """Ray Serve's autoscaler. Defaults: `AutoscalingConfig` of Ray 2.60 (ray/serve/config.py)."""

    type: Literal["queue_reactive_ray_serve"] = "queue_reactive_ray_serve"

    target_ongoing_requests: Annotated[float, Field(gt=0)] = 2.0
    """Requests that run or queue, per replica."""
    upscale_delay_s: Seconds = 30.0
    downscale_delay_s: Seconds = 600.0
    look_back_period_s: Annotated[float, Field(gt=0)] = 30.0
    """Window over which requests are averaged."""
    interval_s: Annotated[float, Field(gt=0)] = 0.1
    """Between two decisions: `CONTROL_LOOP_INTERVAL_S` (ray/serve/_private/constants.py)."""


class KnativeSpec(SpecModel):
    """Knative's pod autoscaler. Defaults: the ConfigMap `config-autoscaler` of Knative Serving."""

    type: Literal["queue_reactive_knative"] = "queue_reactive_knative"

    target_concurrency: Annotated[float, Field(gt=0)] = 100.0
    """`container-concurrency-target-default`."""
    target_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """`container-concurrency-target-percentage`."""
    stable_window_s: Annotated[float, Field(gt=0)] = 60.0
    panic_window_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`panic-window-percentage`: a panic window of 6 s."""
    panic_threshold: Annotated[float, Field(ge=1)] = 2.0
    """`panic-threshold-percentage`: panic when the short window asks for so many times the replicas there are."""
    max_scale_up_rate: Annotated[float, Field(gt=1)] = 1000.0
    max_scale_down_rate: Annotated[float, Field(gt=1)] = 2.0
    scale_to_zero_grace_s: Seconds = 30.0
    """How long the last replica is kept after it was decided to go to zero."""
    interval_s: Annotated[float, Field(gt=0)] = 2.0
    """`tick-interval`."""


class KedaSpec(SpecModel):
    """KEDA with the horizontal pod autoscaler under it. Defaults: KEDA's ScaledObject specification and Kubernetes'
    `HorizontalPodAutoscaler` v2."""

    type: Literal["queue_reactive_keda"] = "queue_reactive_keda"

    target_value: Annotated[float, Field(gt=0)] = 5.0
    """Queue length per replica; KEDA's scalers differ in it, and 5 is what most message queues take."""
    polling_s: Annotated[float, Field(gt=0)] = 30.0
    """`pollingInterval`: how often it looks whether there is work while there is no replica."""
    cooldown_s: Seconds = 300.0
    """`cooldownPeriod`: without work for so long, the last replica goes."""
    sync_s: Annotated[float, Field(gt=0)] = 15.0
    """`--horizontal-pod-autoscaler-sync-period`."""
    tolerance: Annotated[float, Field(ge=0)] = 0.1
    """`--horizontal-pod-autoscaler-tolerance`: a ratio this close to 1 changes nothing."""
    downscale_window_s: Seconds = 300.0
    """`behavior.scaleDown.stabilizationWindowSeconds`: the highest recommendation of that time counts."""
    upscale_pods: Annotated[int, Field(ge=1)] = 4
    """`behavior.scaleUp`: each 15 s at most so many more, or twice as many, whichever is more."""


class TailSpec(SpecModel):
    """RLHFuse's fusion of generation with the stages behind it (arXiv 2409.13221)."""

    type: Literal["rlhfuse_tail"] = "rlhfuse_tail"

    tail_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Samples left, as a share of the step's, at which the tail is moved together."""


class RLHFlessPaperSpec(SpecModel):
    """RLHFless as published (arXiv 2602.22718); docs/policies.md says which figure was found where."""

    type: Literal["rlhfless_published"] = "rlhfless_published"

    time_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Lambda: the weight of the normalised time against the normalised cost."""
    window: Annotated[int, Field(ge=1)] = 1
    """Of the EWMA of a prompt's lengths: alpha = 2 / (window + 1), so 1 takes the last visit alone."""
    cut_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Tau: an actor is cut when this share of its samples has ended."""
    first_guess_tokens: Annotated[float, Field(ge=1)] = 128.0
    """A response of a prompt never seen, while nothing was seen at all; later the mean of all that was."""
    prewarm_buffer_s: Seconds = 5.0
    """Actors are to be up so long before the next step begins by the shortest step seen."""


POLICY_SEAM = Seam(
    "scaling policy",
    built_in=(CostAwareSpec, StaticSpec, RayServeSpec, KnativeSpec, KedaSpec, TailSpec, RLHFlessPaperSpec),
    methods=("decide",),
)

PolicySpec = Annotated[
    CostAwareSpec | StaticSpec | RayServeSpec | KnativeSpec | KedaSpec | TailSpec | RLHFlessPaperSpec | OwnSpec,
    POLICY_SEAM,
]
"""What a live fleet can run. Policies of the simulator alone need to know the future, or are these with another
placement."""
