"""Fixed-size fleets, as in verl and OpenRLHF. Pure.

All actors work in every step, and devices are never released. Prompts are assigned by the mean length of their
responses at their last visit, longest first, each to the actor that would end first. Unseen prompts count as the mean
of all prompts; before any mean is known, all actors get equal shares of the prompts in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless.scaling.policies.fleet import (
    Contexts,
    PolicyContext,
    assign_groups,
    rescue,
    samples_by_prompt,
    speeds_of,
    start,
)
from rlhfless.scaling.policy import Action, Assign, Event, Generated, Lost, StepBegan, StepView
from rlhfless.spec.fleet import StaticSpec


class Static:
    """A policy that uses the first `actors` generation slots in every step."""

    def __init__(self, settings: StaticSpec) -> None:
        self._actors = settings.actors
        self._contexts = Contexts()
        self._means: dict[str, float] = {}
        """By prompt: mean response tokens at its last visit."""

    def decide(self, at_s: float, event: Event, view: StepView) -> Sequence[Action]:
        now = self._contexts.of(at_s, view)
        match event:
            case StepBegan():
                actors = now.layout.generation[: self._actors]
                dealt = self._dealt(now, actors) if self._means else assign_groups(now, actors)
                return [*start(now, actors), *dealt]
            case Generated():
                means = np.bincount(view.group, view.tokens) / np.bincount(view.group)
                self._means.update(zip(view.prompt_ids, means.tolist(), strict=True))
            case Lost(slot, samples):
                return rescue(now, slot, samples)
        return []

    def _dealt(self, now: PolicyContext, actors: Sequence[int]) -> list[Action]:
        """Assign the longest prompts first, each with all siblings to the actor that would end first.

        An actor also generates its longest prompts first.
        """
        unseen = sum(self._means.values()) / len(self._means)
        lengths = np.array([self._means.get(name, unseen) for name in now.view.prompt_ids])
        ends = [(0.0, slot) for slot in range(len(actors))]
        speeds, home = speeds_of(now, actors), np.empty(lengths.size, np.int64)
        by_length: NDArray[np.int64] = np.argsort(-lengths, kind="stable")
        work = lengths * np.bincount(now.view.group)
        for group in by_length.tolist():
            end, index = ends[0]
            home[group] = index
            heapq.heapreplace(ends, (end + work[group] / speeds[index], index))
        order = samples_by_prompt(by_length, now.view.group)
        shares = ((slot, order[home[now.view.group[order]] == index]) for index, slot in enumerate(actors))
        return [Assign(slot, samples) for slot, samples in shares if samples.size]
