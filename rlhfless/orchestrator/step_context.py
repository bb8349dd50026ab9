"""The state of one step. Two steps can be in progress at once, so none of this belongs to the run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhfless.functions.base import Call
from rlhfless.orchestrator.rollout_request import RolloutRequest

if TYPE_CHECKING:
    from rlhfless.orchestrator.generation import GenerationStage


@dataclass(slots=True)
class StepBegun:
    """When a step began. Times are unix times."""

    step: int
    start_s: float
    """Begin of its first try, or the end of the step before, if that was later: the times of steps do not overlap."""
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
    oldest: int
    """The step of the oldest version that may draw its samples: the newest when it began."""
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
    this one, unless other work came between. A step that is done again counts from its first try, and one that is drawn
    while another is learned from the end of that one: so all steps together are the time of the run."""

    def __init__(self) -> None:
        self._first_s: dict[int, float] = {}
        """When the first try of each step that has not ended began, by step."""
        self._last: dict[int, StepBegun] = {}
        """The last try of each of these steps."""
        self._ended = 0
        """The last step that has ended; steps up to it may be taken again by a new learner, and end again."""
        self._ended_s: float | None = None
        """When a step ended last; None if other work than closing it came after."""

    def begin(self, step: int, *, fleet_is_up: bool) -> StepBegun:
        """Record that a step begins, or is done again."""
        now_s, before = time.time(), self._last.get(step)
        first_s = now_s if self._ended_s is None else self._ended_s
        start_s = first_s if before is None else before.start_s
        self._ended_s = None
        self._first_s.setdefault(step, first_s)
        begun = self._last[step] = StepBegun(step, start_s, now_s, before is not None or not fleet_is_up)
        return begun

    def interrupt(self) -> None:
        """Record work that belongs to no step, such as an evaluation."""
        self._ended_s = None

    def resume(self) -> None:
        """Record the end of the work between two steps: if it belongs to no step, the time of a step that is drawn
        already counts from here."""
        if self._ended_s is None:
            self._move_starts(time.time())

    def end(self, step: int, end_s: float) -> float:
        """Record the end of a step. Returns when the earliest other step in progress began; `end_s` if there is
        none."""
        self._first_s.pop(step, None)
        self._last.pop(step, None)
        if step > self._ended:
            self._ended = step
            self._move_starts(end_s)
        self._ended_s = end_s
        return min(self._first_s.values(), default=end_s)

    def _move_starts(self, at_s: float) -> None:
        for begun in self._last.values():
            begun.start_s = max(begun.start_s, at_s)
