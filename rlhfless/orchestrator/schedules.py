"""Schedules: the order in which the steps of a run generate and learn. A spec names its own schedule by import path.

Group selection is independent of order; see rlhfless.orchestrator.prompt_selection."""

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
"""The training data of a step: generated experience, or a batch of examples in a supervised run."""


class Steps(Protocol):
    """The actions that a schedule orders. Steps count from 1. Each has one rollout, then one training, in order.

    Steps may overlap: a rollout generates with the newest weights at its start, or newer ones.
    """

    async def rollout(self, step: int) -> Data:
        """Generate and score the samples of a step. If this call is cancelled, the rollout continues, and the next call
        for the step, before its training, returns the same rollout's result."""

    async def train(self, step: int, experience: Data) -> None:
        """Learn from a step's samples, publish the weights, then evaluate and checkpoint if due."""


class Schedule(Protocol):
    """Drives steps. After a fault, a new schedule is created, which starts at the first unfinished step."""

    async def drive(self, steps: Steps, first: int, last: int) -> None:
        """Run all steps from `first` to `last`. Errors of a step propagate to the caller, which recovers."""


class StepsAhead:
    """Starts rollouts up to `steps_ahead` steps ahead of the learner; with 0, rollout and training alternate.

    When the learner starts step k, version k - 1 is the newest. The rollout of step k started with version
    k - 1 - steps_ahead or newer, so no sample is older than that.
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
                # Engines with one version at a time finish this step's samples before those of later steps.
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
    """Return the schedule of a spec. Raises TargetError if a user's own schedule cannot be imported."""
    schedule: Schedule = make(settings, BUILT_IN)
    return schedule
