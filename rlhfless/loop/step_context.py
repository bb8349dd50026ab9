"""What belongs to one step. Two steps can be under way at once, so none of it is the run's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhfless.functions.base import Call
from rlhfless.loop.rollout_request import RolloutRequest
from rlhfless.records import PublishedWeights

if TYPE_CHECKING:
    from rlhfless.loop.generation import GenerationStage


@dataclass(frozen=True, slots=True)
class StepBegun:
    """When a step was begun. Times are unix times."""

    step: int
    start_s: float
    """Its first try."""
    tried_s: float
    """The try that is under way."""
    recovers: bool
    """The step is done again after a fault, or no generation actor was up when it began: up to the first work of this
    try it is recovering."""


@dataclass(slots=True)
class StepContext:
    """One try of a step, from the begin of its rollout to the end of its training."""

    begun: StepBegun
    request: RolloutRequest
    published: PublishedWeights
    """The weights that its samples are drawn with."""
    stage: GenerationStage | None = None
    """Its generation, once that has begun."""

    @property
    def step(self) -> int:
        return self.begun.step

    @property
    def call(self) -> Call:
        """The identity that all calls of the step carry."""
        return self.request.call


class StepClock:
    """When steps begin. A step counts from the end of the step before it, so that closing that one is in it too, unless
    something else came between; and from its first try if that one failed."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        """When the steps that have not ended yet were begun first, by step."""
        self._ended_s: float | None = None
        """When the last step ended, if nothing but its closing came after it."""

    def begins(self, step: int, *, fleet_is_up: bool) -> StepBegun:
        """A step is begun, or done again."""
        now_s = time.time()
        recovers = step in self._begun_s or not fleet_is_up
        start_s = self._begun_s.setdefault(step, now_s if self._ended_s is None else self._ended_s)
        self._ended_s = None
        return StepBegun(step, start_s, now_s, recovers)

    def interrupted(self) -> None:
        """Something else is done that is no part of a step, such as an evaluation."""
        self._ended_s = None

    def ended(self, step: int, end_s: float) -> float:
        """A step is over. Returns since when others are under way; `end_s` if none is."""
        self._begun_s.pop(step, None)
        self._ended_s = end_s
        return min(self._begun_s.values(), default=end_s)
