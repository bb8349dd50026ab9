"""An elastic run from the command line: which size it takes as nodes come and go, and when it stops for another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhfless.orchestrator.elastic_host import ClusterHost
from rlhfless.orchestrator.host import DevicesWanted, StopCause
from rlhfless.records import ReplicaState
from rlhfless.telemetry.console import Console
from rlhfless.telemetry.sinks import FOR_DEVICES

STEPS = 100
WANTED = DevicesWanted("h100", 2, 8, 1, sizes=(2, 4, 8), present=8)


def of_steps(done: int, steps: int = STEPS) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(steps=steps)), done


@pytest.fixture
def host(tmp_path: Path) -> ClusterHost:
    return ClusterHost(Console("off", "a", STEPS), tmp_path, STEPS)


async def begun(host: ClusterHost, wanted: DevicesWanted, step_s: float = 30.0) -> int:
    """Start, and do two steps."""
    size = await host.devices(wanted)
    for step in (1, 2):
        with host.stage(f"step {step}"):
            pass
        host.emit(step, {"step_s": step_s})
    return size


async def test_a_run_follows_its_nodes_at_the_end_of_a_step(host: ClusterHost) -> None:
    assert await begun(host, WANTED) == 8
    assert host.after_step(*of_steps(2)).stop is None
    host.look([4])
    assert host.after_step(*of_steps(3)).stop is StopCause.RESIZE
    assert await begun(host, DevicesWanted("h100", 2, 8, 1, sizes=(2, 4, 8), present=4), 50.0) == 4
    assert host.after_step(*of_steps(5)).stop is None
    host.look([4, 4])
    assert host.after_step(*of_steps(6)).stop is StopCause.RESIZE, "they are back"
    host.look([1])
    assert host.after_step(*of_steps(7)).stop is StopCause.RESIZE
    assert await host.devices(DevicesWanted("h100", 2, 8, 1, sizes=(2, 4, 8), present=1)) == 2, "it waits at its min"


async def test_a_run_that_is_about_to_end_does_not_grow(host: ClusterHost) -> None:
    assert await begun(host, DevicesWanted("h100", 2, 8, 1, sizes=(2, 4, 8), present=4), 10.0) == 4
    host.sizes.stops()
    host.sizes._changes_s.append(60.0)
    host.look([4, 4])
    assert host.after_step(*of_steps(STEPS - 1)).stop is None
    assert host.after_step(*of_steps(10)).stop is StopCause.RESIZE


async def test_a_run_that_cannot_end_its_step_stops_at_once_and_goes_on(host: ClusterHost) -> None:
    resized: list[bool] = []

    async def work() -> None:
        await begun(host, WANTED)
        pool = SimpleNamespace(replicas=lambda: [SimpleNamespace(state=ReplicaState.STARTING)])
        host._run = cast("Any", SimpleNamespace(pools={"learner": pool}))
        while True:
            try:
                with host.stage(f"{FOR_DEVICES} (5 s)"):
                    await asyncio.sleep(60)
            except asyncio.CancelledError:
                resized.append(host.is_resized())
                if not resized[-1]:
                    raise
                host.sizes.starts(4)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    host.look([4, 4])
    assert not task.cancelling(), "nothing is lost"
    host.look([4])
    await asyncio.sleep(0)
    assert resized == [True]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert resized == [True, False], "a signal ends it"


async def test_a_run_of_one_size_has_what_it_asks_for(host: ClusterHost) -> None:
    assert await begun(host, DevicesWanted("h100", 2, 8, 2)) == 8
    assert host.after_step(*of_steps(2)).stop is None
