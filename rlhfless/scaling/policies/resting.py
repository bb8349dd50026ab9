"""When replicas rest between two uses, and when they are started ahead of the next one. Pure.

Generation is wanted when the next step begins, the learner when generation has ended, a service by its first complete
group (or when generation has ended, if it shares devices with it). How long each of these takes is what the run has
seen so far; how long generation still takes in this step is what the last review expects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from rlhfless.records import Decision, FunctionName, ReplicaState
from rlhfless.scaling.policies.crew import Inputs, Layout, Moment, asleep_or_absent, awake
from rlhfless.scaling.policies.learned import Recent, Starts
from rlhfless.scaling.policies.rests import Gap, Rest, cheapest_rest
from rlhfless.scaling.policy import Action, Note, Release, Start


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

    def began(self, now: Moment) -> list[Action]:
        """Starts services ahead of their first group."""
        self._began_s[now.view.step] = now.at_s
        self._first_group = False
        actions: list[Action] = []
        for place in now.layout.others:
            if place in self._wanted_s and not now.layout.shared(place) and asleep_or_absent(now.view.places[place]):
                up_s = self._starts.wait_s(now.layout.rooms[place], now.view.places[place].tier)
                actions.append(Start(place, now.at_s + self._wanted_s[place].value - up_s))
        return actions

    def look(self, now: Moment) -> list[Action]:
        """At a beat: notes the first complete group, and starts the learner ahead of the end of generation."""
        if not self._first_group and now.view.finished.any():
            groups = np.bincount(now.view.group)
            if (np.bincount(now.view.group[now.view.finished], minlength=groups.size) == groups).any():
                self._first_group = True
                for place in self._services(now.layout):
                    self._wanted_s.setdefault(place, Recent()).add(now.at_s - self._began_s[now.view.step])
        actions: list[Action] = []
        for place in now.layout.others:
            room = now.layout.rooms[place]
            if room.function is FunctionName.LEARNER and not now.layout.shared(place):
                there = now.view.places[place]
                if asleep_or_absent(there) and now.at_s + self._starts.wait_s(room, there.tier) >= self.generated_s:
                    actions.append(Start(place))
        return actions

    def generated(self, now: Moment, crew: Iterable[int]) -> list[Action]:
        """All actors rest; those of the last plan are up again when the next step begins."""
        self._generated_s[now.view.step] = self.generated_s = now.at_s
        self.tokens = self._tokens[now.view.step] = now.tokens
        self._generation_s.add(now.at_s - self._began_s[now.view.step])
        actions: list[Action] = []
        tiers = {place: now.view.places[place].tier for place in now.layout.generation}
        for place in now.layout.generation:
            if awake(now.view.places[place]):
                rest = self.rest(now, place)
                actions += self.release(now, place, rest)
                tiers[place] = rest.tier if not rest.keep else None
                if rest.keep:
                    del tiers[place]
        if self._after.count:
            for place in crew:
                if place in tiers and not now.layout.shared(place):
                    up_s = self._starts.wait_s(now.layout.rooms[place], tiers[place])
                    actions.append(Start(place, now.at_s + self.after_s - up_s))
        return actions

    def idle(self, now: Moment, place: int) -> list[Action]:
        """A function beside generation has done its work of the step."""
        if not awake(now.view.places[place]):
            return []
        wanted_s = self._generation_s.value
        if now.layout.rooms[place].function is not FunctionName.LEARNER and not now.layout.shared(place):
            wanted_s = self._wanted_s[place].value if place in self._wanted_s else 0.0
        ended_s = self._generated_s.get(now.view.step, now.at_s) + self.after_s
        gap_s = max(ended_s - now.at_s, 0.0) + wanted_s
        gap = Gap(gap_s, gap_s, now.layout.shared(place), self.waiting_usd_per_s(now))
        rest = cheapest_rest(now.layout.rooms[place], gap, self._starts)
        return self.release(now, place, rest)

    def step_ended(self, step: int, end_s: float) -> None:
        """Learns how long it took from the end of generation."""
        generated_s = self._generated_s.pop(step, None)
        self._began_s.pop(step, None)
        if generated_s is not None:
            self._after.add((end_s - generated_s) / self._tokens.pop(step))

    def rest(self, now: Moment, place: int) -> Rest:
        """What a generation actor that has nothing left to do does until the next step."""
        room = now.layout.rooms[place]
        gap_s = max(self.generated_s - now.at_s, 0.0) + self.after_s
        if not self._after.count:
            gap_s = room.start_s  # unknown: the break-even of the ski-rental problem
        gap = Gap(gap_s, self.after_s, now.layout.shared(place), self.waiting_usd_per_s(now))
        return cheapest_rest(room, gap, self._starts)

    def release(self, now: Moment, place: int, rest: Rest) -> list[Action]:
        """Carries a rest out."""
        if rest.keep:
            return []
        starting = now.view.places[place].state is ReplicaState.STARTING
        tier = None if starting else rest.tier
        self._starts.forget(place)
        inputs: Inputs = {"function": str(now.view.fleet.rooms[place].function), "usd": rest.usd}
        choice = f"place {place} gives its devices back" if tier is None else f"place {place} sleeps in {tier}"
        return [Release(place, tier), Note(Decision(now.view.step, now.at_s, "release", choice, inputs))]

    def waiting_usd_per_s(self, now: Moment) -> float:
        """What those beside generation cost that are awake now: a longer step keeps them waiting."""
        awake_places = (place for place in now.layout.others if awake(now.view.places[place]))
        return math.fsum(now.layout.rooms[place].usd_per_s for place in awake_places)

    @staticmethod
    def _services(layout: Layout) -> list[int]:
        return [place for place in layout.others if layout.rooms[place].function is not FunctionName.LEARNER]
