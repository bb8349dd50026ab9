"""The rules of schedules whose steps do not learn from all groups that they draw (rlhfless.spec.schedule: `partial` and
`tail_batching`), for the live loop and for the simulator. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rlhfless.spec import PartialSpec, ScheduleSpec, TailBatchingSpec

Selects = PartialSpec | TailBatchingSpec


@dataclass(frozen=True, slots=True)
class Draw:
    """What a step draws."""

    left: int
    """Of the groups that earlier steps have left, so many, the oldest."""
    new: int
    """Groups that it begins."""


def draw_of(schedule: Selects, learns: int, left: int, unbegun: int, prompts: float) -> Draw:
    """What a step draws that learns from `learns` groups.

    Earlier steps have left `left` groups, and this step and those after it are to begin `unbegun`: together, `learns`
    for each step that remains, so at the end of the run none is left. The data has `prompts` prompts (infinite: none
    comes again); one that is under way, or put off, is not begun once more.
    """
    if isinstance(schedule, PartialSpec):
        under_way = min(learns + math.ceil(schedule.ahead * learns), left + unbegun, prompts)
        return Draw(left, max(int(under_way) - left, 0))
    if left >= learns or min(unbegun, prompts - left) < learns:  # a long step
        return Draw(min(left, learns), max(learns - left, 0))
    return Draw(0, int(min(math.ceil(schedule.over_sampling * learns), unbegun, prompts - left)))


def is_due(schedule: Selects, begun: int, step: int) -> bool:
    """Whether a step waits for a group that the step `begun` has begun."""
    return isinstance(schedule, PartialSpec) and step - begun >= schedule.max_staleness


def selects(schedule: ScheduleSpec) -> Selects | None:
    """The schedule, if it is one whose steps leave groups to later ones."""
    return schedule if isinstance(schedule, Selects) else None


class GroupGate:
    """Lets the groups of a step pass, as they become complete, until it has as many as it learns from."""

    def __init__(self, learns: int, awaited: Collection[str] = ()) -> None:
        """`awaited`: names of groups that pass in any case."""
        self.left = learns
        """Groups that are still to pass."""
        self.passed: list[str] = []
        self._awaited = set(awaited)

    def passes(self, name: str) -> bool:
        """Whether a group that is complete now is learned from. The places of those that are waited for stay free."""
        if name not in self._awaited and self.left <= len(self._awaited):
            return False
        self._awaited.discard(name)
        self.left -= 1
        self.passed.append(name)
        return True
