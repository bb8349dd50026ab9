"""When replicas rest between two uses, and when they are started ahead of the next one. Pure.

Generation is wanted when the next step begins, the learner when generation has ended, a service by its first complete
group (or when generation has ended, if it shares devices with it). How long each of these takes is what the run has
seen so far; how long generation still takes in this step is what the last review expects.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlhfless.records import Decision, FunctionName, ReplicaState
from rlhfless.scaling.policies.crew import Inputs, Layout, asleep_or_absent, awake
from rlhfless.scaling.policies.learned import Recent, Starts
from rlhfless.scaling.policies.rests import Gap, Rest, cheapest_rest
from rlhfless.scaling.policy import Action, Note, Release, Start, StepView


class Resting:
    """State of one run."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self._after = Recent()
        """From the end of generation until the next step begins, per token of the step: what is learned from."""
        self.tokens = 0.0
        """Of this step, prompts with each response: expected, and known when generation has ended."""
        self._tokens: dict[int, float] = {}
        self._generation_s = Recent()
        self._wanted_s: dict[int, Recent] = {}
        """By place of a service: from the step's begin until its first complete group."""
        self._began_s: dict[int, float] = {}
        self._generated_s: dict[int, float] = {}
        self._first_group = False
        self.generated_s = 0.0
        """When this step's generation is expected to end."""

    @property
    def after_s(self) -> float:
        """From the end of this step's generation until the next one begins."""
        return self._after.value * self.tokens

    def after_at_s(self, confidence: float) -> float:
        """What it stays below with this probability."""
        return max(self._after.at(confidence) * self.tokens, 0.0)

    def began(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        """Starts services ahead of their first group."""
        self._began_s[view.step] = at_s
        self._first_group = False
        actions: list[Action] = []
        for place in layout.others:
            if place in self._wanted_s and not layout.shared(place) and asleep_or_absent(view.places[place]):
                up_s = self._starts.wait_s(layout.rooms[place], view.places[place].tier)
                actions.append(Start(place, at_s + self._wanted_s[place].value - up_s))
        return actions

    def look(self, at_s: float, view: StepView, layout: Layout) -> list[Action]:
        """At a beat: notes the first complete group, and starts the learner ahead of the end of generation."""
        if not self._first_group and view.finished.any():
            groups = np.bincount(view.group)
            if (np.bincount(view.group[view.finished], minlength=groups.size) == groups).any():
                self._first_group = True
                for place in self._services(layout):
                    self._wanted_s.setdefault(place, Recent()).add(at_s - self._began_s[view.step])
        actions: list[Action] = []
        for place in layout.others:
            room = layout.rooms[place]
            if room.function is FunctionName.LEARNER and not layout.shared(place):
                there = view.places[place]
                if asleep_or_absent(there) and at_s + self._starts.wait_s(room, there.tier) >= self.generated_s:
                    actions.append(Start(place))
        return actions

    def generated(self, at_s: float, view: StepView, layout: Layout, crew: Iterable[int]) -> list[Action]:
        """All actors rest; those of the last plan are up again when the next step begins."""
        self._generated_s[view.step] = self.generated_s = at_s
        self.tokens = self._tokens[view.step] = float(view.tokens.sum() + view.prompt_tokens[view.group].sum())
        self._generation_s.add(at_s - self._began_s[view.step])
        actions: list[Action] = []
        tiers = {place: view.places[place].tier for place in layout.generation}
        for place in layout.generation:
            if awake(view.places[place]):
                rest = self.rest(at_s, view, layout, place)
                actions += self.release(at_s, view, place, rest)
                tiers[place] = rest.tier if not rest.keep else None
                if rest.keep:
                    del tiers[place]
        if self._after.count:
            for place in crew:
                if place in tiers and not layout.shared(place):
                    up_s = self._starts.wait_s(layout.rooms[place], tiers[place])
                    actions.append(Start(place, at_s + self.after_s - up_s))
        return actions

    def idle(self, at_s: float, view: StepView, layout: Layout, place: int) -> list[Action]:
        """A function beside generation has done its work of the step."""
        if not awake(view.places[place]):
            return []
        wanted_s = self._generation_s.value
        if layout.rooms[place].function is not FunctionName.LEARNER and not layout.shared(place):
            wanted_s = self._wanted_s[place].value if place in self._wanted_s else 0.0
        ended_s = self._generated_s.get(view.step, at_s) + self.after_s
        gap_s = max(ended_s - at_s, 0.0) + wanted_s
        gap = Gap(gap_s, gap_s, layout.shared(place), self.waiting_usd_per_s(view, layout))
        rest = cheapest_rest(layout.rooms[place], gap, self._starts)
        return self.release(at_s, view, place, rest)

    def step_ended(self, step: int, end_s: float) -> None:
        """Learns how long it took from the end of generation."""
        generated_s = self._generated_s.pop(step, None)
        self._began_s.pop(step, None)
        if generated_s is not None:
            self._after.add((end_s - generated_s) / self._tokens.pop(step))

    def rest(self, at_s: float, view: StepView, layout: Layout, place: int) -> Rest:
        """What a generation actor that has nothing left to do does until the next step."""
        room = layout.rooms[place]
        gap_s = max(self.generated_s - at_s, 0.0) + self.after_s
        if not self._after.count:
            gap_s = room.start_s  # unknown: the break-even of the ski-rental problem
        gap = Gap(gap_s, self.after_s, layout.shared(place), self.waiting_usd_per_s(view, layout))
        return cheapest_rest(room, gap, self._starts)

    def release(self, at_s: float, view: StepView, place: int, rest: Rest) -> list[Action]:
        """Carries a rest out."""
        if rest.keep:
            return []
        starting = view.places[place].state is ReplicaState.STARTING
        tier = None if starting else rest.tier
        self._starts.forget(place)
        inputs: Inputs = {"function": str(view.fleet.rooms[place].function), "usd": rest.usd}
        choice = f"place {place} gives its devices back" if tier is None else f"place {place} sleeps in {tier}"
        return [Release(place, tier), Note(Decision(view.step, at_s, "release", choice, inputs))]

    def waiting_usd_per_s(self, view: StepView, layout: Layout) -> float:
        """What those beside generation cost that are awake now: a longer step keeps them waiting."""
        return sum(layout.rooms[place].usd_per_s for place in layout.others if awake(view.places[place]))

    @staticmethod
    def _services(layout: Layout) -> list[int]:
        return [place for place in layout.others if layout.rooms[place].function is not FunctionName.LEARNER]
