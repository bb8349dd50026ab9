"""Fleets that never change: what verl and OpenRLHF do. Pure.

All actors work in every step, with equal shares of the prompts. Where generation shares its devices with other
functions (verl), whoever is done sleeps, with its weights in host memory, and wakes for its next turn. Where it does
not (OpenRLHF), nobody ever gives anything back. Where there are actors that prefill only (DistServe, arXiv 2401.09670),
all prompts begin with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.scaling.policies.crew import LayoutCache, awake, groups_dealt, make_way, rescue, rest, retire, start
from rlhfless.scaling.policies.settings import StaticSettings
from rlhfless.scaling.policy import Action, Event, Generated, Idle, Lost, StepBegan, StepView


class Static:
    """The first `actors` rooms for generation, in every step, and all for prefill."""

    def __init__(self, settings: StaticSettings) -> None:
        self._actors = settings.actors
        self._layouts = LayoutCache()

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:  # noqa: ARG002
        layout = self._layouts.of(view.fleet)
        crew = (*layout.prefill, *layout.generation[: self._actors])
        match event:
            case StepBegan():
                begin = layout.prefill or crew
                return [*make_way(view, layout, crew), *start(view, crew), *groups_dealt(view, begin)]
            case Lost(place, samples):
                return rescue(view, layout, place, samples)
            case Generated():
                return [rest(view, place) for place in crew if layout.shared(place) and awake(view.places[place])]
            case Idle(place) if layout.shared(place):
                return retire(view, place)
        return []
