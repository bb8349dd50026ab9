"""The order in which the steps of a run generate and learn. A user's own schedule is named by import path.

Which groups a step generates and learns from is not decided here: see rlhfless.orchestrator.prompt_selection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.records import Experience
from rlhfless.spec import AsyncSpec, OneStepOffSpec, PartialSpec, ScheduleSpec, SyncSpec
from rlhfless.spec.extension import make

Data = Experience | PackedBatch
"""What a step learns from: what was drawn, or in a run that draws nothing, the batch of its examples."""


class Steps(Protocol):
    """The actions that a schedule orders. Steps count from 1; each is drawn once and then trained on once, in order.

    Steps may overlap: a step draws with the weights that were published last when its rollout begins.
    """

    async def rollout(self, step: int) -> Data:
        """Draw the samples of a step, and score them. A rollout that is under way, or done and not trained on, goes on
        when this call is cancelled; another call for the step gets its result."""

    async def train(self, step: int, experience: Data) -> None:
        """Learn from a step's samples, publish the weights, and do what the spec wants after the step."""


class Schedule(Protocol):
    """Drives steps. After a fault a new schedule is made, which begins with the first step that is not done."""

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """All steps from `first` to `last`. Errors of a step go to the caller, which recovers."""


class StepsAhead:
    """Start rollouts up to `steps_ahead` steps ahead of the learner, which takes steps in order; with 0, one by one.

    When step k is to be learned, version k - 1 is the newest, and the rollout of step k started with version
    k - 1 - steps_ahead or a newer one: no sample is older than that.
    """

    def __init__(self, settings: SyncSpec | PartialSpec | OneStepOffSpec | AsyncSpec) -> None:
        self._ahead, self._in_flight = settings.steps_ahead, settings.in_flight

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """See Schedule."""
        rollouts: dict[int, asyncio.Task[Data]] = {}

        def start(oldest: int, newest: int) -> None:
            for step in range(oldest + len(rollouts), min(newest, last) + 1):
                rollouts[step] = asyncio.create_task(steps.rollout(step))

        try:
            for step in range(first, last + 1):
                # Engines that have one version at a time finish this step's samples before they take on others.
                start(step, step + self._ahead if self._in_flight else step)
                experience = await rollouts[step]
                start(step, step + self._ahead)
                del rollouts[step]
                await steps.train(step, experience)
        finally:
            for waiting in rollouts.values():
                waiting.cancel()
            await asyncio.gather(*rollouts.values(), return_exceptions=True)


BUILT_IN: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("sync", "partial", "one_step_off", "async"), f"{__name__}:{StepsAhead.__name__}")
)


def schedule_of(settings: ScheduleSpec) -> Schedule:
    """The schedule of a spec. Raises TargetError if a user's own schedule cannot be imported."""
    schedule: Schedule = make(settings, BUILT_IN)
    return schedule
