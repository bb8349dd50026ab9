"""The order in which the steps of a run draw and learn. One class per schedule; a user's own is named by import
path."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from rlhfless.records import Experience
from rlhfless.spec import ScheduleSpec, SyncSpec
from rlhfless.spec.extension import make


class Steps(Protocol):
    """The actions that a schedule orders. Steps count from 1; each is drawn once and then trained on once, in order.

    Steps may overlap: a step draws with the weights that were published last when its rollout begins.
    """

    async def rollout(self, step: int) -> Experience:
        """Draw the samples of a step, and score them."""

    async def train(self, step: int, experience: Experience) -> None:
        """Learn from a step's samples, publish the weights, and do what the spec wants after the step."""


class Schedule(Protocol):
    """Drives steps. After a fault a new schedule is made, which begins with the first step that is not done."""

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """All steps from `first` to `last`. Errors of a step go to the caller, which recovers."""


class Sync:
    """One step after the other."""

    def __init__(self, settings: SyncSpec) -> None:
        self.settings = settings

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """See Schedule."""
        for step in range(first, last + 1):
            await steps.train(step, await steps.rollout(step))


BUILT_IN: Mapping[str, str] = MappingProxyType({"sync": f"{__name__}:{Sync.__name__}"})


def schedule_of(settings: ScheduleSpec) -> Schedule:
    """The schedule of a spec. Raises TargetError if a user's own schedule cannot be imported."""
    schedule: Schedule = make(settings, BUILT_IN)
    return schedule
