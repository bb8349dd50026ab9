"""Weights reach every actor through a single path; lost actors are replaced, and the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from fakes.fake_cluster import CALL, FakeCluster, NoRecords, Watcher, pool_of
from fakes.fake_run import until
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.functions.calls import Call, ReplicaInfo
from rlhfless.orchestrator.weight_sync import ActorWeights
from rlhfless.records import (
    KV_CAPACITY,
    Decision,
    FunctionName,
    Probe,
    PublishedWeights,
    ReplicaState,
    SleepTier,
    WeightVersion,
)
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.prices import started
from rlhfless.spec import RunSpec
from rlhfless.util.clock import VirtualClock
from rlhfless.weights.check import WeightCheckFailed

WEIGHTS = PublishedWeights(WeightVersion("run", 1, 2, "digest"), "here", 10, 2, Probe((1, 2), (-1.0,)))
SPEC = RunSpec.model_validate({"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]})


def weights_of(*names: str, fewest: int = 1) -> tuple[FakeCluster, ReplicaPool, ActorWeights, Watcher]:
    cluster, watcher = FakeCluster(), Watcher()
    pool = pool_of(cluster, *names, bounds=Bounds(fewest, "min_actors"))
    weights = ActorWeights(pool, SPEC)
    weights.served = WEIGHTS
    pool.watch(watcher)
    return cluster, pool, weights, watcher


async def test_the_phases_of_a_start_are_recorded_and_add_up(
    monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    rows: list[Decision] = []
    monkeypatch.setattr("fakes.fake_cluster.NoRecords.add_decision", lambda _, row: rows.append(row))
    _, pool, weights, _ = weights_of("a")
    info = ReplicaInfo("a-1", 1, "here", start_seconds={"import": 5.0, "weights_disk": 2.5}, kv_capacity_tokens=4096)
    await weights.load(pool["a"], WEIGHTS, CALL)
    assert rows == []  # an earlier driver has started this actor
    clock.now_s = 100.0
    new = Replica("b", FunctionName.GENERATION, pool["a"].allocation, NoRecords())
    clock.now_s = 109.0
    new.mark_up(pool["a"]._handle, info)  # type: ignore[arg-type]
    for _ in range(2):
        await weights.load(new, WEIGHTS, CALL)
    (row,) = rows
    assert (row.kind, row.choice, row.at_s) == ("start", "b", 100.0)
    phases = {"replica": 1.5, "import": 5.0, "weights_disk": 2.5}
    assert row.inputs == {f"{phase}_s": seconds for phase, seconds in phases.items()} | {KV_CAPACITY: 4096}
    assert started(rows) == [phases]


async def test_a_sync_that_wakes_actors_lets_each_generate_as_soon_as_it_has_loaded() -> None:
    cluster, pool, weights, watcher = weights_of("a", "b")

    @asynccontextmanager
    async def turn(call: Call) -> AsyncIterator[None]:
        await pool.wake_up(call)
        yield

    pool.turn = turn
    await pool.fall_asleep(CALL)
    cluster.loads["b"] = asyncio.get_running_loop().create_future()
    synced = asyncio.Event()
    syncing = asyncio.create_task(weights.sync(WEIGHTS, CALL, synced))
    await until(lambda: watcher.heard == [("joined", 0)])
    assert synced.is_set()
    assert not syncing.done()
    cluster.loads["b"].set_result(None)
    await syncing
    assert watcher.heard == [("joined", 0), ("joined", 1)]


async def test_actors_drop_their_weights_at_the_first_switch_already() -> None:
    """Before a version is served, too: weights kept in pinned host memory would stay there for the whole run."""
    cluster, pool, weights, _ = weights_of("a", "b")
    weights.served = None
    await pool.fall_asleep(CALL)
    assert cluster.tiers == [SleepTier.DROPPED] * 2


async def test_actors_that_wake_without_a_sync_load_the_current_version() -> None:
    _, pool, _, watcher = weights_of("a")
    await pool.fall_asleep(CALL)
    await pool.wake_up(CALL)
    assert pool["a"].state is ReplicaState.SERVING
    assert watcher.heard == [("joined", 0)]


async def test_a_sync_replaces_what_was_lost_beside_the_others() -> None:
    cluster, pool, weights, _ = weights_of("a", "b", fewest=2)
    pool["a"].give_up("it died")
    await weights.sync(WEIGHTS, CALL)  # b is serving: nothing waits for the new actor
    await until(lambda: cluster.begun == [0])
    await weights.sync(WEIGHTS, CALL)
    assert cluster.begun == [0]  # it is already starting
    await pool.close()


async def test_a_sync_goes_on_with_the_others_when_a_start_has_failed() -> None:
    cluster, pool, weights, watcher = weights_of("a")
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [1])
    cluster.gates[1].set_exception(FleetError("no slot"))
    await until(lambda: watcher.heard == [("missed", 1)])
    await weights.sync(WEIGHTS, CALL)  # another actor exists, so the step continues


async def test_a_sync_waits_for_the_first_that_comes_up_when_none_is_there() -> None:
    cluster, pool, weights, _ = weights_of(fewest=2)
    syncing = asyncio.create_task(weights.sync(WEIGHTS, CALL))
    await until(lambda: sorted(cluster.begun) == [0, 1])
    cluster.gates[0].set_exception(FleetError("no slot"))
    await asyncio.sleep(0)
    assert not syncing.done()
    cluster.gates[1].set_result(None)
    await syncing
    assert pool.state(1) is ReplicaState.SERVING


async def test_a_sync_says_why_no_actor_came_up() -> None:
    cluster, _, weights, _ = weights_of()
    syncing = asyncio.create_task(weights.sync(WEIGHTS, CALL))
    await until(lambda: cluster.begun == [0])
    cluster.gates[0].set_exception(FleetError("no slot"))
    with pytest.raises(FleetError, match="no slot"):
        await syncing


class Loading:
    """A sync of two actors whose loads have started and end when the test says so."""

    def __init__(self, fewest: int = 1) -> None:
        self.cluster, self.pool, self.weights, self.watcher = weights_of("a", "b", fewest=fewest)
        self.cluster.loads = {name: asyncio.get_running_loop().create_future() for name in ("a", "b")}
        self.syncing = asyncio.create_task(self.weights.sync(WEIGHTS, CALL))

    async def begun(self) -> Loading:
        await until(lambda: all(actor.state is ReplicaState.STALE for actor in self.pool.replicas()))
        await asyncio.sleep(0)
        return self

    def release(self, name: str) -> None:
        """End the actor's process on request while it loads."""
        self.pool[name].drain()
        self.pool[name].mark_ended()
        self.cluster.loads[name].set_exception(ReplicaLost(f"{name} died"))


async def test_work_hears_of_each_actor_as_soon_as_it_has_loaded_the_weights() -> None:
    scene = await Loading().begun()
    scene.cluster.loads["b"].set_result(None)
    await until(lambda: scene.watcher.heard == [("joined", 1)])
    assert not scene.syncing.done()
    scene.cluster.loads["a"].set_result(None)
    await scene.syncing
    assert scene.watcher.heard == [("joined", 1), ("joined", 0)]


async def test_no_actor_serves_older_weights_when_a_sync_has_asked() -> None:
    """The next sync waits for the previous one. Until its request is made, an actor may serve the previous sync's
    weights."""
    scene = await Loading().begun()
    newer = replace(WEIGHTS, version=replace(WEIGHTS.version, step=3))
    asked = asyncio.Event()
    following = asyncio.create_task(scene.weights.sync(newer, CALL, asked))
    scene.cluster.loads["a"].set_result(None)
    await until(lambda: scene.pool["a"].state is ReplicaState.SERVING)
    assert not asked.is_set()
    first, scene.cluster.loads = scene.cluster.loads["b"], {}
    first.set_result(None)
    await asked.wait()
    serving = {actor.served for actor in scene.pool.replicas() if actor.state is ReplicaState.SERVING}
    assert serving <= {newer.version.label}
    await asyncio.gather(scene.syncing, following)
    assert {actor.served for actor in scene.pool.replicas()} == {newer.version.label}


async def test_an_actor_that_is_lost_while_it_loads_is_replaced_and_the_others_go_on() -> None:
    scene = await Loading(fewest=2).begun()
    scene.pool["a"].give_up("a died")
    await until(lambda: scene.watcher.heard == [("missed", 0)])
    scene.cluster.loads["b"].set_result(None)
    await scene.syncing
    assert scene.watcher.heard == [("missed", 0), ("joined", 1)]
    await until(lambda: scene.cluster.begun == [0])
    await scene.pool.close()


async def test_a_sync_fails_if_no_actor_survives_it() -> None:
    """For example when the weights' file is damaged: replacement actors would fail, too."""
    scene = await Loading(fewest=2).begun()
    scene.pool["a"].give_up("a died")
    await until(lambda: scene.cluster.begun == [0])
    scene.pool["b"].give_up("b died")
    with pytest.raises(ReplicaLost, match="b died"):
        await scene.syncing
    assert scene.watcher.heard == [("missed", 0)]
    await scene.pool.close()


async def test_an_actor_that_is_released_while_it_loads_is_no_loss() -> None:
    scene = await Loading().begun()
    scene.release("a")
    scene.cluster.loads["b"].set_result(None)
    await scene.syncing
    assert scene.watcher.heard == [("joined", 1)]
    assert scene.cluster.begun == []


async def test_wrong_weights_of_a_new_actor_stop_the_run() -> None:
    cluster, pool, weights, watcher = weights_of("a")
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [1])
    version = WeightVersion("run", 1, 2, "d")
    cluster.gates[1].set_exception(WeightCheckFailed("moved", version, "a tied head stayed as it was"))
    await until(lambda: watcher.heard == [("missed", 1)])
    with pytest.raises(WeightCheckFailed, match="a tied head stayed"):
        await weights.sync(WEIGHTS, CALL)
