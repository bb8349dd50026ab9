"""The learner's part in loads: joint feeds where loads start together, and never an endless wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.fake_cluster import CALL, FakeCluster, pool_of
from fakes.fake_run import until
from rlhfless.fleet.replica import CallTimeout, ReplicaLost
from rlhfless.orchestrator.weight_sync import ActorWeights, Feeding, LearnerLost
from rlhfless.records import Probe, PublishedWeights, ReplicaState, WeightVersion
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.spec import RunSpec

GPUS = [Device(f"h100-{number}", "h100", number) for number in range(4)]
SPEC = RunSpec.model_validate({"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]})


def weights_of(step: int) -> PublishedWeights:
    return PublishedWeights(WeightVersion("run", 1, step, "digest"), "here", 10, 2, Probe((1, 2), (-1.0,)))


class Learner:
    """A learner with a rank on each GPU, which is also its own pool."""

    def __init__(self) -> None:
        self.allocations = (Allocation.of(GPUS),)
        self.asked: list[tuple[Any, ...]] = []
        self.offered = 2
        """The step whose weights it has."""
        self.fault: Exception | None = None
        self.gone = False
        self.late: list[int] = []
        """The workers on each device that are too late for the next feed."""
        self.fed = lambda: None
        """Called with each feed."""

    def replicas(self) -> tuple[Learner, ...]:
        return () if self.gone else (self,)

    async def call(self, method: str, _: Any, version: WeightVersion, *given: Any, **__: Any) -> Any:
        if self.fault is not None:
            raise self.fault
        if method == "offers":
            return version.step == self.offered
        self.asked.append((version.step, *given))
        late, self.late = self.late or [0] * len(GPUS), []
        self.fed()
        await asyncio.sleep(0.01)
        return () if version.step < self.offered else tuple(map(int.__sub__, given[0], late))


class FedLoads(dict[str, "asyncio.Future[None]"]):
    """Loads that end with the next feed."""

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, name: str) -> asyncio.Future[None]:
        self[name] = asyncio.get_running_loop().create_future()
        return self[name]

    def end(self) -> None:
        for load in self.values():
            load.set_result(None)
        self.clear()


class Scene:
    """Actors with two GPUs each."""

    def __init__(self, *names: str) -> None:
        self.learner, self.cluster, loads = Learner(), FakeCluster(), FedLoads()
        self.cluster.loads, self.learner.fed = loads, loads.end
        given = [Allocation.of(GPUS[:2]), Allocation.of(GPUS[2:])]
        self.pool = pool_of(self.cluster, *names, bounds=Bounds(1, "min_actors"), given=given)
        feeding = Feeding(self.learner, 1.0)  # type: ignore[arg-type]
        self.weights = ActorWeights(self.pool, SPEC, feeding=feeding)


async def test_actors_that_load_together_share_a_feed_on_each_of_their_gpus() -> None:
    scene = Scene("a", "b")
    await scene.weights.sync(weights_of(2), CALL)
    assert scene.learner.asked == [(2, [1, 1, 1, 1])]
    await scene.weights.sync(weights_of(2), CALL)
    assert len(scene.learner.asked) == 1, "they serve it already"
    await scene.weights.sync(weights_of(3), CALL)
    assert [step for step, _ in scene.learner.asked] == [2, 3]


async def test_a_new_actor_waits_while_the_learner_learns_and_loads_what_comes_next() -> None:
    scene = Scene("a")
    await scene.weights.sync(weights_of(2), CALL)
    scene.learner.offered = 3  # the learner is learning or has learned
    scene.pool.start(1, CALL)
    await until(lambda: scene.cluster.begun == [1])
    scene.cluster.gates[1].set_result(None)
    await asyncio.sleep(0.1)
    assert scene.pool.state(1) is not ReplicaState.SERVING
    await scene.weights.sync(weights_of(3), CALL)
    await until(lambda: scene.pool.state(1) is ReplicaState.SERVING)
    (new,) = (replica for replica in scene.pool.replicas() if scene.pool.slot_of(replica) == 1)
    assert new.served == weights_of(3).version.label
    assert scene.learner.asked == [(2, [1, 1, 0, 0]), (3, [1, 1, 0, 0]), (3, [0, 0, 1, 1])]


async def test_an_actor_that_is_lost_in_a_feed_ends_no_other_load() -> None:
    scene = Scene("a", "b")
    scene.cluster.loads = {"a": asyncio.get_running_loop().create_future()}
    syncing = asyncio.create_task(scene.weights.sync(weights_of(2), CALL))
    await until(lambda: scene.pool.state(1) is ReplicaState.SERVING)
    scene.pool["a"].give_up("it died")
    scene.cluster.loads["a"].set_exception(ReplicaLost("a died"))
    await syncing
    assert scene.pool.state(1) is ReplicaState.SERVING
    await scene.pool.close()


async def test_workers_that_come_too_late_are_fed_again_and_those_of_a_lost_actor_are_not(caplog: Any) -> None:
    scene = Scene("a", "b")
    futures = {name: asyncio.get_running_loop().create_future() for name in ("a", "b")}
    scene.cluster.loads, scene.learner.late = dict(futures), [0, 1, 1, 1]

    def fed() -> None:
        if len(scene.learner.asked) == 1:
            scene.pool["b"].give_up("it died")
        else:
            futures["a"].set_result(None)

    scene.learner.fed = fed
    await scene.weights.sync(weights_of(2), CALL)
    assert scene.learner.asked == [(2, [1, 1, 1, 1]), (2, [0, 1, 0, 0])]
    assert "did not take the weights in time; fed again" in caplog.text
    assert scene.pool.state(0) is ReplicaState.SERVING
    await scene.pool.close()


async def test_a_learner_that_has_begun_another_step_ends_the_load_at_once() -> None:
    scene = Scene("a")
    scene.cluster.loads = {"a": asyncio.get_running_loop().create_future()}
    with pytest.raises(LearnerLost, match=r"run/1/1/.*: the learner has started another step"):
        await scene.weights.sync(weights_of(1), CALL)


@pytest.mark.parametrize("fault", [ReplicaLost("killed"), CallTimeout("silent"), None])
async def test_a_lost_learner_ends_the_sync_although_its_actors_live(fault: Exception | None) -> None:
    scene = Scene("a")
    scene.learner.fault, scene.learner.gone = fault, fault is None
    scene.cluster.loads = {"a": asyncio.get_running_loop().create_future()}  # its bucket never arrives
    with pytest.raises(LearnerLost, match=r"killed|silent|no learner"):
        await scene.weights.sync(weights_of(2), CALL)
    assert scene.pool.state(0) is ReplicaState.STALE


async def test_without_it_actors_load_by_themselves() -> None:
    cluster = FakeCluster()
    pool = pool_of(cluster, "a", bounds=Bounds(1, "min_actors"))
    await ActorWeights(pool, SPEC).sync(weights_of(2), CALL)
    assert pool.state(0) is ReplicaState.SERVING
