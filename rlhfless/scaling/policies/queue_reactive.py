"""A fleet that follows its queue, as Ray Serve, Knative and KEDA do: it knows requests, not steps. Pure.

A router gives each sample to the replica with the fewest. What an engine has not begun can still go elsewhere: when a
new replica serves, it takes its share of what waits. A replica that is one too many gets nothing more, finishes
what it has, and goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless.records import Decision
from rlhfless.scaling.policies.crew import (
    Inputs,
    Layout,
    LayoutCache,
    awake,
    dealt_to_least,
    load,
    make_way,
    rescue,
    rest,
    retire,
    slots,
    start,
)
from rlhfless.scaling.policies.scalers import Scaler
from rlhfless.scaling.policy import (
    Action,
    Beat,
    Event,
    Generated,
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


class QueueReactive:
    """State of one run."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler
        self._layouts = LayoutCache()
        self._replicas = 1  # what a deployment begins with
        self._asked_s = -math.inf

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        layout = self._layouts.of(view.fleet)
        match event:
            case StepBegan():
                return self._begin(at_s, view, layout)
            case Serving(place):
                return _take_share(view, layout, place, self._crew(layout))
            case Lost(place, samples):
                return rescue(view, layout, place, samples)
            case Generated():
                held = [place for place in layout.generation if layout.shared(place) and awake(view.places[place])]
                return [rest(view, place) for place in held]
            case Idle(place) if layout.shared(place):
                return retire(view, place)
            case Beat() | StepEnded() | Idle():
                return self._scale(at_s, view, layout, int((~view.finished).sum()))
        return []

    def _crew(self, layout: Layout) -> tuple[int, ...]:
        return layout.generation[: max(self._replicas, 1)]

    def _begin(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        """With no replica left, the requests that wait call for one at once."""
        notes = [action for action in self._scale(at_s, view, layout, view.group.size) if isinstance(action, Note)]
        crew = self._crew(layout)
        begin = [*make_way(view, layout, crew), *start(view, crew)]
        up = [place for place in crew if awake(view.places[place])] or crew
        samples = np.arange(view.group.size)
        return [*notes, *begin, *dealt_to_least(samples, up, load(view))]

    def _scale(self, at_s: float, view: StepView, layout: Layout, ongoing: int) -> list[Action]:
        """Asks the scaler, and starts and releases what it wants."""
        actions: list[Action] = []
        if at_s - self._asked_s >= self._scaler.interval_s:
            self._asked_s = at_s
            wanted = min(self._scaler.wanted(at_s, ongoing, self._replicas), len(layout.generation))
            if wanted != self._replicas:
                inputs: Inputs = {"ongoing": ongoing, "replicas": self._replicas}
                actions.append(Note(Decision(view.step, at_s, "scale", f"{wanted} replicas", inputs)))
                self._replicas = wanted
        if ongoing:
            actions += [*make_way(view, layout, self._crew(layout)), *start(view, self._crew(layout))]
        too_many, loads = layout.generation[self._replicas :], load(view)
        return actions + [Release(p) for p in too_many if awake(view.places[p]) and loads[p] == 0]


def _take_share(view: StepView, layout: Layout, place: int, crew: Sequence[int]) -> list[Action]:
    """Moves to a new replica its share of the samples that no engine has begun."""
    loads = load(view)
    excess = np.maximum(loads - [slots(layout.rooms[other]) for other in range(loads.size)], 0)
    share = int(loads.sum()) // max(len(crew), 1) - int(loads[place])
    actions: list[Action] = []
    for source in np.argsort(-excess, kind="stable").tolist():
        take = min(int(excess[source]), share)
        if source == place or take <= 0:
            continue
        begun = view.tokens[(samples := view.samples_at(source))] > 0
        waiting = samples[~begun][-take:]
        if waiting.size:
            actions.append(Move(source, place, waiting))
            share -= waiting.size
    return actions
