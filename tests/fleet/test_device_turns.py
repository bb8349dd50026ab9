"""Turns on devices, with functions that record when they wake and sleep."""

from __future__ import annotations

import asyncio

import pytest

from fakes.fake_cluster import CALL, FakeCluster, pool_of
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.turns import Turns, take_turns
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.weight_sync import ActorWeights
from rlhfless.records import FunctionName, Probe, PublishedWeights, ReplicaState, SleepTier, WeightVersion
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.spec import RunSpec, TimeoutsSpec

SMALL = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
WEIGHTS, NEXT = (
    PublishedWeights(WeightVersion("run", 1, step, "ab"), "here", 1, 1, Probe((1, 2), (0.0,))) for step in (3, 4)
)


class Function:
    """Records its events in a common log. Waking takes a few turns of the event loop."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.awake, self.fault = name, log, False, None

    async def fall_asleep(self, call: Call) -> None:
        if self.awake:
            self.log.append(f"{self.name} sleeps")
        self.awake = False

    async def wake_up(self, call: Call) -> None:
        await asyncio.sleep(0.001)
        if self.fault is not None:
            raise self.fault
        self.log.append(f"{self.name} wakes")
        self.awake = True


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def functions(log: list[str]) -> list[Function]:
    return [Function(name, log) for name in ("actors", "learner", "reference")]


async def work(turns: Turns, function: Function, others: list[Function], seconds: float = 0.002) -> None:
    async with turns.of(function, CALL):
        assert function.awake
        assert not any(other.awake for other in others if other is not function)
        await asyncio.sleep(seconds)
        assert function.awake


async def test_one_function_is_awake_at_a_time(functions: list[Function], log: list[str]) -> None:
    turns = Turns(functions)
    async with asyncio.timeout(60):
        await asyncio.gather(*(work(turns, functions[i % 3], functions) for i in range(30)))
    assert sum("wakes" in line for line in log) < 30  # calls of one function share a turn


async def test_a_turn_lasts_until_another_function_wants_one(functions: list[Function], log: list[str]) -> None:
    turns = Turns(functions)
    for _ in range(3):
        await work(turns, functions[0], functions)
    assert log == ["actors wakes"]
    await work(turns, functions[1], functions)
    assert log == ["actors wakes", "actors sleeps", "learner wakes"]


async def test_a_turn_inside_a_turn_does_not_wait_for_functions_that_want_one(functions: list[Function]) -> None:
    turns = Turns(functions)
    async with asyncio.timeout(60), turns.of(functions[0], CALL):
        waiting = asyncio.create_task(work(turns, functions[1], functions))
        await asyncio.sleep(0.002)
        await work(turns, functions[0], functions)
        assert not waiting.done()
    await waiting


async def test_after_a_switch_that_failed_the_next_one_puts_all_others_to_sleep(functions: list[Function]) -> None:
    turns = Turns(functions)
    await work(turns, functions[0], functions)
    functions[1].fault = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        await work(turns, functions[1], functions)
    functions[1].awake = True  # it may be partly awake
    await work(turns, functions[0], functions)


async def test_a_caller_that_is_cancelled_holds_nothing_up(functions: list[Function]) -> None:
    turns = Turns(functions)
    tasks = [asyncio.create_task(work(turns, function, functions, 30)) for function in functions]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(60):
        await work(turns, functions[2], functions)


def holder(cluster: FakeCluster, function: FunctionName, core: int) -> ReplicaPool:
    return pool_of(
        cluster, f"{function}-0", function=function, given=[Allocation.of([Device("cpu-0", CPU_KIND, core)])]
    )


async def test_pools_on_one_device_take_turns_and_a_pool_beside_them_does_not() -> None:
    cluster = FakeCluster()
    learner, reference = (holder(cluster, name, 0) for name in (FunctionName.LEARNER, FunctionName.REFERENCE))
    elsewhere = pool_of(cluster, "elsewhere", given=[Allocation.of([Device("cpu-9", CPU_KIND, 9)])])
    scoring = holder(cluster, FunctionName.SCORING, 0)  # holds nothing on the device
    take_turns([learner, reference, elsewhere, scoring])

    def states() -> list[ReplicaState]:
        return [pool.replicas()[0].state for pool in (learner, reference, elsewhere, scoring)]

    async with learner.turn(CALL):
        assert states() == ["serving", "sleeping", "serving", "serving"]
        assert reference.state(0) is ReplicaState.STALE  # to a policy: it will serve
        assert reference.expected == 1
        assert reference.settled() == reference.replicas()
        assert reference.up() == ()
    async with elsewhere.turn(CALL), scoring.turn(CALL):
        assert states() == ["serving", "sleeping", "serving", "serving"]
    assert (await reference.ready(CALL)).state is ReplicaState.SERVING
    assert states() == ["sleeping", "serving", "serving", "serving"]
    await learner.stop(*learner.replicas())  # a clean stop of a sleeping replica
    assert cluster.stopped == ["learner-0"]


async def test_a_turn_waits_for_a_replica_that_leaves_and_deletes_one_that_is_lost() -> None:
    """Both may still have memory on the device."""
    cluster = FakeCluster(gated=False)
    learner, reference = (holder(cluster, name, 0) for name in (FunctionName.LEARNER, FunctionName.REFERENCE))
    take_turns([learner, reference])
    async with reference.turn(CALL):
        leaving = asyncio.get_running_loop().create_future()
        reference._leaving[0] = asyncio.create_task(asyncio.wait_for(leaving, 60))
    taking = asyncio.create_task(learner.ready(CALL))
    await asyncio.sleep(0.01)
    assert not taking.done()
    reference.replicas()[0].give_up("it does not answer")
    leaving.set_result(None)
    assert (await taking).state is ReplicaState.SERVING
    assert cluster.stopped == ["reference-0"]


@pytest.mark.parametrize("method", ["sleep", "wake"])
async def test_a_replica_whose_turn_is_cancelled_midway_is_awake_or_asleep(method: str) -> None:
    """It would stay in a state in which it neither gets calls nor leaves."""
    cluster = FakeCluster()
    learner, reference = (holder(cluster, name, 0) for name in (FunctionName.LEARNER, FunctionName.REFERENCE))
    take_turns([learner, reference])
    async with learner.turn(CALL):
        pass  # the reference is asleep
    name = f"{'learner' if method == 'sleep' else 'reference'}-0"
    held = cluster.held[name, method] = asyncio.get_running_loop().create_future()
    taking = asyncio.create_task(reference.ready(CALL))
    await asyncio.sleep(0.01)
    taking.cancel()
    await asyncio.sleep(0.01)
    held.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await taking
    async with asyncio.timeout(60):
        for pool, other in ((reference, learner), (learner, reference)) * 2:
            async with pool.turn(CALL):
                assert (await pool.ready(CALL)).state is ReplicaState.SERVING
                assert other.replicas()[0].state is ReplicaState.SLEEPING
    assert not cluster.stopped


async def test_a_replica_that_does_not_say_whether_it_is_awake_is_deleted_before_the_next_turn() -> None:
    cluster = FakeCluster(gated=False)
    learner, reference = (holder(cluster, name, 0) for name in (FunctionName.LEARNER, FunctionName.REFERENCE))
    reference._timeouts = TimeoutsSpec(sync_s=0.05)
    take_turns([learner, reference])
    async with learner.turn(CALL):
        pass
    cluster.held["reference-0", "wake"] = asyncio.get_running_loop().create_future()
    async with reference.turn(CALL):
        assert not reference.replicas()
    async with learner.turn(CALL):
        assert cluster.stopped == ["reference-0"]


@pytest.mark.parametrize("function", [FunctionName.REFERENCE, FunctionName.GENERATION])
async def test_a_replica_that_is_given_up_while_it_wakes_is_only_lost(function: FunctionName) -> None:
    """Its answer and the loss come at once, or the loss comes before its wake-up starts."""
    for answered in (True, False):
        cluster = FakeCluster()
        pool = pool_of(cluster, "a", slots=1, function=function)
        if function is FunctionName.GENERATION:
            ActorWeights(pool, RunSpec.model_validate(SMALL)).served = WEIGHTS
        await pool.fall_asleep(CALL)
        answer = cluster.held["a", "wake"] = asyncio.get_running_loop().create_future()
        waking = asyncio.create_task(pool.wake_up(CALL))
        for _ in range(5 if answered else 1):
            await asyncio.sleep(0)
        answer.set_result(None)
        pool["a"].give_up("no sign of life")
        await asyncio.wait_for(waking, 5)
        assert not pool.replicas()


async def test_actors_wake_with_the_version_of_the_step() -> None:
    cluster = FakeCluster()
    actors, learner = (holder(cluster, name, 0) for name in (FunctionName.GENERATION, FunctionName.LEARNER))
    weights = ActorWeights(actors, RunSpec.model_validate(SMALL))
    take_turns([actors, learner])
    await weights.sync(WEIGHTS, CALL)
    assert actors.tier() is SleepTier.DROPPED
    async with learner.turn(CALL):
        assert actors.replicas()[0].served is None
    weights.served = NEXT
    async with actors.turn(CALL):
        assert actors.replicas()[0].served == NEXT.version.label


async def test_a_replica_that_does_not_fall_asleep_is_ended_before_the_next_one_wakes() -> None:
    cluster = FakeCluster()
    learner, reference = (holder(cluster, name, 0) for name in (FunctionName.LEARNER, FunctionName.REFERENCE))
    take_turns([learner, reference])
    cluster.restless.add("reference-0")
    async with learner.turn(CALL):
        assert cluster.stopped == ["reference-0"]
        assert reference.state(0) is None  # another replica can start there
        assert reference.lost == 1


async def test_a_replica_that_is_lost_while_it_falls_asleep_holds_nothing_up() -> None:
    cluster = FakeCluster()
    learner, reference = (holder(cluster, name, 0) for name in (FunctionName.LEARNER, FunctionName.REFERENCE))
    take_turns([learner, reference])
    reference.replicas()[0].give_up("its node is gone")
    async with asyncio.timeout(60), learner.turn(CALL):
        assert reference.replicas() == ()


class Shared:
    """The run's turn on shared devices. Another run requests the devices when the test says so."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.asked, self.taken = log, asyncio.Event(), False

    async def take(self, within_s: float | None = None) -> None:
        if not self.taken:
            self.log.append("turn taken")
        self.taken = True

    async def pass_on(self) -> None:
        self.log.append("turn passed on")
        self.taken = False

    async def wait_wanted(self) -> None:
        await self.asked.wait()
        self.asked.clear()


async def test_a_turn_is_lent_when_its_phase_is_over_and_not_between_two_calls(
    log: list[str], functions: list[Function]
) -> None:
    shared = Shared(log)
    turns = Turns(functions, shared)
    lending = asyncio.create_task(turns.lend(CALL))
    async with turns.of(functions[0], CALL):
        shared.asked.set()
        await asyncio.sleep(0.01)
    async with turns.of(functions[0], CALL):
        await asyncio.sleep(0.01)
    assert log == ["turn taken", "actors wakes"], "a phase of two calls"
    await asyncio.sleep(0.15)
    assert log == ["turn taken", "actors wakes", "actors sleeps", "turn passed on"]
    await work(turns, functions[1], functions)
    assert log[4:] == ["turn taken", "learner wakes"], "nothing is asleep twice, and nobody asks any more"
    await work(turns, functions[2], functions)
    assert log[6:] == ["learner sleeps", "reference wakes"], "within the run the turn stays"
    lending.cancel()


async def test_a_function_that_takes_its_turn_gets_to_work_though_another_run_waits(
    log: list[str], functions: list[Function]
) -> None:
    shared = Shared(log)
    turns = Turns(functions, shared)
    lending = asyncio.create_task(turns.lend(CALL))
    for _ in range(3):
        shared.asked.set()
        await work(turns, functions[0], functions)
        await asyncio.sleep(0.1)
    assert log == ["turn taken", "actors wakes", "actors sleeps", "turn passed on"] * 3
    lending.cancel()


async def test_what_an_earlier_driver_left_awake_is_put_to_sleep(log: list[str], functions: list[Function]) -> None:
    for function in functions[:2]:
        function.awake = True
    turns = Turns(functions)
    await turns.put_all_to_sleep(CALL)
    assert log == ["actors sleeps", "learner sleeps"]
    await work(turns, functions[0], functions)
    assert log[2:] == ["actors wakes"]
