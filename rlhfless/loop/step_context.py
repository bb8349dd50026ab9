"""The state of one step. Two steps can be in progress at once, so none of this belongs to the run."""

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
    """When a step began. Times are unix times."""

    step: int
    start_s: float
    """Begin of its first try."""
    tried_s: float
    """Begin of the current try."""
    recovers: bool
    """Whether the step is done again after a fault, or began while no generation actor was up. The time until the first
    work of this try then counts as recovery."""


@dataclass(slots=True)
class StepContext:
    """One try of a step, from the begin of its rollout to the end of its training."""

    begun: StepBegun
    request: RolloutRequest
    published: PublishedWeights
    """The version with which its samples are drawn."""
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
    """When steps begin. A step begins at the end of the step before it, so that closing the previous step is counted in
    this one, unless other work came between. A step that is done again counts from its first try."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        """Begin of the first try of each step that has not ended, by step."""
        self._ended_s: float | None = None
        """End of the last step; None if other work than closing it came after."""

    def begin(self, step: int, *, fleet_is_up: bool) -> StepBegun:
        """Record that a step begins, or is done again."""
        now_s = time.time()
        recovers = step in self._begun_s or not fleet_is_up
        start_s = self._begun_s.setdefault(step, now_s if self._ended_s is None else self._ended_s)
        self._ended_s = None
        return StepBegun(step, start_s, now_s, recovers)

    def interrupt(self) -> None:
        """Record work that belongs to no step, such as an evaluation."""
        self._ended_s = None

    def end(self, step: int, end_s: float) -> float:
        """Record the end of a step. Returns the begin of the earliest other step in progress; `end_s` if there is
        none."""
        self._begun_s.pop(step, None)
        self._ended_s = end_s
        return min(self._begun_s.values(), default=end_s)
