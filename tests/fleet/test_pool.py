"""Replicas join and leave a pool in the background, within its bounds, and running work is notified."""

from __future__ import annotations

import asyncio
import time

import pytest

from fakes.fake_cluster import CALL, FakeCluster, FakeHandle, NoRecords, Watcher, pool_of
from fakes.fake_run import until
from rlhfless.fleet.handles import HandleLost
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.replica import CallTimeout, Replica
from rlhfless.functions.calls import ReplicaInfo
from rlhfless.records import FunctionName, ReplicaState, SleepTier, Work
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.placement import Allocation, Device


def watched(*names: str, fewest: int = 1) -> tuple[FakeCluster, ReplicaPool, Watcher]:
    cluster, watcher = FakeCluster(), Watcher()
    pool = pool_of(cluster, *names, bounds=Bounds(fewest, "min_actors"))
    pool.watch(watcher)
    return cluster, pool, watcher


async def test_a_start_goes_on_in_the_background_and_its_end_is_heard_of() -> None:
    cluster, pool, watcher = watched("a")
    pool.start(2, CALL)
    pool.start(2, CALL)  # requested twice, started once
    assert pool.state(2) is ReplicaState.STARTING
    assert pool.state(1) is None
    await until(lambda: cluster.begun == [2])
    cluster.gates[2].set_result(None)
    await until(lambda: watcher.heard == [("joined", 2)])
    assert pool.state(2) is ReplicaState.SERVING


async def test_a_start_that_fails_leaves_the_slot_empty(caplog: pytest.LogCaptureFixture) -> None:
    cluster, pool, watcher = watched("a")
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [1])
    cluster.gates[1].set_exception(FleetError("no slot"))
    await until(lambda: watcher.heard == [("missed", 1)])
    assert pool.state(1) is None
    assert "generation replica at slot 1 did not start; the slot stays empty for now: no slot" in caplog.text
    await pool.wait_any_up()  # another replica is serving, so nothing waits


@pytest.mark.parametrize(("since_s", "held_s"), [(40.0, 60.0), (None, 0.0)], ids=["known", "unknown"])
async def test_an_adopted_replica_is_billed_since_its_last_holding(
    since_s: float | None, held_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has held its device all along."""
    monkeypatch.setattr("rlhfless.fleet.replica.unix_s", lambda: 100.0)
    replica = Replica("a", "generation", Allocation.of([Device("cpu-0", "cpu-core", 0)]), NoRecords())
    replica.mark_adopted(FakeHandle("a", FakeCluster()), ReplicaInfo("a-1", 1, "here"), since_s)  # type: ignore[arg-type]
    assert replica.open_device_s == {"cpu-core": held_s}


@pytest.mark.parametrize("state", ["draining", "sleeping", "waking"])
async def test_a_replica_lost_while_it_serves_nobody_is_deleted_before_the_next_starts(state: str) -> None:
    """Otherwise it would keep its devices, or Serve would restart it there."""
    cluster, pool, _ = watched("a", fewest=0)
    replica = pool["a"]
    if state == "draining":
        replica.drain()
    else:
        await replica.sleep(CALL, SleepTier.HOST, 60)
    if state == "waking":
        replica.mark_waking()
    replica.give_up("it does not answer")
    assert replica.state is ReplicaState.RETIRED
    pool.start(0, CALL)
    await until(lambda: cluster.begun == [0])
    assert cluster.stopped == ["a"]
    assert "a" not in pool._devices.users  # type: ignore[attr-defined]
    await pool.close()


async def test_a_start_waits_for_its_time_unless_it_is_asked_for_earlier() -> None:
    cluster, pool, _ = watched("a")
    pool.start(1, CALL, at_s=time.time() + 3600)
    pool.start(2, CALL, at_s=time.time() + 0.02)
    assert not pool.expects(2)
    await until(lambda: cluster.begun == [2])
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [2, 1])
    await pool.close()
    assert pool.state(1) is None  # a start in progress is cancelled at the end


async def test_the_fewest_are_kept_and_one_that_leaves_hands_back_first() -> None:
    cluster, pool, watcher = watched("a", "b", "c", fewest=2)
    assert pool.release(1)
    assert pool["b"].state is ReplicaState.DRAINING  # at once: it gets no more work
    assert pool.state(1) is None
    assert not pool.release(0)
    await until(lambda: cluster.stopped == ["b"])
    assert watcher.heard == [("drain", "b")]


async def test_one_that_cannot_hand_back_is_stopped_and_its_slot_is_free(caplog: pytest.LogCaptureFixture) -> None:
    """For example, an actor that does not answer an abort in time."""
    cluster, pool, watcher = watched("a", "b")
    watcher.drain = failing  # type: ignore[method-assign]
    pool.release(1)
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [1])
    assert cluster.stopped == ["b"]
    assert "b did not hand back its work, and is stopped: no answer to an abort" in caplog.text
    await pool.close()


async def failing(replica: object) -> None:
    raise CallTimeout("no answer to an abort")


async def test_a_start_that_is_released_is_called_off() -> None:
    cluster, pool, watcher = watched("a")
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [1])
    assert pool.release(1)
    await until(lambda: watcher.heard == [("missed", 1)])
    assert cluster.gates[1].cancelled()


async def test_a_start_follows_the_release_of_its_slot() -> None:
    cluster, pool, _ = watched("a", "b")
    pool.release(1)
    pool.start(1, CALL)
    assert pool.state(1) is ReplicaState.STARTING
    assert cluster.begun == []
    await until(lambda: cluster.begun == [1])
    assert cluster.stopped == ["b"]
    await pool.close()


async def test_a_start_that_waits_for_its_slot_can_be_called_off() -> None:
    cluster, pool, _ = watched("a", "b", "c")
    pool.release(1)
    pool.start(1, CALL)
    pool.release(1)
    await until(lambda: cluster.stopped == ["b"])
    await asyncio.sleep(0)
    assert cluster.begun == []
    assert pool.state(1) is None


# -- a function with one replica that waits between its uses


def helper(hold: str = "auto", *, there: bool = True) -> tuple[FakeCluster, ReplicaPool]:
    cluster = FakeCluster(gated=False)
    bounds = Bounds(fewest=int(hold == "always"), idle=hold != "never", reason=f"scaling.hold_scoring is {hold}")
    names = ("scoring",) if there else ()
    return cluster, pool_of(cluster, *names, slots=1, bounds=bounds, function=FunctionName.SCORING)


async def test_a_replica_that_was_released_is_started_again_when_it_is_wanted() -> None:
    cluster, pool = helper()
    pool.release(0)
    await until(lambda: not pool.replicas())
    assert (await pool.ready(CALL)).state is ReplicaState.SERVING
    assert cluster.begun == [0]


async def test_a_release_that_has_begun_is_waited_for() -> None:
    cluster, pool = helper()
    pool.release(0)
    assert (await pool.ready(CALL)).state is ReplicaState.SERVING
    assert (cluster.stopped, cluster.begun) == (["scoring"], [0])


async def test_what_the_spec_says_goes_before_the_policy() -> None:
    _, pool = helper("always")
    assert not pool.release(0)
    await asyncio.sleep(0)
    assert pool.serving()
    await pool.close()


async def test_it_is_started_ahead_of_its_next_use() -> None:
    cluster, pool = helper(there=False)
    pool.start(0, CALL, time.time() + 0.02)
    assert cluster.begun == []
    await until(lambda: bool(pool.serving()))
    await pool.close()


async def test_a_start_that_waits_is_called_off_by_a_use() -> None:
    _, pool = helper(there=False)
    pool.start(0, CALL, time.time() + 0.05)
    await pool.stop(await pool.ready(CALL))
    await asyncio.sleep(0.1)
    assert not pool.replicas()
    await pool.close()


async def test_a_release_waits_for_the_call_that_the_replica_is_at() -> None:
    cluster, pool = helper()
    replica = pool["scoring"]
    cluster.loads["scoring"] = asyncio.get_running_loop().create_future()
    working = asyncio.create_task(
        replica.call("load", CALL, timeout_s=60, waiting_for="its scores", work=Work.SCORE)  # gated by the test
    )
    await until(lambda: replica.working)
    pool.release(0)
    using = asyncio.create_task(pool.ready(CALL))
    await asyncio.sleep(0.05)
    assert not cluster.stopped
    cluster.loads["scoring"].set_result(None)
    await working
    assert (await using).name != "scoring"
    assert cluster.stopped == ["scoring"]


async def test_a_start_ahead_of_time_that_fails_is_tried_again_when_it_is_wanted() -> None:
    cluster, pool = helper(there=False)
    cluster.gated = True
    pool.start(0, CALL)
    await until(lambda: cluster.begun == [0])
    cluster.gates[0].set_exception(FleetError("no slot"))
    await until(lambda: pool.state(0) is None)
    cluster.gated = False
    assert (await pool.ready(CALL)).state is ReplicaState.SERVING


async def test_uses_at_the_same_time_share_one_start() -> None:
    cluster, pool = helper(there=False)
    first, second = await asyncio.gather(pool.ready(CALL), pool.ready(CALL))
    assert first is second
    assert cluster.begun == [0]


async def test_a_use_says_why_its_start_failed() -> None:
    cluster, pool = helper(there=False)
    cluster.gated = True
    use = asyncio.create_task(pool.ready(CALL))
    await until(lambda: cluster.begun == [0])
    cluster.gates[0].set_exception(FleetError("no slot"))
    with pytest.raises(FleetError, match="no slot"):
        await use


async def test_a_use_after_the_end_is_refused() -> None:
    _, pool = helper(there=False)
    await pool.close()
    with pytest.raises(FleetError, match="the run is being stopped, and scoring is not started any more"):
        await pool.ready(CALL)


def on_nodes(*nodes: str) -> list[Allocation]:
    return [Allocation.of([Device(f"gpu-{i}", "h100", i, node)]) for i, node in enumerate(nodes)]


async def test_actors_leave_a_node_that_leaves_and_the_fewest_start_again() -> None:
    cluster, watcher = FakeCluster(), Watcher()
    pool = pool_of(cluster, "a", "b", "c", bounds=Bounds(2, "min_actors"), given=on_nodes("n1", "n2", "n1"))
    pool.watch(watcher)
    pool.leave_nodes(frozenset({"n1"}), CALL)
    assert pool.must_move is False, "what leaves already"
    assert [replica.name for replica in pool.serving()] == ["b"]
    # One of three may leave for good; another departure would leave fewer than two.
    assert [pool.state(slot) for slot in range(3)] == [None, ReplicaState.SERVING, ReplicaState.STARTING]
    await until(lambda: cluster.stopped == ["a", "c"] and cluster.begun == [2])
    assert watcher.heard[:2] == [("drain", "a"), ("drain", "c")]
    pool.leave_nodes(frozenset({"n1"}), CALL)  # the same notice again
    cluster.gates[2].set_result(None)
    await until(lambda: ("joined", 2) in watcher.heard)


async def test_a_helper_leaves_between_two_calls_and_a_learner_is_left_to_the_run() -> None:
    cluster = FakeCluster()
    scoring = pool_of(cluster, "s", function=FunctionName.SCORING, given=on_nodes("n1"), bounds=Bounds(0))
    learner = pool_of(cluster, "l", function=FunctionName.LEARNER, given=on_nodes("n1"))
    (helper,) = scoring.serving()
    with helper._at_work(Work.SCORE):
        scoring.leave_nodes(frozenset({"n1"}), CALL)
        assert helper.state is ReplicaState.SERVING
        assert scoring.must_move
    scoring.leave_nodes(frozenset({"n1"}), CALL)
    learner.leave_nodes(frozenset({"n1"}), CALL)
    await until(lambda: cluster.stopped == ["s"])
    assert learner.must_move
    learner.leave_nodes(frozenset(), CALL)
    assert not learner.must_move


async def test_an_actor_that_dies_as_soon_as_it_is_up_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, pool, watcher = watched("a")

    async def die(handle: FakeHandle, method: str) -> None:
        raise HandleLost("the actor died")

    monkeypatch.setattr(FakeHandle, "_answer", die)
    pool.start(1, CALL)
    await until(lambda: cluster.begun == [1])
    cluster.gates[1].set_result(None)
    await until(lambda: watcher.heard == [("missed", 1)])
    assert pool.fatal is None
    assert "lost as soon as it was up: the actor died" in caplog.text
