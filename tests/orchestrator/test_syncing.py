"""Weights reach an actor by the first sync that requests them; concurrent syncs share its load."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from rlhfless.fleet.replica import Replica
from rlhfless.functions.calls import Call
from rlhfless.functions.generation.messages import Loaded
from rlhfless.orchestrator.weight_sync import ActorWeights
from rlhfless.records import FunctionName, Probe, PublishedWeights, ReplicaState, WeightVersion
from rlhfless.scaling.lifecycle import Lifecycle, ReplicaIdentity
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.spec import SyncSpec
from rlhfless.spec.fleet import TimeoutsSpec

VERSION = WeightVersion("run", 1, 3, "digest")
PUBLISHED = PublishedWeights(VERSION, "here", 10, 2, Probe((1, 2), (-1.0,)))
CALL = Call("run", 1, 4)


class Actor:
    """A replica with a real life cycle, whose loads end when the test says so."""

    def __init__(self) -> None:
        identity = ReplicaIdentity(FunctionName.GENERATION, "a", "a-1", Allocation.of([Device("cpu-0", "cpu-core", 0)]))
        self.life = Lifecycle(identity, 0.0, ReplicaState.STALE)
        self.loads: list[asyncio.Future[None]] = []

    @property
    def state(self) -> ReplicaState:
        return self.life.state

    def ask(self, version: WeightVersion) -> None:
        self.life.ask(version, 1.0)

    def mark_loaded(self, version: WeightVersion) -> None:
        self.life.loaded(version, 2.0)

    def record_transport(self, *_: Any) -> None: ...

    def record_start(self, *_: Any) -> bool:
        return False

    async def call(self, method: str, *_: Any, **__: Any) -> Loaded:
        assert method == "load"
        self.loads.append(asyncio.get_running_loop().create_future())
        await self.loads[-1]
        return Loaded("", None, 2)


def weights() -> ActorWeights:
    empty = ActorWeights.__new__(ActorWeights)
    empty._spec = SimpleNamespace(timeouts=TimeoutsSpec(), schedule=SyncSpec())  # type: ignore[assignment]
    empty._feeding = None
    return empty


async def two_loads(actor: Actor) -> list[asyncio.Task[None]]:
    replica = cast("Replica", actor)
    tasks = [asyncio.create_task(weights().load(replica, PUBLISHED, CALL)) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(actor.loads) == 2, [task for task in tasks if task.done() and task.exception()]
    return tasks


async def test_two_syncs_of_an_actor_at_once_are_one() -> None:
    """For example when a starting actor gets its weights while a step begins."""
    actor = Actor()
    tasks = await two_loads(actor)
    for load in actor.loads:
        load.set_result(None)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert actor.state is ReplicaState.SERVING


async def test_an_actor_that_was_drained_during_its_load_does_not_serve() -> None:
    actor = Actor()
    tasks = await two_loads(actor)
    actor.life.drain(1.5)
    for load in actor.loads:
        load.set_result(None)
    await asyncio.gather(*tasks)
    assert actor.state is ReplicaState.DRAINING
