"""In which order the steps of a run draw and learn. One class per schedule; users bring their own by import path."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from rlhfless.records import Experience
from rlhfless.spec import ScheduleSpec, SyncSpec
from rlhfless.spec.extension import made


class Steps(Protocol):
    """What a schedule orders. Steps count from 1; each is drawn once and then trained on once, in their order.

    Steps may overlap: the weights that a step draws with are those published last when its rollout begins.
    """

    async def rollout(self, step: int) -> Experience:
        """Draw the samples of a step, and score them."""

    async def train(self, step: int, experience: Experience) -> None:
        """Learn from a step's samples, publish the weights, and do what the spec wants after the step."""


class Schedule(Protocol):
    """Drives steps. It is made anew after a fault, and then begins with the first step that is not done."""

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """All steps from `first` to `last`. What a step raises is left to the run, which mends it."""


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
    """Raises TargetError if a schedule of the user's own cannot be imported."""
    schedule: Schedule = made(settings, BUILT_IN)
    return schedule
