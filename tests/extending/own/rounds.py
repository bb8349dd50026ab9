"""A schedule of one's own: the samples of several steps are drawn in one go, and then learned from step by step."""

import asyncio
from typing import Annotated

from pydantic import Field

from rlhfless.spec import OwnScheduleSpec


class Rounds:
    class Settings(OwnScheduleSpec):
        steps_per_round: Annotated[int, Field(ge=1)] = 2
        """Steps that generate with the same weights."""

        @property
        def max_staleness(self):
            return self.steps_per_round - 1

    def __init__(self, settings):
        self.settings = settings

    async def drive(self, steps, first, last):
        while first <= last:
            these = range(first, min(first + self.settings.steps_per_round, last + 1))
            experiences = await asyncio.gather(*map(steps.rollout, these))
            for step, experience in zip(these, experiences, strict=True):
                await steps.train(step, experience)
            first = these[-1] + 1
