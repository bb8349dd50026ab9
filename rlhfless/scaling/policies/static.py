"""Fleets that never change, as in verl and OpenRLHF. Pure.

All actors work in every step, with equal shares of the prompts. If generation shares its devices with other functions
(verl), a replica that has finished sleeps, with its weights in host memory, and wakes for its next turn. If it does not
(OpenRLHF), no device is ever given back. If there are actors that prefill only (DistServe, arXiv 2401.09670), all
prompts begin there.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless.scaling.policies.fleet_actions import assign_groups, make_way, start, take_turns
from rlhfless.scaling.policies.fleet_layout import Contexts
from rlhfless.scaling.policy import Action, Event, StepBegan, StepView
from rlhfless.spec.policies import StaticSpec


class Static:
    """The first `actors` slots for generation, in every step, and all for prefill."""

    def __init__(self, settings: StaticSpec) -> None:
        self._actors = settings.actors
        self._contexts = Contexts()

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        prefill = now.layout.prefill
        actors = (*prefill, *now.layout.generation[: self._actors])
        if isinstance(event, StepBegan):
            return [*make_way(now, actors), *start(now, actors), *assign_groups(now, prefill or actors)]
        return take_turns(now, event, actors)
