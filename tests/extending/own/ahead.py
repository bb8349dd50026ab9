"""A schedule of one's own: each step is drawn while the learner is still at work on the step before it."""

import asyncio
from typing import Annotated

from pydantic import Field

from rlhfless.spec import OwnSpec


class Ahead:
    class Settings(OwnSpec):
        steps_ahead: Annotated[int, Field(ge=0)] = 1
        """So many steps may be drawn before they are learned from; their weights are as much older."""

    def __init__(self, settings):
        self.settings = settings

    async def drive(self, steps, first, last):
        rollouts = {}
        try:
            for step in range(first, last + 1):
                for ahead in range(step, min(step + self.settings.steps_ahead, last) + 1):
                    if ahead not in rollouts:
                        rollouts[ahead] = asyncio.create_task(steps.rollout(ahead))
                await steps.train(step, await rollouts.pop(step))
        finally:
            for rollout in rollouts.values():
                rollout.cancel()
            await asyncio.gather(*rollouts.values(), return_exceptions=True)
