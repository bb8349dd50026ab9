"""Scale to zero: a function that nobody needs gives its device back, when that is cheaper than waiting warm.

The decision is pure (rlhfless.scaling.holding) and is made from the ledger's own figures each time a stage of a step
ends. What is kept is kept for a while only: a timer asks again at the break-even time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from rlhfless.fleet.pool import Pool
from rlhfless.fleet.replica import Replica
from rlhfless.loop.ledger import Ledger
from rlhfless.scaling.holding import decide_hold
from rlhfless.spec import Hold


class Keeper:
    """Keeps or releases the one replica of a function between its uses."""

    def __init__(self, pool: Pool, hold: Hold, ledger: Ledger, pools: Callable[[], Sequence[Pool]]) -> None:
        self.pool = pool
        self._hold = hold
        self._ledger = ledger
        self._pools = pools
        self._waiting: asyncio.Task[None] | None = None

    async def ready(self) -> Replica:
        """The replica, started if it was released: a cold start that the ledger records."""
        await self._settled()
        return await self.pool.ready()

    def idle(self, step: int) -> None:
        """Its work of this step is done: decide, and release it in the background if that is cheaper."""
        if self.pool.replicas() and self._waiting is None:
            self._waiting = asyncio.create_task(self._wait_and_release(step, time.time()))

    async def _wait_and_release(self, step: int, since_s: float) -> None:
        while True:
            now_s = time.time()
            function = self.pool.function
            decision = decide_hold(
                function,
                self._hold,
                self._ledger.hold_figures(function),
                idle_s=now_s - since_s,
                device_usd_per_hour=self._ledger.price_usd_per_hour([self.pool]),
                waiting_usd_per_hour=self._ledger.price_usd_per_hour(
                    [pool for pool in self._pools() if pool is not self.pool]
                ),
            )
            self._ledger.add_decision(decision.record(step, now_s))
            if not decision.keep:
                # Drains at once, so `ready` can tell from the replica's state that it has begun.
                await self.pool.stop(*self.pool.replicas())
                return
            if math.isinf(decision.release_after_s):
                return
            await asyncio.sleep(since_s + decision.release_after_s - now_s)

    async def _settled(self) -> None:
        """Call off the waiting; a release that has begun is waited for."""
        task, self._waiting = self._waiting, None
        if task is None:
            return
        if self.pool.serving():
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise

    async def close(self) -> None:
        """No more decisions; the fleet stops what is still running."""
        await self._settled()
