"""A fleet that follows its queue, as Ray Serve, Knative and KEDA do: it knows requests, not steps. Pure.

A router gives each sample to the replica with the fewest samples. Samples that an engine has not begun can still move:
when a new replica serves, it takes its share of the waiting samples. A superfluous replica gets no more samples,
finishes the samples it has, and is released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.scaling.policies.fleet_actions import assign_to_least, make_way, note, start, take_turns
from rlhfless.scaling.policies.fleet_layout import Contexts, PolicyContext
from rlhfless.scaling.policy import (
    Action,
    Beat,
    Event,
    Idle,
    Move,
    Note,
    Release,
    Serving,
    StepBegan,
    StepEnded,
    StepView,
)
from rlhfless.sim.baselines.autoscalers import Autoscaler, Keda, Knative, RayServe
from rlhfless.spec.policies import KedaSpec, KnativeSpec, RayServeSpec


class QueueReactive:
    """State of one run."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self._autoscaler = autoscaler
        self._contexts = Contexts()
        self._replicas = 1  # what a deployment begins with
        self._asked_s = -math.inf

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        match event:
            case StepBegan():
                return self._begin(now)
            case Serving(slot):
                return _take_share(now, slot, len(self._actors(now)))
            case Idle(slot) if now.layout.shared(slot):
                return take_turns(now, event, now.layout.generation)
            case Beat() | StepEnded() | Idle():
                return self._scale(now, now.left)
        return take_turns(now, event, now.layout.generation)

    def _actors(self, now: PolicyContext) -> tuple[int, ...]:
        return now.layout.generation[: max(self._replicas, 1)]

    def _begin(self, now: PolicyContext) -> list[Action]:
        """If there is no replica, waiting requests start one at once."""
        notes = [action for action in self._scale(now, now.view.group.size) if isinstance(action, Note)]
        actors = self._actors(now)
        begin = [*make_way(now, actors), *start(now, actors)]
        up = [slot for slot in actors if now.awake(slot)] or actors
        return [*notes, *begin, *assign_to_least(np.arange(now.view.group.size), up, now.loads)]

    def _scale(self, now: PolicyContext, ongoing: int) -> list[Action]:
        """Asks the autoscaler, and starts and releases replicas accordingly."""
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
            actions += [*make_way(now, self._actors(now)), *start(now, self._actors(now))]
        too_many, loads = generation[self._replicas :], now.loads
        return actions + [Release(slot) for slot in too_many if now.awake(slot) and loads[slot] == 0]


def _take_share(now: PolicyContext, slot: int, actors: int) -> list[Action]:
    """Moves to a new replica its share of the samples that no engine has begun."""
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
    """The policy `queue_reactive_ray_serve`."""
    return QueueReactive(RayServe(settings))


def knative(settings: KnativeSpec) -> QueueReactive:
    """The policy `queue_reactive_knative`."""
    return QueueReactive(Knative(settings))


def keda(settings: KedaSpec) -> QueueReactive:
    """The policy `queue_reactive_keda`."""
    return QueueReactive(Keda(settings))
