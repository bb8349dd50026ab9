"""What a generation stage is asked, and a reader of its groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fakes.fleet import prompt
from rlhfless.functions.base import Call
from rlhfless.orchestrator.generation import GenerationStage
from rlhfless.orchestrator.in_flight_samples import RolloutRequest, sampling_of
from rlhfless.records import Group, Work
from rlhfless.spec import RunSpec

SPEC = RunSpec.model_validate({"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]})


def draw(names: Sequence[str], samples: int = 2) -> RolloutRequest:
    return RolloutRequest(
        Call("run", 1, 3),
        tuple(prompt(name) for name in names),
        samples,
        sampling_of(SPEC),
        Work.GENERATE,
        seed=11,
        seed_step=3,
    )


async def until(condition: Callable[[], bool]) -> None:
    """Let the stage work until `condition` holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


class Reader:
    """Reads a stage's groups in the background."""

    def __init__(self, stage: GenerationStage) -> None:
        self.groups: list[Group] = []
        self.task = asyncio.create_task(self._read(stage))

    async def _read(self, stage: GenerationStage) -> None:
        async for group in stage.groups():
            self.groups.append(group)

    @property
    def names(self) -> list[str]:
        return [group.prompt.prompt_id for group in self.groups]
