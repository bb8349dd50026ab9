"""The order in which a run's functions start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless.orchestrator.start_run import start_functions
from rlhfless.scaling.placement import Allocation, Device


class Started:
    """A pool that records the begin and end of its start."""

    def __init__(self, name: str, said: list[str], *devices: Device) -> None:
        self.name, self.said = name, said
        self.allocations = tuple(Allocation.of([device]) for device in devices)

    async def ready(self, call: Any, slot: int = 0) -> None:
        del call, slot
        self.said.append(f"{self.name} begins")
        await asyncio.sleep(0)
        self.said.append(f"{self.name} is up")

    async def fill(self, count: int) -> None:
        await self.ready(count)


@pytest.mark.parametrize(
    ("kind", "apart", "engines_last"), [("h100", False, True), ("h100", True, False), ("cpu-core", False, False)]
)
async def test_engines_start_after_what_is_on_their_gpu(kind: str, apart: bool, engines_last: bool) -> None:
    said: list[str] = []
    gpus = [Device(f"gpu-{number}", kind, number) for number in range(2)]
    scoring = Started("scoring", said, Device("cpu-0", "cpu-core", 0))
    learner = Started("learner", said, gpus[1 if apart else 0])
    engines = Started("engines", said, gpus[0])
    run = SimpleNamespace(
        generation=engines,
        prefill=None,
        helpers=(scoring,),
        trainers=SimpleNamespace(pools=(learner,)),
        call=lambda step: step,
    )
    await start_functions(run, 1)  # type: ignore[arg-type]
    assert (said.index("engines begins") > said.index("learner is up")) == engines_last
