"""What a driver reports of its run: replicas, calls and usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhfless.control.objects.costs import FunctionUsage
from rlhfless.control.objects.fleet import DeviceWork, ReplicaNow
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.orchestrator.base_run import TrainedRun
from rlhfless.orchestrator.ledger import Ledger
from rlhfless.records import Holding, Invocation, ReplicaState, in_order
from rlhfless.scaling.accounting import usage
from rlhfless.scaling.placement import Allocation
from rlhfless.scaling.prices import PriceBook

SHARE = 0.01
"""Largest share of the time that goes into adding up: a bill that took 0.1 s is made again after 10 s."""

FEWEST_S = 5.0
"""Shortest time between two bills."""


def replicas_of(run: TrainedRun) -> list[ReplicaNow]:
    """The replicas of a run, now. Called from another thread: a change meanwhile is reported next time."""
    return [
        ReplicaNow(
            function=str(replica.function),
            replica=replica.name,
            state=str(replica.state),
            since=replica.since_s,
            weights=replica.served,
            devices=[device.name for device in replica.allocation.devices],
            kind=replica.allocation.devices[0].kind,
            node=replica.allocation.devices[0].node,
            usd_per_hour=_rate(replica.state, replica.allocation, run.ledger.prices),
        )
        for pool in run.pools.values()
        for replica in list(pool.replicas())
    ]


def worked_in(run: TrainedRun, calls: Sequence[Invocation]) -> list[DeviceWork]:
    """The calls whose replicas are still in a pool, with their devices."""
    pools = run.pools.values()
    places = {replica.incarnation: pool.places(replica) for pool in pools for replica in list(pool.replicas())}
    return [
        DeviceWork(
            function=str(call.function),
            work=str(call.work),
            step=call.step,
            devices=places[call.incarnation],
            start_s=call.start_s,
            end_s=call.end_s,
        )
        for call in calls
        if places.get(call.incarnation)
    ]


def _rate(state: ReplicaState, allocation: Allocation, prices: PriceBook) -> float:
    if not state.holds_device:
        return 0.0
    return float(sum(prices.device(device.kind).usd_per_hour * share for device, share in allocation.billed(state)))


class UsageReporter:
    """Reports the usage of one attempt of a run."""

    def __init__(self, ledger: Ledger, put: Callable[..., None]) -> None:
        self._ledger = ledger
        self._put = put
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def report_if_due(self, pools: Collection[ReplicaPool]) -> None:
        """Report the usage up to now in the background, if the last report is old enough."""
        if time.monotonic() < self._next_s or (self._task is not None and not self._task.done()):
            return
        for pool in pools:
            for replica in pool.replicas():
                replica.cut()
        self._task = asyncio.create_task(self.report())

    async def report(self) -> None:
        """Report the usage up to now."""
        began_s = time.monotonic()
        records = self._ledger.records()
        rows = await asyncio.to_thread(bill, *records, self._ledger.prices)
        self._put("usage", functions=rows)
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(took_s / SHARE, FEWEST_S)


def bill(holdings: Sequence[Holding], invocations: Sequence[Invocation], prices: PriceBook) -> list[dict[str, Any]]:
    """The usage by function and kind of device, as objects.FunctionUsage. A call counts at the kind that its
    replica holds."""
    rows = []
    for function in in_order([*(held.function for held in holdings), *(call.function for call in invocations)]):
        calls = [call for call in invocations if call.function == function]
        held = [holding for holding in holdings if holding.function == function]
        for kind in dict.fromkeys(holding.device_kind for holding in held):
            of_kind = [holding for holding in held if holding.device_kind == kind]
            lives = {holding.incarnation for holding in of_kind}
            row = usage(function, of_kind, [call for call in calls if call.incarnation in lives], prices)
            figures = {name: getattr(row, name) for name in FunctionUsage.model_fields if hasattr(row, name)}
            rows.append({"function": str(function), "kind": kind} | figures)
    return rows
