"""The order in which the steps of a run draw and learn. One class per schedule; a user's own is named by import
path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.loop.overlap import OverlapTrial, TimedStep
from rlhfless.records import Experience
from rlhfless.spec import (
    AsyncSpec,
    AutoSpec,
    OneStepOffSpec,
    PartialSpec,
    ScheduleSpec,
    SyncSpec,
    TailBatchingSpec,
)
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

    def decided(self, step: int, choice: str, reason: str, measured: Mapping[str, float]) -> None:
        """Note what the schedule has decided after a step, and the measurements by which it did."""


class Schedule(Protocol):
    """Drives steps. After a fault a new schedule is made, which begins with the first step that is not done."""

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """All steps from `first` to `last`. Errors of a step go to the caller, which recovers."""


class Sync:
    """One step after the other; which groups a step draws and learns from is no matter of order, see
    rlhfless.loop.selection."""

    overlap = False
    """Whether the next step is drawn while this one is learned: its rollout begins when the one before it has ended,
    and the learner has published the step before that."""

    def __init__(self, settings: SyncSpec | PartialSpec | TailBatchingSpec | OneStepOffSpec | AutoSpec) -> None:
        self.settings = settings

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """See Schedule."""
        ended_s = time.monotonic()
        drawing = asyncio.create_task(steps.rollout(first))
        try:
            for step in range(first, last + 1):
                experience = await drawing
                drawn_s, overlap = time.monotonic(), self.overlap
                if overlap and step < last:
                    drawing = asyncio.create_task(steps.rollout(step + 1))
                await steps.train(step, experience)
                began_s, ended_s = ended_s, time.monotonic()
                self._observe(steps, step, TimedStep(drawn_s - began_s, ended_s - drawn_s, ended_s - began_s))
                if not overlap and step < last:
                    drawing = asyncio.create_task(steps.rollout(step + 1))
        finally:
            await _ended(drawing)

    def _observe(self, steps: Steps, step: int, times: TimedStep) -> None:
        """Called when a step has ended."""


class OneStepOff(Sync):
    """While a step is learned, the next one is drawn."""

    overlap = True


class Auto(Sync):
    """The faster of the two, by trial."""

    def __init__(self, settings: AutoSpec) -> None:
        super().__init__(settings)
        self._trial = OverlapTrial(settings)

    def _observe(self, steps: Steps, step: int, times: TimedStep) -> None:
        choice = self._trial.observe(times)
        self.overlap = self._trial.overlap
        if choice is not None:
            steps.decided(step, "one_step_off" if choice.overlap else "sync", choice.reason, choice.measured)


class Async:
    """The rollout of a step begins as soon as the learner has published enough that it cannot become older than
    `max_staleness` versions: rollouts of several steps are under way, and the oldest is learned from first."""

    def __init__(self, settings: AsyncSpec) -> None:
        self.settings = settings

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """See Schedule. When step k is to be learned, version k - 1 is the newest; its rollout began when version
        k - 1 - max_staleness was, or later."""
        drawing: dict[int, asyncio.Task[Data]] = {}
        try:
            for step in range(first, last + 1):
                for ahead in range(step, min(step + self.settings.max_staleness, last) + 1):
                    if ahead not in drawing:
                        drawing[ahead] = asyncio.create_task(steps.rollout(ahead))
                await steps.train(step, await drawing[step])
        finally:
            await _ended(*drawing.values())


async def _ended(*calls: asyncio.Task[Data]) -> None:
    """End the calls that still wait for a rollout."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "sync": f"{__name__}:{Sync.__name__}",
        "partial": f"{__name__}:{Sync.__name__}",
        "tail_batching": f"{__name__}:{Sync.__name__}",
        "one_step_off": f"{__name__}:{OneStepOff.__name__}",
        "async": f"{__name__}:{Async.__name__}",
        "auto": f"{__name__}:{Auto.__name__}",
    }
)


def schedule_of(settings: ScheduleSpec) -> Schedule:
    """The schedule of a spec. Raises TargetError if a user's own schedule cannot be imported."""
    schedule: Schedule = make(settings, BUILT_IN)
    return schedule
