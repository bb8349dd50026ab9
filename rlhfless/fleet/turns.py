"""Functions that share devices take turns: a device's memory has one owner at a time.

    async with pool.turn(call):
        ...   # this function's replicas are awake; all others on its devices are asleep

A turn ends when another function wants one and no call of this one is under way: until then its replicas stay awake,
so calls of one function that follow each other cost nothing. The owner falls asleep before the next one wakes: never do
two of them hold the device's memory, whatever the functions promise, and a wake reads how much is free.

Invariants: calls of the owner never wait for a function that wants the turn, so a turn may be taken inside a turn of
the same function. A switch that failed or was cancelled leaves no owner, and the next one puts all others to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.tasks import gather_or_cancel
from rlhfless.functions.base import Call
from rlhfless.scaling.function_kinds import no_phases


class Taker(Protocol):
    """A function that takes turns."""

    async def fall_asleep(self, call: Call) -> None:
        """Give up the device's memory. Idempotent."""

    async def wake_up(self, call: Call) -> None:
        """Get it back. Idempotent."""


class Turns:
    """The turns of functions that share devices, directly or by way of others."""

    def __init__(self, takers: Sequence[Taker]) -> None:
        self._takers = takers
        self._owner: Taker | None = None
        self._switching = False
        self._calls = 0
        """The owner's calls that are under way."""
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def of(self, taker: Taker, call: Call) -> AsyncIterator[None]:
        """Within the block `taker` owns the devices. Raises what falling asleep or waking raised."""
        while self._owner is not taker:
            if self._switching or self._calls:
                await self._change()
            else:
                await self._switch(taker, call)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._changed()

    async def _switch(self, taker: Taker, call: Call) -> None:
        self._owner, self._switching = None, True
        try:
            await gather_or_cancel(*(other.fall_asleep(call) for other in self._takers if other is not taker))
            await taker.wake_up(call)
            self._owner = taker
        finally:
            self._switching = False
            self._changed()

    async def _change(self) -> None:
        """Returns when a call or a switch has ended."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


def take_turns(pools: Iterable[ReplicaPool]) -> None:
    """Pools that share devices, and hold memory there, take turns from now on. All devices that a chain of such pools
    joins have one owner: the learner's ranks work together, so it owns all of its devices or none."""
    left = [pool for pool in pools if pool.kind.phases is not no_phases]
    while left:
        joined = [left.pop()]
        for pool in joined:
            beside = [other for other in left if _devices(pool) & _devices(other)]
            joined += beside
            left = [other for other in left if other not in beside]
        if len(joined) > 1:
            turns = Turns(joined)
            for pool in joined:
                pool.turn = partial(turns.of, pool)


def _devices(pool: ReplicaPool) -> set[str]:
    return {device.name for allocation in pool.allocations for device in allocation.devices}
