"""Functions that share devices take turns: a device's memory has one owner at a time.

    async with pool.turn(call):
        ...   # this function's replicas are awake; all others on its devices are asleep

A turn ends when another function wants one and no call of this one is under way: until then its replicas stay awake,
so calls of one function that follow each other cost nothing. The owner falls asleep before the next one wakes: never do
two of them hold the device's memory, whatever the functions promise, and a wake reads how much is free.

Where other runs may be on the same devices (`placement.tenants`), the owner's turn is the run's turn, too: it is taken
before a function wakes, and passed on, with all functions asleep, when another run waits for it.

Invariants: calls of the owner never wait for a function that wants the turn, so a turn may be taken inside a turn of
the same function. A switch that failed or was cancelled leaves no owner, and the next one puts all others to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.base import Call
from rlhfless.scaling.function_specs import no_phases
from rlhfless.scaling.placement import Allocation
from rlhfless.util.tasks import gather_or_cancel


class Taker(Protocol):
    """A function that takes turns."""

    async def fall_asleep(self, call: Call) -> None:
        """Give up the device's memory. Idempotent."""

    async def wake_up(self, call: Call) -> None:
        """Get it back. Idempotent."""


class DeviceLease(Protocol):
    """The run's turn on devices that it shares with other runs."""

    async def take(self, within_s: float | None = None) -> None:
        """Wait for it. Idempotent."""

    async def pass_on(self) -> None:
        """Pass it on; all functions on the devices are asleep. Idempotent."""

    async def wait_wanted(self) -> None:
        """Wait until another run waits for it."""


MORE_S = 10.0
"""Longest wait for one more device during a phase. Short, because the run keeps its other devices meanwhile, and the
owner of the awaited one may wait for those; an actor that gets no device in time starts in a later phase."""


PAUSE_S = 0.05
"""A pause between two calls that is longer ends a phase: calls of one phase follow each other within milliseconds, and
a change of turn costs from hundreds of milliseconds to seconds."""


class Turns:
    """The turns of functions that share devices, directly or by way of others."""

    def __init__(self, takers: Sequence[Taker], lent: DeviceLease | None = None) -> None:
        self._takers = takers
        self._lent = lent
        self._owner: Taker | None = None
        self._switching = False
        self._calls = 0
        """The owner's calls that are under way."""
        self._entries = 0
        """Calls since the beginning."""
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def of(self, taker: Taker, call: Call) -> AsyncIterator[None]:
        """Within the block `taker` owns the devices. Raises what falling asleep or waking raised."""
        while self._owner is not taker:
            if self._switching or self._calls:
                await self._wait_for_change()
            else:
                await self._switch(taker, call)
        self._calls += 1
        self._entries += 1
        try:
            if self._lent is not None:
                await self._lent.take(MORE_S)
            yield
        finally:
            self._calls -= 1
            self._notify_change()

    async def put_all_to_sleep(self, call: Call) -> None:
        """Put the replicas of all functions to sleep: of those that an earlier driver left it is not known whether they
        sleep."""
        await gather_or_cancel(*(taker.fall_asleep(call) for taker in self._takers))

    async def _switch(self, taker: Taker, call: Call) -> None:
        self._owner, self._switching = None, True
        try:
            await gather_or_cancel(*(other.fall_asleep(call) for other in self._takers if other is not taker))
            if self._lent is not None:
                await self._lent.take()
            await taker.wake_up(call)
            self._owner = taker
        finally:
            self._switching = False
            self._notify_change()

    async def lend(self, call: Call) -> None:
        """Pass the run's turn on whenever another run waits for it and its phase is over. Ends with StaleCall."""
        while self._lent is not None:
            await self._lent.wait_wanted()
            await self._wait_phase_over()
            self._owner, self._switching = None, True
            try:
                await self.put_all_to_sleep(call)
                await self._lent.pass_on()
            finally:
                self._switching = False
                self._notify_change()

    async def _wait_phase_over(self) -> None:
        """Wait until no call has been under way for PAUSE_S."""
        entries = -1
        while self._switching or self._calls or entries != self._entries:
            entries = self._entries
            await (self._wait_for_change() if self._switching or self._calls else asyncio.sleep(PAUSE_S))

    async def _wait_for_change(self) -> None:
        """Wait for the end of a call or a switch."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    def _notify_change(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


def take_turns(
    pools: Iterable[ReplicaPool], lent: Callable[[Sequence[Allocation]], DeviceLease] | None = None
) -> list[Turns]:
    """Pools that share devices, and hold memory there, take turns from now on. All devices that a chain of such pools
    joins have one owner: the learner's ranks work together, so it owns all of its devices or none. With `lent`, which
    knows the run's turn on devices that it shares with other runs, each pool takes turns, if only with these."""
    left, turns = [pool for pool in pools if pool.kind.phases is not no_phases], []
    while left:
        joined = [left.pop()]
        for pool in joined:
            sharing = [other for other in left if _devices(pool) & _devices(other)]
            joined += sharing
            left = [other for other in left if other not in sharing]
        if len(joined) == 1 and lent is None:
            continue
        allocations = [allocation for pool in joined for allocation in pool.allocations]
        turns.append(Turns(joined, None if lent is None else lent(allocations)))
        for pool in joined:
            pool.turn = partial(turns[-1].of, pool)
    return turns


def _devices(pool: ReplicaPool) -> set[str]:
    return {device.name for allocation in pool.allocations for device in allocation.devices}
