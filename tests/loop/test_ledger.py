"""The bill of a step that takes long is on disk before the step ends."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.ledgers import ledger_in
from rlhfless.fleet.replica import Replica
from rlhfless.functions.base import ReplicaInfo
from rlhfless.loop.ledger import Ledger
from rlhfless.records import FunctionName, ReplicaState
from rlhfless.records.traces import read_trace
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device


async def test_holdings_of_a_long_step_are_written_before_it_ends(tmp_path: Path) -> None:
    ledger = ledger_in(tmp_path)
    pools = [pool_of_one(ledger, iter((10.0, 12.0, 25.0)))]
    ledger.keep_up(pools, lag_s=60.0)
    assert read_trace(tmp_path).holdings == ()  # the last write was just now
    ledger.keep_up(pools, lag_s=0.0)
    spans = [(holding.state, holding.start_s, holding.end_s) for holding in read_trace(tmp_path).holdings]
    assert spans == [(ReplicaState.STARTING, 10.0, 12.0), (ReplicaState.STALE, 12.0, 25.0)]


async def test_a_full_disk_loses_nothing_of_the_bill_and_is_reported_at_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_in(tmp_path)
    pools = [pool_of_one(ledger, iter((10.0, 12.0, 25.0, 27.0, 31.0)))]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    ledger.catch_up(pools)
    assert read_trace(tmp_path).holdings == ()  # nothing had failed to be written
    with monkeypatch.context() as disk:
        disk.setattr("rlhfless.records.traces.write_part", full)
        ledger.keep_up(pools, lag_s=0.0)
        with pytest.raises(OSError, match="no space left"):
            ledger.catch_up(pools)
    assert read_trace(tmp_path).holdings == ()
    ledger.catch_up(pools)
    assert sum(holding.duration_s for holding in read_trace(tmp_path).holdings) == 21.0


def pool_of_one(ledger: Ledger, clock: Iterator[float]) -> Any:
    """A pool with one replica that is up; the clock says when it was launched, was up, and was looked at."""
    allocation = Allocation.of([Device("cpu-0", CPU_KIND, 0)])
    replica = Replica("r", FunctionName.SCORING, allocation, ledger, lambda: next(clock))
    replica.mark_up(SimpleNamespace(), ReplicaInfo("a", 1, "here"))  # type: ignore[arg-type]
    return SimpleNamespace(replicas=lambda: (replica,))
