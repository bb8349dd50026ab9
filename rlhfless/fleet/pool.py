"""The elastic pool of one function: N >= 0 replicas that come and go in the background, within bounds.

A step waits for a start only if it needs the replica (`ready`), or if nothing else is left to draw. A replica that
comes up is *opened* before it serves: what must have happened to it is the function's own (`opens`), such as the load
of the step's weights. A replica that leaves gets no work from then on, hands back what it has, and is stopped after
that. A static fleet is a pool that is never asked to change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from rlhfless.fleet.blueprint import Blueprint, Bounds
from rlhfless.fleet.cluster import Cluster, FleetError
from rlhfless.fleet.replica import CallTimeout, Recorder, Replica, ReplicaLost
from rlhfless.fleet.replicas import Replicas
from rlhfless.fleet.tasks import gather_or_cancel
from rlhfless.functions.base import Call
from rlhfless.records import ReplicaState, WeightVersion
from rlhfless.spec import TimeoutsSpec

log = logging.getLogger(__name__)

RECOVERABLE = (ReplicaLost, CallTimeout, FleetError)
"""Faults of a machine or a process. Wrong weights, bad rewards and full disks are not mended by trying again."""

Opens = Callable[[Replica, Call], Awaitable[None]]


class Listener(Protocol):
    """Work that is under way on a pool, as far as it concerns replicas that come and go."""

    @property
    def over(self) -> bool: ...

    def joined(self, slot: int) -> None:
        """A replica serves at a slot."""

    def missed(self, slot: int) -> None:
        """No replica will come to a slot."""

    async def drain(self, replica: Replica) -> None:
        """A replica hands back what it has; returns when it has."""


class Pool(Replicas):
    """A slot is the number of an allocation; at most one replica is there at a time."""

    def __init__(
        self, cluster: Cluster, blueprint: Blueprint, call: Call, timeouts: TimeoutsSpec, recorder: Recorder
    ) -> None:
        super().__init__(cluster, blueprint, call, timeouts, recorder)
        self.opens: Opens = self._open_own
        """How a replica that is up comes to serve."""
        self.fatal: BaseException | None = None
        """What ended a start in the background and no other start can mend, such as wrong weights."""
        self._listeners: list[Listener] = []
        self._closed = False
        self._starts: dict[int, asyncio.Task[Replica]] = {}
        self._opening: set[str] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._next: dict[int, Call] = {}
        """Slots that get a new replica as soon as the one that leaves has left."""

    @property
    def bounds(self) -> Bounds:
        return self._blueprint.bounds

    def watch(self, listener: Listener) -> None:
        """Tell a listener of replicas that come and go, until it is over."""
        self._listeners = [known for known in self._listeners if not known.over] + [listener]

    def state(self, slot: int) -> ReplicaState | None:
        """Of the replica at a slot; None if there is none, or only one that leaves: another can be asked for then."""
        replica = self.at(slot)
        if replica is not None and replica.state is not ReplicaState.DRAINING:
            return replica.state
        return ReplicaState.STARTING if slot in self._starts or slot in self._next else None

    def expects(self, slot: int) -> bool:
        """Whether a replica serves at a slot, or will."""
        return self.state(slot) in (ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING)

    @property
    def expected(self) -> int:
        """Replicas that serve, or will."""
        return sum(self.expects(slot) for slot in range(len(self.allocations)))

    def up(self) -> tuple[Replica, ...]:
        """Those that can be given weights: up, and done with what they had to do first."""
        alive = (ReplicaState.STALE, ReplicaState.SERVING)
        return tuple(r for r in self.replicas() if r.state in alive and r.name not in self._opening)

    # -- replicas that come

    async def ready(self, call: Call) -> Replica:
        """The first replica, started if it is not there: a cold start that the ledger records.

        A start that waits for its time is called off, and a release that has begun is waited for. Raises what the
        start raised.
        """
        while True:
            self._call_off_timer(0)
            replica = self.at(0)
            if replica is not None and replica.state is ReplicaState.SERVING:
                return replica
            if 0 in self._leaving:
                await asyncio.wait([self._leaving[0]])
            elif 0 in self._starts:
                await self._started_one(self._starts[0])
            elif replica is not None:
                await self.opens(replica, call)
            elif self._closed:
                raise FleetError(f"the run is being stopped, and {self.function} is not started any more")
            else:
                self.start(0, call)

    @staticmethod
    async def _started_one(start: asyncio.Task[Replica]) -> None:
        """Wait for a start. Raises its fault; a start that was called off is none."""
        await asyncio.wait([start])
        if not start.cancelled():
            start.result()

    async def fill(self, count: int) -> None:
        """Start replicas at the first free slots until there are `count`, all at once. They are up, and not open."""
        missing = count - len(self.replicas())
        await gather_or_cancel(*(self.start_one(slot) for slot in self._free()[: max(missing, 0)]))

    def _free(self) -> list[int]:
        """Slots whose allocations no replica holds."""
        return [slot for slot in range(len(self.allocations)) if self.at(slot) is None]

    async def add(self, call: Call, slot: int | None = None) -> Replica:
        """Start one more, at a slot or at the first that is free; returns when it serves."""
        if slot is None:
            slot = next(iter(self._free()), 0)
        replica = await self.start_one(slot)
        self._opening.add(replica.name)
        try:
            await self.opens(replica, call)
        except BaseException:
            await self._call_off(replica)
            raise
        finally:
            self._opening.discard(replica.name)
        self.joined(replica)
        return replica

    def joined(self, replica: Replica) -> None:
        """It serves from here on."""
        for listener in self._listeners:
            listener.joined(self.slot_of(replica))

    def missed(self, slot: int) -> None:
        """No replica will come to a slot."""
        for listener in self._listeners:
            listener.missed(slot)

    def start(self, slot: int, call: Call, at_s: float | None = None) -> None:
        """Start one at a slot in the background, not before `at_s` (unix time), nor before one that leaves has left.

        One that waits for its time is begun at once when it is asked for again without one.
        """
        self._call_off_timer(slot)
        wait_s = 0.0 if at_s is None else at_s - time.time()
        if wait_s > 0:
            self._timers[slot] = asyncio.get_running_loop().call_later(wait_s, self.start, slot, call)
        elif slot in self._leaving:
            self._next[slot] = call
        elif self.state(slot) is None and not self._closed:
            task = self._starts[slot] = asyncio.create_task(self.add(call, slot))
            task.add_done_callback(lambda done: self._started(slot, done))

    def _started(self, slot: int, task: asyncio.Task[Replica]) -> None:
        del self._starts[slot]
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, RECOVERABLE):
            what = "no %s replica came up at slot %d, which stays empty for now: %s"
            log.warning(what, self.function, slot, failure)
        elif failure is not None:
            self.fatal = failure
        if not self.expects(slot):
            self.missed(slot)

    def replace_missing(self, call: Call) -> None:
        """Start in the background what is missing of the fewest."""
        free = [slot for slot in range(len(self.allocations)) if self.state(slot) is None]
        for slot in free[: max(self.bounds.fewest - self.expected, 0)]:
            self.start(slot, call)

    async def any_up(self) -> None:
        """Wait for the first start if no replica is up. Raises why the last start failed if none is left."""
        while self._starts and not self.up():
            done, _ = await asyncio.wait(self._starts.values(), return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in done if not task.cancelled()]
            if failures and failures[-1] is not None and not self._starts and not self.up():
                raise failures[-1]

    async def _open_own(self, replica: Replica, call: Call) -> None:
        """For functions without weights of the run (scoring, reference) or with their own (the learner)."""
        version = WeightVersion(call.run_id, call.attempt, 0, "own")
        replica.ask(version)
        replica.loaded(version)

    # -- replicas that leave

    async def remove(self, replica: Replica) -> None:
        """Drain one and stop it; during a step its samples go on elsewhere. Raises what kept it from doing so."""
        await self._leave(replica)

    def release(self, slot: int) -> bool:
        """Give a slot's devices back, in the background; a start is called off. Returns False, and does nothing, if
        no more than the fewest are there."""
        if self.expected <= self.bounds.fewest:
            return False
        self._call_off_timer(slot)
        replica = self.at(slot)
        if self._next.pop(slot, None) is not None:
            pass
        elif slot in self._starts:
            self._starts[slot].cancel()
        elif replica is not None:
            self._leave(replica)
        return True

    def _leave(self, replica: Replica) -> asyncio.Task[None]:
        """Let one go in the background. It gets no work from here on."""
        slot = self.slot_of(replica)
        replica.drain()
        if slot not in self._leaving:
            task = self._leaving[slot] = asyncio.create_task(self._hand_back_and_stop(replica))
            task.add_done_callback(lambda done: self._left(slot, replica, done))
        return self._leaving[slot]

    async def _hand_back_and_stop(self, replica: Replica) -> None:
        for listener in self._listeners:
            if not listener.over:
                await listener.drain(replica)
        await self.stop(replica)

    def _left(self, slot: int, replica: Replica, task: asyncio.Task[None]) -> None:
        del self._leaving[slot]
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            log.warning("%s did not leave in order: %s", replica.name, fault)
        call = self._next.pop(slot, None)
        if call is not None:
            self.start(slot, call)

    def _call_off_timer(self, slot: int) -> None:
        if (timer := self._timers.pop(slot, None)) is not None:
            timer.cancel()

    async def close(self) -> None:
        """Call off what is starting, and wait for what is leaving."""
        self._closed = True
        self._next.clear()
        for slot in list(self._timers):
            self._call_off_timer(slot)
        starts = list(self._starts.values())
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, *self._leaving.values(), return_exceptions=True)
