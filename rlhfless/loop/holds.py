"""Scale to zero: a function that nobody needs gives its device back, when that is cheaper than waiting warm.

The decision is pure (rlhfless.scaling.holding) and is made from the ledger's own figures each time a stage of a step
ends. What is kept is kept for a while only: a timer asks again at the break-even time. With `auto` the scaling policy
may release it sooner, or have it started ahead of its next use.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from rlhfless.fleet.pool import Pool
from rlhfless.fleet.replica import Replica
from rlhfless.loop.actors import RECOVERABLE
from rlhfless.loop.ledger import Ledger
from rlhfless.scaling.holding import decide_hold
from rlhfless.spec import Hold

log = logging.getLogger(__name__)


class Keeper:
    """Keeps or releases the one replica of a function between its uses."""

    def __init__(self, pool: Pool, hold: Hold, ledger: Ledger, pools: Callable[[], Sequence[Pool]]) -> None:
        self.pool = pool
        self._hold = hold
        self._ledger = ledger
        self._pools = pools
        self._waiting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._warming: asyncio.Task[None] | None = None

    async def ready(self) -> Replica:
        """The replica, started if it was released: a cold start that the ledger records."""
        self._no_timer()
        await self._settled()
        return await self.pool.ready()

    def warm(self, at_s: float | None = None) -> None:
        """Start it in the background, not before `at_s` (unix time), so that it is there when it is wanted."""
        self._no_timer()
        wait_s = 0.0 if at_s is None else at_s - time.time()
        if wait_s > 0:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.warm)
        elif not self.pool.serving():
            self._warming = asyncio.create_task(self._warm())

    def release(self) -> None:
        """The scaling policy wants it released, in the background. What the spec says goes first."""
        if self._hold == "auto" and self.pool.serving() and self._waiting is None:
            self._waiting = asyncio.create_task(self.pool.stop(*self.pool.replicas()))

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

    async def _warm(self) -> None:
        await self._settled()
        try:
            await self.pool.ready()
        except RECOVERABLE as fault:
            log.warning("%s could not be started ahead of its next use: %s", self.pool.function, fault)

    def _no_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
        self._no_timer()
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._settled()
