"""Scale a fleet by its queue, as Ray Serve, Knative and KEDA do: it knows requests, not steps. Pure.

A router gives each sample to the replica with the fewest samples. Samples that an engine has not started can still
move: when a new replica serves, it takes its share of the waiting samples. A superfluous replica gets no more samples,
finishes the samples it has, and is released.

An autoscaler decides the number of replicas from running and queued requests, averaged over windows. It sees their
number at every event, and decides at its own interval. docs/policies.md has the sources of the defaults.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field

from rlhfless.scaling.policies.fleet import Contexts, PolicyContext, assign_to_least, note, rescue, start
from rlhfless.scaling.policy import (
    Action,
    Event,
    Heartbeat,
    Idle,
    Lost,
    Move,
    Note,
    Release,
    Serving,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.spec.base import MOST_S, Duration, Processes, SpecModel

Seconds = Annotated[float, Field(ge=0, le=MOST_S)]


class RayServeSpec(SpecModel):
    """Ray Serve's autoscaler. Defaults are those of `AutoscalingConfig` in Ray 2.60 (ray/serve/config.py)."""

    type: Literal["queue_reactive_ray_serve"] = "queue_reactive_ray_serve"

    target_ongoing_requests: Annotated[float, Field(gt=0)] = 2.0
    """Target number of running and queued requests per replica."""
    upscale_delay_s: Seconds = 30.0
    """Seconds that more replicas must be wanted before any is added."""
    downscale_delay_s: Seconds = 600.0
    """Seconds that fewer replicas must be wanted before any is removed."""
    look_back_period_s: Duration = 30.0
    """Window over which requests are averaged, in seconds."""
    interval_s: Duration = 0.1
    """Seconds between two decisions: `CONTROL_LOOP_INTERVAL_S` (ray/serve/_private/constants.py)."""


class KnativeSpec(SpecModel):
    """Knative's pod autoscaler. Defaults are those of the ConfigMap `config-autoscaler` of Knative Serving."""

    type: Literal["queue_reactive_knative"] = "queue_reactive_knative"

    target_concurrency: Annotated[float, Field(gt=0)] = 100.0
    """`container-concurrency-target-default`: target number of concurrent requests per replica."""
    target_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """`container-concurrency-target-percentage`, as a fraction."""
    stable_window_s: Duration = 60.0
    """Window over which concurrency is averaged outside panic mode, in seconds."""
    panic_window_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`panic-window-percentage`, as a fraction of the stable window; the default is a panic window of 6 s."""
    panic_threshold: Annotated[float, Field(ge=1)] = 2.0
    """`panic-threshold-percentage`, as a factor: panic mode starts when the panic window asks for at least this
    multiple of the current replicas."""
    max_scale_up_rate: Annotated[float, Field(gt=1)] = 1000.0
    """Largest ratio of replicas after a decision to replicas before it."""
    max_scale_down_rate: Annotated[float, Field(gt=1)] = 2.0
    """Largest ratio of replicas before a decision to replicas after it."""
    scale_to_zero_grace_s: Seconds = 30.0
    """Seconds the last replica is kept after the decision to scale to zero."""
    interval_s: Duration = 2.0
    """`tick-interval`: seconds between two decisions."""


class KedaSpec(SpecModel):
    """KEDA on top of the Kubernetes horizontal pod autoscaler. Defaults are those of KEDA's ScaledObject specification
    and of `HorizontalPodAutoscaler` v2."""

    type: Literal["queue_reactive_keda"] = "queue_reactive_keda"

    target_value: Annotated[float, Field(gt=0)] = 5.0
    """Target queue length per replica. KEDA's scalers differ; most of those for message queues use 5."""
    polling_s: Duration = 30.0
    """`pollingInterval`: seconds between two checks for work while there is no replica."""
    cooldown_s: Seconds = 300.0
    """`cooldownPeriod`: seconds without work after which the last replica is released."""
    sync_s: Duration = 15.0
    """`--horizontal-pod-autoscaler-sync-period`: seconds between two decisions."""
    tolerance: Annotated[float, Field(ge=0)] = 0.1
    """`--horizontal-pod-autoscaler-tolerance`: ratios this close to 1 change nothing."""
    downscale_window_s: Seconds = 300.0
    """`behavior.scaleDown.stabilizationWindowSeconds`: the highest recommendation within this many seconds applies."""
    upscale_pods: Processes = 4
    """`behavior.scaleUp`: every 15 s, replicas may grow by this number or double, whichever is more."""


class MetricWindow:
    """A count over time, constant between two records, with averages over its last part."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._pieces: deque[tuple[float, float]] = deque()  # (start time, count)

    def record(self, at_s: float, count: float) -> None:
        self._pieces.append((at_s, count))
        while len(self._pieces) > 1 and self._pieces[1][0] <= at_s - self._longest_s:
            self._pieces.popleft()

    def mean(self, at_s: float, length_s: float) -> float:
        """Return the mean over the last `length_s`, or since a later first record; at the first record, its count."""
        total, until_s = 0.0, at_s
        since_s = max(at_s - length_s, self._pieces[0][0])
        for from_s, count in reversed(self._pieces):
            begin_s = max(from_s, since_s)
            total += count * max(until_s - begin_s, 0.0)
            until_s = min(until_s, begin_s)
            if from_s <= since_s:
                break
        return total / (at_s - since_s) if at_s > since_s else self._pieces[-1][1]


class Autoscaler(Protocol):
    """A decision rule for the number of replicas."""

    interval_s: float
    """Seconds between two decisions."""

    def see(self, at_s: float, ongoing: int) -> None:
        """Take note of the number of requests from now on."""

    def wanted(self, at_s: float, ongoing: int, replicas: int) -> int:
        """Return the number of replicas to have; `replicas` were wanted last, and `ongoing` counts all requests."""
        ...


class RayServe:
    """`replica_queue_length_autoscaling_policy` with `_apply_delay_logic` (ray/serve/autoscaling_policy.py)."""

    def __init__(self, settings: RayServeSpec) -> None:
        self.interval_s = settings.interval_s
        self._settings = settings
        self._window = MetricWindow(settings.look_back_period_s)
        self._direction = 0
        self._since_s = 0.0

    def see(self, at_s: float, ongoing: int) -> None:
        self._window.record(at_s, ongoing)

    def wanted(self, at_s: float, ongoing: int, replicas: int) -> int:
        self.see(at_s, ongoing)
        mean = self._window.mean(at_s, self._settings.look_back_period_s)
        desired = max(math.ceil(mean / self._settings.target_ongoing_requests), 1)  # min_replicas is 1
        direction = (desired > replicas) - (desired < replicas)
        if direction != self._direction:
            self._direction, self._since_s = direction, at_s
        delay_s = self._settings.upscale_delay_s if direction > 0 else self._settings.downscale_delay_s
        if direction == 0 or at_s - self._since_s < delay_s:
            return max(replicas, 1)
        self._direction = 0
        return desired


class Knative:
    """The pod autoscaler's stable and panic mode (knative.dev, "Additional autoscaling configuration")."""

    def __init__(self, settings: KnativeSpec) -> None:
        self.interval_s = settings.interval_s
        self._settings = settings
        self._window = MetricWindow(settings.stable_window_s)
        self._panic_s: float | None = None
        """When the short window last called for panic; None while calm."""
        self._zero_since_s: float | None = None

    def see(self, at_s: float, ongoing: int) -> None:
        self._window.record(at_s, ongoing)

    def wanted(self, at_s: float, ongoing: int, replicas: int) -> int:
        settings, ready = self._settings, max(replicas, 1)
        self.see(at_s, ongoing)
        target = settings.target_concurrency * settings.target_share
        panic_s = settings.stable_window_s * settings.panic_window_share
        stable = math.ceil(self._window.mean(at_s, settings.stable_window_s) / target)
        sudden = math.ceil(self._window.mean(at_s, panic_s) / target)
        most, least = math.ceil(ready * settings.max_scale_up_rate), math.floor(ready / settings.max_scale_down_rate)
        stable, sudden = (min(max(count, least), most) for count in (stable, sudden))
        if sudden >= settings.panic_threshold * ready:
            self._panic_s = at_s
        elif self._panic_s is not None and at_s - self._panic_s >= settings.stable_window_s:
            self._panic_s = None
        # In panic the number of replicas never falls.
        return max(stable, sudden, replicas) if self._panic_s is not None else self._to_zero(at_s, stable, replicas)

    def _to_zero(self, at_s: float, desired: int, replicas: int) -> int:
        """Keep the last replica for the grace period."""
        if desired > 0 or replicas == 0:
            self._zero_since_s = None
            return desired
        if self._zero_since_s is None:
            self._zero_since_s = at_s
        return 0 if at_s - self._zero_since_s >= self._settings.scale_to_zero_grace_s else 1


class Keda:
    """KEDA between zero and one replica, the horizontal pod autoscaler above (keda.sh, kubernetes.io)."""

    def __init__(self, settings: KedaSpec) -> None:
        self.interval_s = settings.sync_s
        self._settings = settings
        self._recommended: deque[tuple[float, int]] = deque()
        self._active_s = -math.inf
        self._polled_s = -math.inf

    def see(self, at_s: float, ongoing: int) -> None:
        if ongoing > 0:
            self._active_s = at_s

    def wanted(self, at_s: float, ongoing: int, replicas: int) -> int:
        settings = self._settings
        self.see(at_s, ongoing)
        if replicas == 0:
            if at_s - self._polled_s < settings.polling_s:
                return 0
            self._polled_s = at_s
            return 1 if ongoing > 0 else 0
        ratio = ongoing / settings.target_value / replicas
        desired = replicas if abs(ratio - 1) <= settings.tolerance else math.ceil(ongoing / settings.target_value)
        self._recommended.append((at_s, desired))
        while self._recommended[0][0] < at_s - settings.downscale_window_s:
            self._recommended.popleft()
        if desired > replicas:
            return min(desired, max(replicas + settings.upscale_pods, 2 * replicas))
        if ongoing == 0 and at_s - self._active_s >= settings.cooldown_s:
            return 0
        return max(min(max(count for _, count in self._recommended), replicas), 1)


class QueueReactive:
    """The policy's state in one run."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler
        self._contexts = Contexts()
        self._replicas = 1  # the initial replicas of a deployment
        self._asked_s = -math.inf

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        self._autoscaler.see(at_s, now.left)
        match event:
            case StepBegan():
                return self._begin(now)
            case Serving(slot) if slot in (actors := self._actors(now)):
                return _take_share(now, slot, len(actors))
            case Heartbeat() | StepEnded() | Idle():
                return self._scale(now, now.left)
            case Lost(slot, samples):
                return rescue(now, slot, samples)
        return []

    def _actors(self, now: PolicyContext) -> tuple[int, ...]:
        return now.layout.generation[: max(self._replicas, 1)]

    def _begin(self, now: PolicyContext) -> list[Action]:
        """Assign the step's samples; without a replica, waiting requests start one at once."""
        notes = [action for action in self._scale(now, now.view.group.size) if isinstance(action, Note)]
        actors = self._actors(now)
        begin = start(now, actors)
        up = [slot for slot in actors if now.awake(slot)] or actors
        return [*notes, *begin, *assign_to_least(np.arange(now.view.group.size), up, now.loads)]

    def _scale(self, now: PolicyContext, ongoing: int) -> list[Action]:
        """Ask the autoscaler, and start and release replicas accordingly."""
        actions: list[Action] = []
        generation = now.layout.generation
        if now.at_s - self._asked_s >= self._autoscaler.interval_s:
            self._asked_s = now.at_s
            wanted = min(self._autoscaler.wanted(now.at_s, ongoing, self._replicas), len(generation))
            if wanted != self._replicas:
                actions.append(
                    note(now, "scale", f"{wanted} replicas", {"ongoing": ongoing, "replicas": self._replicas})
                )
                self._replicas = wanted
        if ongoing:
            actions += start(now, self._actors(now))
        too_many, loads = generation[self._replicas :], now.loads
        return actions + [Release(slot) for slot in too_many if now.awake(slot) and loads[slot] == 0]


def _take_share(now: PolicyContext, slot: int, actors: int) -> list[Action]:
    """Move to a new replica its share of the samples that no engine has started."""
    loads = now.loads
    excess = np.maximum(loads - [now.layout.max_sequences(other) for other in range(loads.size)], 0)
    share = int(loads.sum()) // max(actors, 1) - int(loads[slot])
    actions: list[Action] = []
    for source in np.argsort(-excess, kind="stable").tolist():
        take = min(int(excess[source]), share)
        if source == slot or take <= 0:
            continue
        begun = now.view.tokens[(samples := now.view.samples_at(source))] > 0
        waiting = samples[~begun][-take:]
        if waiting.size:
            actions.append(Move(source, slot, waiting))
            share -= waiting.size
    return actions


def ray_serve(settings: RayServeSpec) -> QueueReactive:
    return QueueReactive(RayServe(settings))


def knative(settings: KnativeSpec) -> QueueReactive:
    return QueueReactive(Knative(settings))


def keda(settings: KedaSpec) -> QueueReactive:
    return QueueReactive(Keda(settings))
