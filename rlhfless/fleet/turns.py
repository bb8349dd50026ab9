"""Turns on shared devices: the memory of a device has one owner at a time.

    async with pool.turn(call):
        ...   # this function's replicas are awake; all others on its devices are asleep

Functions of a run: a turn ends when another function wants one and no call of the owner is in progress. Until then its
replicas stay awake, so consecutive calls of one function have no overhead. The owner falls asleep before the next
function wakes, so two functions never hold the device's memory at once, and a wake-up can measure the free memory.

Several runs (`placement.tenants`): the owner also needs the run's turn, which the reservation manager grants
(rlhfless.fleet.reservations). The run takes its turn before a function wakes. It passes the turn on, with all functions
asleep, when another run waits for it and this run's phase is over. While no other run waits, the functions stay awake
between phases.

Invariants: calls of the owner never wait for a function that wants the turn, so turns of the same function may be
nested. After a failed or cancelled switch there is no owner, and the next switch puts all other functions to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call
from rlhfless.scaling.function_specs import no_phases
from rlhfless.scaling.placement import Allocation
from rlhfless.util.tasks import gather_or_cancel

MORE_S = 10.0
"""Timeout for another device during a phase. It is short, because the run keeps its other devices meanwhile, and the
owner of the device may be waiting for those. An actor without a device by then starts in a later phase."""

PAUSE_S = 0.05
"""A longer pause between calls ends a phase: calls of a phase follow each other within milliseconds, and a change of
turn takes from hundreds of milliseconds to seconds."""


class RunTurn(Protocol):
    """The run's turn on devices that it shares with other runs (rlhfless.fleet.shared_devices)."""

    async def take(self, within_s: float | None = None) -> None:
        """Wait for the turn. Idempotent. Raises NoDevices after `within_s`, by default `timeouts.devices_s`."""

    async def pass_on(self) -> None:
        """Pass the turn on. Idempotent."""

    async def wait_wanted(self) -> None:
        """Wait until another run wants the turn. Raises StaleCall."""


class Taker(Protocol):
    """A function that takes turns."""

    async def fall_asleep(self, call: Call) -> None:
        """Free the device's memory. Idempotent."""

    async def wake_up(self, call: Call) -> None:
        """Get the device's memory back. Idempotent."""


class Turns:
    """The turns of functions that share devices, directly or via other functions."""

    def __init__(self, takers: Sequence[Taker], shared: RunTurn | None = None) -> None:
        self._takers = takers
        self._shared = shared
        self._owner: Taker | None = None
        self._switching = False
        self._calls = 0
        """Number of the owner's calls in progress."""
        self._entries = 0
        """Number of calls so far."""
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.asynccontextmanager
    async def of(self, taker: Taker, call: Call) -> AsyncIterator[None]:
        """Make `taker` the owner of the devices within the block. Raises the errors of sleep and wake-up."""
        while self._owner is not taker:
            if self._switching or self._calls:
                await self._wait_for_change()
            else:
                await self._switch(taker, call)
        self._calls += 1
        self._entries += 1
        try:
            if self._shared is not None:
                await self._shared.take(MORE_S)
            yield
        finally:
            self._calls -= 1
            self._notify_change()

    async def put_all_to_sleep(self, call: Call) -> None:
        """Put the replicas of all functions to sleep, such as those of an earlier driver, which may be awake."""
        await gather_or_cancel(*(taker.fall_asleep(call) for taker in self._takers))

    async def _switch(self, taker: Taker, call: Call) -> None:
        self._owner, self._switching = None, True
        try:
            await gather_or_cancel(*(other.fall_asleep(call) for other in self._takers if other is not taker))
            if self._shared is not None:
                await self._shared.take()
            await taker.wake_up(call)
            self._owner = taker
        finally:
            self._switching = False
            self._notify_change()

    async def lend(self, call: Call) -> None:
        """Pass the run's turn on whenever another run waits for it and the phase is over. Raises StaleCall."""
        while self._shared is not None:
            await self._shared.wait_wanted()
            await self._wait_phase_over()
            self._owner, self._switching = None, True
            try:
                await self.put_all_to_sleep(call)
                await self._shared.pass_on()
            finally:
                self._switching = False
                self._notify_change()

    async def _wait_phase_over(self) -> None:
        """Wait until no call has been in progress or started for PAUSE_S."""
        entries = -1
        while self._switching or self._calls or entries != self._entries:
            entries = self._entries
            await (self._wait_for_change() if self._switching or self._calls else asyncio.sleep(PAUSE_S))

    async def _wait_for_change(self) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    def _notify_change(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


def take_turns(
    pools: Iterable[ReplicaPool], shared: Callable[[Sequence[Allocation]], RunTurn] | None = None
) -> list[Turns]:
    """Make pools that share devices, and hold memory there, take turns.

    Pools connected through common devices form one set with one owner: the learner's ranks work together, so the
    learner owns all of its devices or none. With `shared`, which creates the run's turn among runs, a pool that is
    alone on its devices takes turns too.
    """
    left, turns = [pool for pool in pools if pool.kind.phases is not no_phases], []
    while left:
        joined = [left.pop()]
        for pool in joined:
            sharing = [other for other in left if _devices(pool) & _devices(other)]
            joined += sharing
            left = [other for other in left if other not in sharing]
        if len(joined) == 1 and shared is None:
            continue
        allocations = [allocation for pool in joined for allocation in pool.allocations]
        turns.append(Turns(joined, None if shared is None else shared(allocations)))
        for pool in joined:
            pool.turn = partial(turns[-1].of, pool)
    return turns


def _devices(pool: ReplicaPool) -> set[str]:
    return {device.name for allocation in pool.allocations for device in allocation.devices}
