"""The bill of a long step is on disk before the step ends."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.fake_run import ledger_in
from rlhfless.fleet.replica import Replica
from rlhfless.functions.calls import ReplicaInfo
from rlhfless.orchestrator.ledger import NOTHING, Ledger, held_s
from rlhfless.records import FunctionName, Holding, ReplicaState
from rlhfless.records.traces import read_trace
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.util.clock import VirtualClock


async def test_holdings_of_a_long_step_are_written_before_it_ends(tmp_path: Path, clock: VirtualClock) -> None:
    ledger = ledger_in(tmp_path)
    pools = [pool_of_one(ledger, clock)]
    ledger.keep_up(pools, lag_s=60.0)
    assert read_trace(tmp_path).holdings == ()  # the last write is recent
    clock.now_s = 25.0
    ledger.keep_up(pools, lag_s=0.0)
    spans = [(holding.state, holding.start_s, holding.end_s) for holding in read_trace(tmp_path).holdings]
    assert spans == [(ReplicaState.STARTING, 10.0, 12.0), (ReplicaState.STALE, 12.0, 25.0)]


async def test_a_full_disk_loses_nothing_of_the_bill_and_is_reported_at_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    ledger = ledger_in(tmp_path)
    pools = [pool_of_one(ledger, clock)]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    ledger.catch_up(pools)
    assert read_trace(tmp_path).holdings == ()  # no earlier write had failed
    with monkeypatch.context() as disk:
        disk.setattr("rlhfless.records.traces.write_part", full)
        ledger.keep_up(pools, lag_s=0.0)
        with pytest.raises(OSError, match="no space left"):
            ledger.catch_up(pools)
    assert read_trace(tmp_path).holdings == ()
    clock.now_s = 31.0
    ledger.catch_up(pools)
    assert sum(holding.duration_s for holding in read_trace(tmp_path).holdings) == 21.0


def pool_of_one(ledger: Ledger, clock: VirtualClock) -> Any:
    """Return a pool with one replica, launched at 10 and up at 12."""
    clock.now_s, allocation = 10.0, Allocation.of([Device("cpu-0", CPU_KIND, 0)])
    replica = Replica("r", FunctionName.SCORING, allocation, ledger)
    clock.now_s = 12.0
    replica.mark_up(SimpleNamespace(), ReplicaInfo("a", 1, "here"))  # type: ignore[arg-type]
    return SimpleNamespace(replicas=lambda: (replica,))


def test_the_time_of_earlier_attempts_is_that_in_which_they_held_devices() -> None:
    def holding(start_s: float, end_s: float) -> Holding:
        return Holding("g", "g-0", "g-0-1", "cpu-0", CPU_KIND, 1.0, ReplicaState.SERVING, start_s, end_s)

    spans = (holding(10.0, 20.0), holding(15.0, 30.0), holding(100.0, 101.0))
    assert held_s(replace(NOTHING, holdings=spans)) == 21.0
    assert held_s(NOTHING) == 0.0
