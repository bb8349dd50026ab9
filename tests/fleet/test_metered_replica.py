"""What a run pays of a replica that it shares: its part of the replica's time, without a gap."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.fake_cluster import NoRecords
from fakes.set_clock import set_clock  # noqa: F401 (a fixture)
from rlhfless.fleet.replica import METERED_S, Replica
from rlhfless.functions.calls import Call, ReplicaInfo, Reply
from rlhfless.records import Holding, ReplicaState, WeightVersion, Work
from rlhfless.scaling.placement import Allocation, Device
from rlhfless.util.clock import VirtualClock

CALL = Call("run", 1, 1)
V1 = WeightVersion("run", 1, 1, "d")


class Records(NoRecords):
    def __init__(self) -> None:
        self.held: list[Holding] = []

    def add_holding(self, holding: Holding) -> None:
        self.held.append(holding)


class Engine:
    """Answers every call with the seconds that the run has used."""

    used_s = 7.0  # of an earlier time in the fleet

    def call(self, *_: Any, **__: Any) -> Any:
        async def answer() -> Reply[None]:
            return Reply("i1", None, 0.0, 0.0, metered_s=self.used_s)

        return answer()


async def replica_up(clock: VirtualClock, devices: int = 1) -> tuple[Replica, Engine, Records]:
    records, engine = Records(), Engine()
    allocation = Allocation(tuple(Device(f"gpu-{n}", "h100", n) for n in range(devices)), (1.0,) * devices, lent=True)
    replica = Replica("run-generation-0", "generation", allocation, records)  # type: ignore[arg-type]
    clock.now_s += 10.0
    replica.mark_up(engine, ReplicaInfo("i1", 1, "here", metered_s=engine.used_s))  # type: ignore[arg-type]
    return replica, engine, records


async def called(replica: Replica, work: Work | None = None) -> None:
    await replica.call("x", CALL, timeout_s=1, waiting_for="it", work=work)


def device_s(records: Records) -> float:
    return sum(each.device_s for each in records.held)


async def test_a_run_pays_its_part_and_not_the_start(clock: VirtualClock) -> None:
    replica, engine, records = await replica_up(clock, devices=2)
    assert [(each.state, each.device_s) for each in records.held] == [(ReplicaState.STARTING, 0.0)] * 2
    replica.ask(V1)
    clock.now_s += 1.0
    engine.used_s += 0.5
    await called(replica, Work.LOAD_WEIGHTS)
    replica.mark_loaded(V1)
    clock.now_s += 8.0
    replica.cut()  # as when the ledger is written
    clock.now_s += 2.0
    engine.used_s += 2.0
    await called(replica, Work.GENERATE)
    assert device_s(records) == pytest.approx(2 * 2.5)
    spans = [(each.start_s, each.end_s) for each in records.held if each.device == "gpu-0"]
    assert spans == [(0, 10), (10, 11), (11, 19), (19, 21)], "without a gap"


async def test_time_between_calls_is_read_from_heartbeats(clock: VirtualClock) -> None:
    replica, engine, records = await replica_up(clock)
    clock.now_s += METERED_S / 2
    engine.used_s += 1.0
    await called(replica)
    assert device_s(records) == 0.0
    clock.now_s += METERED_S
    await called(replica)
    assert device_s(records) == pytest.approx(1.0)


async def test_what_exceeds_the_time_is_paid_next_time(clock: VirtualClock) -> None:
    replica, engine, records = await replica_up(clock)
    for used_s, expected in ((3.0, 2.0), (0.5, 3.5)):
        clock.now_s += 2.0
        engine.used_s += used_s
        await called(replica, Work.GENERATE)
        assert device_s(records) == pytest.approx(expected)


async def test_the_cost_so_far_is_estimated_by_the_last_part(clock: VirtualClock) -> None:
    replica, engine, _ = await replica_up(clock)
    clock.now_s += 4.0
    engine.used_s += 1.0
    await called(replica, Work.GENERATE)
    clock.now_s += 8.0
    assert replica.open_device_s == {"h100": pytest.approx(2.0)}


async def test_a_run_that_joins_an_engine_records_no_start_of_it(clock: VirtualClock) -> None:
    phases = {"import": 9.0, "build": 2.0}
    for took_s, recorded in ((3.0, False), (12.0, True)):
        replica, _, _ = await replica_up(clock)
        replica.info = ReplicaInfo("i1", 1, "here", metered_s=0.0, start_seconds=phases)
        replica._start_s = took_s
        assert replica.record_start(CALL) is recorded


async def test_an_end_leaves_no_gap(clock: VirtualClock) -> None:
    replica, _, records = await replica_up(clock)
    clock.now_s += 4.0
    replica.give_up("lost")
    await asyncio.sleep(0)
    assert [(each.start_s, each.end_s, each.share) for each in records.held] == [(0, 10, 0.0), (10, 14, 0.0)]
