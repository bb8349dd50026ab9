"""Tells what a run has used so far, by function: not at every step, because the bill is added up from all records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.loop.ledger import Ledger
from rlhfless.records import Holding, Invocation, in_order
from rlhfless.scaling.accounting import usage
from rlhfless.scaling.prices import PriceBook

SHARE = 0.01
"""Most of the time that goes into adding up: a bill that took 0.1 s is made again after 10 s."""

FEWEST_S = 5.0
"""Between two bills."""


class UsageTeller:
    """Reports the usage of one attempt of a run."""

    def __init__(self, ledger: Ledger, tell: Callable[..., None]) -> None:
        self._ledger = ledger
        self._tell = tell
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def later(self, pools: Collection[ReplicaPool]) -> None:
        """Tell the bill up to now, in the background, if it is time."""
        if time.monotonic() < self._next_s or (self._task is not None and not self._task.done()):
            return
        for pool in pools:
            for replica in pool.replicas():
                replica.cut()
        self._task = asyncio.create_task(self.now())

    async def now(self) -> None:
        """Tell the bill up to now."""
        began_s = time.monotonic()
        records = self._ledger.records()
        rows = await asyncio.to_thread(bill, *records, self._ledger.prices)
        self._tell("usage", functions=rows)
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(took_s / SHARE, FEWEST_S)


def bill(holdings: Sequence[Holding], invocations: Sequence[Invocation], prices: PriceBook) -> list[dict[str, Any]]:
    """By function and kind of device; a function's calls are counted at the kind that it holds first."""
    rows = []
    for function in in_order([*(held.function for held in holdings), *(call.function for call in invocations)]):
        calls = [call for call in invocations if call.function == function]
        held = [holding for holding in holdings if holding.function == function]
        for kind in dict.fromkeys(holding.device_kind for holding in held):
            of_kind = [holding for holding in held if holding.device_kind == kind]
            lives = {holding.incarnation for holding in of_kind}
            row = usage(function, of_kind, [call for call in calls if call.incarnation in lives], prices)
            rows.append(
                {
                    "function": str(function),
                    "kind": kind,
                    "busy_device_s": row.busy_device_s,
                    "idle_device_s": row.idle_device_s,
                    "cold_device_s": row.cold_device_s,
                    "cost_usd": row.cost_usd,
                    "cold_starts": row.cold_starts,
                    "invocations": row.invocations,
                }
            )
    return rows
