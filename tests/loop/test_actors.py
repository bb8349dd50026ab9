"""Actors join and leave in the background, within their bounds, and stages hear of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_fleet import FakeActor, FakePool
from test_generation_stage import until

from rlhfless.fleet.cluster import FleetError
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.loop.actors import Actors
from rlhfless.records import Probe, PublishedWeights, ReplicaState, WeightVersion
from rlhfless.spec import RunSpec
from rlhfless.weights.errors import WeightCheckFailed

CALL = Call("run", 1, 3)
WEIGHTS = PublishedWeights(WeightVersion("run", 1, 2, "digest"), "here", 10, 2, Probe((1, 2), (-1.0,)))


class CrewPool(FakePool):
    """A pool whose actors come up when the test lets them."""

    def __init__(self, *names: str, seats: int = 3) -> None:
        super().__init__(*names, seats=seats)
        self.begun: list[int | None] = []
        self.gates: dict[int | None, asyncio.Future[None]] = {}
        self.stopped: list[str] = []
        self.loads: dict[str, asyncio.Future[None]] = {}
        """Of actors whose loads end when the test lets them."""

    async def add(self, prepare: Callable[[Any], Awaitable[object]], seat: int | None = None) -> FakeActor:
        self.begun.append(seat)
        self.gates[seat] = asyncio.get_running_loop().create_future()
        await self.gates[seat]
        actor = self.join(f"n{len(self.begun)}", seat)
        actor.state = ReplicaState.STALE
        return actor

    async def sync_one(self, actor: FakeActor, published: Any, call: Call) -> None:
        if actor.name in self.loads:
            await self.loads[actor.name]
        actor.state = ReplicaState.SERVING

    def up(self) -> list[FakeActor]:
        alive = (ReplicaState.STALE, ReplicaState.SERVING)
        return [actor for actor in self.actors.values() if actor.state in alive]

    async def stop(self, actor: FakeActor) -> None:
        actor.state = ReplicaState.RETIRED
        self.stopped.append(actor.name)


class Watcher:
    """A stage that hears of all and has nothing to hand back."""

    over = False

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def joined(self, place: int) -> None:
        self.heard.append(("joined", place))

    def missed(self, place: int) -> None:
        self.heard.append(("missed", place))

    async def drain(self, actor: FakeActor) -> None:
        self.heard.append(("drain", actor.name))


def actors_of(pool: CrewPool, fewest: int = 1) -> tuple[Actors, Watcher]:
    spec = RunSpec.model_validate(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p"},
            "rewards": [{"type": "exact_match"}],
            "scaling": {"generation": {"min_actors": fewest, "max_actors": len(pool.seats)}},
        }
    )
    actors, watcher = Actors(pool, spec), Watcher()
    actors.published = actors.perturbed = WEIGHTS
    actors.watch(watcher)
    return actors, watcher


async def test_a_start_goes_on_in_the_background_and_its_end_is_heard_of() -> None:
    pool = CrewPool("a")
    actors, watcher = actors_of(pool)
    actors.start(2, CALL)
    actors.start(2, CALL)  # asked for twice, begun once
    assert actors.state(2) is ReplicaState.STARTING
    assert actors.state(1) is None
    await until(lambda: pool.begun == [2])
    pool.gates[2].set_result(None)
    await until(lambda: watcher.heard == [("joined", 2)])
    assert actors.state(2) is ReplicaState.SERVING


async def test_a_start_that_fails_leaves_the_place_empty(caplog: pytest.LogCaptureFixture) -> None:
    pool = CrewPool("a")
    actors, watcher = actors_of(pool)
    actors.start(1, CALL)
    await until(lambda: pool.begun == [1])
    pool.gates[1].set_exception(FleetError("no room"))
    await until(lambda: watcher.heard == [("missed", 1)])
    assert actors.state(1) is None
    assert "no generation actor came up at place 1, which stays empty for now: no room" in caplog.text
    await actors.sync(CALL)  # there is another, so the step goes on


async def test_a_start_waits_for_its_time_unless_it_is_asked_for_earlier() -> None:
    pool = CrewPool("a")
    actors, _ = actors_of(pool)
    actors.start(1, CALL, at_s=time.time() + 3600)
    actors.start(2, CALL, at_s=time.time() + 0.02)
    assert not actors.expects(2)
    await until(lambda: pool.begun == [2])
    actors.start(1, CALL)
    await until(lambda: pool.begun == [2, 1])
    await actors.close()
    assert actors.state(1) is None  # a start that is under way at the end is called off


async def test_the_fewest_are_kept_and_one_that_leaves_hands_back_first() -> None:
    pool = CrewPool("a", "b", "c")
    actors, watcher = actors_of(pool, fewest=2)
    assert actors.release(1)
    assert pool["b"].state is ReplicaState.DRAINING  # at once: it gets no work any more
    assert actors.state(1) is None
    assert not actors.release(0)
    await until(lambda: pool.stopped == ["b"])
    assert watcher.heard == [("drain", "b")]


async def test_a_start_that_is_released_is_called_off() -> None:
    pool = CrewPool("a")
    actors, watcher = actors_of(pool)
    actors.start(1, CALL)
    await until(lambda: pool.begun == [1])
    assert actors.release(1)
    await until(lambda: watcher.heard == [("missed", 1)])
    assert pool.gates[1].cancelled()


async def test_a_start_follows_the_release_of_its_place() -> None:
    pool = CrewPool("a", "b")
    actors, _ = actors_of(pool)
    actors.release(1)
    actors.start(1, CALL)
    assert actors.state(1) is ReplicaState.STARTING
    assert pool.begun == []
    await until(lambda: pool.begun == [1])
    assert pool.stopped == ["b"]
    await actors.close()


async def test_a_start_that_waits_for_its_place_can_be_called_off() -> None:
    pool = CrewPool("a", "b", "c")
    actors, _ = actors_of(pool)
    actors.release(1)
    actors.start(1, CALL)
    actors.release(1)
    await until(lambda: pool.stopped == ["b"])
    await asyncio.sleep(0)
    assert pool.begun == []
    assert actors.state(1) is None


async def test_a_sync_replaces_what_was_lost_beside_the_others() -> None:
    pool = CrewPool("a", "b")
    actors, _ = actors_of(pool, fewest=2)
    pool["a"].state = ReplicaState.DEAD
    await actors.sync(CALL)  # b is there: nobody waits for the new one
    await until(lambda: pool.begun == [0])
    await actors.sync(CALL)
    assert pool.begun == [0]  # it is on its way already
    await actors.close()


async def test_a_sync_waits_for_the_first_that_comes_up_when_none_is_there() -> None:
    pool = CrewPool()
    actors, _ = actors_of(pool, fewest=2)
    syncing = asyncio.create_task(actors.sync(CALL))
    await until(lambda: sorted(pool.begun) == [0, 1])
    pool.gates[0].set_exception(FleetError("no room"))
    await asyncio.sleep(0)
    assert not syncing.done()
    pool.gates[1].set_result(None)
    await syncing
    assert actors.state(1) is ReplicaState.SERVING


async def test_a_sync_says_why_nobody_came_up() -> None:
    pool = CrewPool()
    actors, _ = actors_of(pool)
    syncing = asyncio.create_task(actors.sync(CALL))
    await until(lambda: pool.begun == [0])
    pool.gates[0].set_exception(FleetError("no room"))
    with pytest.raises(FleetError, match="no room"):
        await syncing


async def loading(pool: CrewPool, fewest: int = 1) -> tuple[Actors, Watcher, asyncio.Task[None]]:
    """A sync whose loads have begun."""
    actors, watcher = actors_of(pool, fewest)
    pool.loads = {name: asyncio.get_running_loop().create_future() for name in pool.actors}
    syncing = asyncio.create_task(actors.sync(CALL))
    await until(lambda: all(actor.state is ReplicaState.STALE for actor in pool.actors.values()))
    await asyncio.sleep(0)
    return actors, watcher, syncing


def lose(pool: CrewPool, name: str, state: ReplicaState) -> None:
    pool[name].state = state
    pool.loads[name].set_exception(ReplicaLost(f"{name} died"))


async def test_a_stage_hears_of_each_actor_as_soon_as_it_has_loaded_the_weights() -> None:
    pool = CrewPool("a", "b")
    _, watcher, syncing = await loading(pool)
    pool.loads["b"].set_result(None)
    await until(lambda: watcher.heard == [("joined", 1)])
    assert not syncing.done()
    pool.loads["a"].set_result(None)
    await syncing
    assert watcher.heard == [("joined", 1), ("joined", 0)]


async def test_who_is_lost_while_it_loads_is_replaced_and_the_others_go_on() -> None:
    pool = CrewPool("a", "b")
    actors, watcher, syncing = await loading(pool, fewest=2)
    lose(pool, "a", ReplicaState.DEAD)
    pool.loads["b"].set_result(None)
    await syncing
    assert watcher.heard == [("missed", 0), ("joined", 1)]
    await until(lambda: pool.begun == [0])
    await actors.close()


async def test_a_sync_fails_if_no_actor_survives_it() -> None:
    """As when the weights' file is damaged: those that start in their stead would die of it, too."""
    pool = CrewPool("a", "b")
    actors, watcher, syncing = await loading(pool, fewest=2)
    lose(pool, "a", ReplicaState.DEAD)
    await until(lambda: pool.begun == [0])
    lose(pool, "b", ReplicaState.DEAD)
    with pytest.raises(ReplicaLost, match="b died"):
        await syncing
    assert watcher.heard == [("missed", 0)]
    await actors.close()


async def test_who_is_released_while_it_loads_is_no_loss() -> None:
    pool = CrewPool("a", "b")
    _, watcher, syncing = await loading(pool)
    lose(pool, "a", ReplicaState.RETIRED)
    pool.loads["b"].set_result(None)
    await syncing
    assert watcher.heard == [("joined", 1)]
    assert pool.begun == []


async def test_wrong_weights_of_a_new_actor_stop_the_run() -> None:
    pool = CrewPool("a")
    actors, watcher = actors_of(pool)
    actors.start(1, CALL)
    await until(lambda: pool.begun == [1])
    version = WeightVersion("run", 1, 2, "d")
    pool.gates[1].set_exception(WeightCheckFailed("moved", version, "a tied head stayed as it was"))
    await until(lambda: watcher.heard == [("missed", 1)])
    with pytest.raises(WeightCheckFailed, match="a tied head stayed"):
        await actors.sync(CALL)
