"""The elastic pool of one function: N >= 0 replicas that join and leave in the background, within bounds.

A step waits for a start only if it needs the replica (`ready`), or if no other samples are left to generate. A replica
that is up must be *opened* before it serves; each function defines how (`opens`), such as by loading the step's
weights. A leaving replica gets no new work, hands back the work it has, and is then stopped. A static fleet is a pool
that never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rlhfless.fleet.protocols import FleetError
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.fleet.replicas import Replicas
from rlhfless.functions.calls import Call
from rlhfless.records import FunctionRole, ReplicaState, SleepTier, WeightVersion
from rlhfless.scaling.function_specs import Bounds
from rlhfless.util.clock import unix_s
from rlhfless.util.tasks import gather_or_cancel

log = logging.getLogger(__name__)

RECOVERABLE = (ReplicaLost, CallTimeout, FleetError)
"""Faults of a machine or a process. A retry cannot fix wrong weights, bad rewards or full disks."""

EXPECTED = (ReplicaState.STARTING, ReplicaState.STALE, ReplicaState.SERVING)
"""States of a replica that serves or will serve."""

Opens = Callable[[Replica, Call], Awaitable[None]]
Turn = Callable[[Call], AbstractAsyncContextManager[None]]


class Listener(Protocol):
    """Work in progress on a pool that is notified when replicas join and leave."""

    @property
    def over(self) -> bool: ...

    def joined(self, slot: int) -> None:
        """Handle a replica that now serves at a slot."""

    def missed(self, slot: int) -> None:
        """Handle a slot whose expected replica failed to start."""

    async def drain(self, replica: Replica) -> None:
        """Make a replica hand back its work, and wait until it has."""


class ReplicaPool(Replicas):
    """The replicas of one function. A slot is the index of an allocation, and has at most one replica at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.opens: Opens = self._open_own
        """Opens a replica that is up, so that it serves."""
        self.wakes: Opens = self._wake_own
        """Wakes and opens a sleeping replica, so that it serves."""
        self.tier: Callable[[], SleepTier] = lambda: SleepTier.HOST
        """The tier in which its replicas sleep between turns."""
        self.turn: Turn = lambda _: contextlib.nullcontext()
        """`async with pool.turn(call)`: within the block, this function owns the memory of its devices
        (rlhfless.fleet.turns). By default it always does."""
        self.fatal: BaseException | None = None
        """A fault of a background start that a retry cannot fix, such as wrong weights."""
        self._listeners: list[Listener] = []
        self._closed = False
        self._starts: dict[int, asyncio.Task[Replica]] = {}
        self._opening: set[str] = set()
        self._leaving_nodes: frozenset[str] = frozenset()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._next: dict[int, Call] = {}
        """Slots that get a new replica as soon as their leaving replica has stopped."""

    @property
    def bounds(self) -> Bounds:
        return self._blueprint.bounds

    def watch(self, listener: Listener) -> None:
        """Notify a listener of replicas that join and leave, until it is `over`."""
        self._listeners = [known for known in self._listeners if not known.over] + [listener]

    def state(self, slot: int) -> ReplicaState | None:
        """Return the state of the replica at a slot; None if there is none, or if it is leaving, so that a new one may
        be requested."""
        replica = self.at(slot)
        if replica is not None and (state := replica.state) is not ReplicaState.DRAINING:
            # A sleeping replica serves when its turn comes; until then its weights count as stale.
            return ReplicaState.STALE if state is ReplicaState.SLEEPING else state
        return ReplicaState.STARTING if slot in self._starts or slot in self._next else None

    def expects(self, slot: int) -> bool:
        """Return whether a replica serves or will serve at a slot."""
        return self.state(slot) in EXPECTED

    @property
    def expected(self) -> int:
        """Number of replicas that serve or will serve."""
        return sum(self.expects(slot) for slot in range(len(self.allocations)))

    def up(self) -> tuple[Replica, ...]:
        """Return the replicas that are up and awake, and are not being opened: those that can load weights."""
        alive = (ReplicaState.STALE, ReplicaState.SERVING)
        return tuple(r for r in self.replicas() if r.state in alive and r.name not in self._opening)

    def settled(self) -> tuple[Replica, ...]:
        """Return the replicas that are up, awake or asleep, and are not being opened."""
        asleep = tuple(r for r in self.replicas() if r.state is ReplicaState.SLEEPING)
        return self.up() + asleep

    # -- replicas that join

    async def ready(self, call: Call, slot: int = 0) -> Replica:
        """Return the replica of a slot once it serves; start it if there is none. A planned start is replaced
        by one now, and a release in progress is awaited first. Raises the error of the start."""
        while True:
            self._call_off_timer(slot)
            replica = self.at(slot)
            if replica is not None and replica.state is ReplicaState.SERVING:
                return replica
            if replica is not None and replica.state is ReplicaState.SLEEPING:
                async with self.turn(call):
                    continue
            if slot in self._leaving:
                await asyncio.wait([self._leaving[slot]])
            elif slot in self._starts:
                await self._wait_for_start(self._starts[slot])
            elif replica is not None:
                async with self.turn(call):
                    if replica.state is not ReplicaState.SERVING:  # it was opened when it woke for this turn
                        await self.opens(replica, call)
            elif self._closed:
                raise FleetError(f"the run is being stopped, and {self.function} is not started any more")
            else:
                self.start(slot, call)

    @staticmethod
    async def _wait_for_start(start: asyncio.Task[Replica]) -> None:
        """Wait for a start. Raises its fault, unless the start was cancelled."""
        await asyncio.wait([start])
        if not start.cancelled():
            start.result()

    async def fill(self, count: int) -> None:
        """Start replicas at the first free slots until there are `count`, in parallel, without opening them."""
        slots = self._free()[: max(count - len(self.replicas()), 0)]
        async with self._reserved(slots), self.turn(self._call):
            await gather_or_cancel(*map(self.start_one, slots))

    def _reserved(self, slots: Sequence[int]) -> AbstractAsyncContextManager[None]:
        allocations = [self.allocations[slot] for slot in slots]
        return self._devices.reserved(allocations, f"{self.function} {' '.join(map(str, slots))}")

    def _free(self) -> list[int]:
        return [slot for slot in range(len(self.allocations)) if self.at(slot) is None]

    async def add(self, call: Call, slot: int | None = None) -> Replica:
        """Start one more replica at `slot`, or at the first free slot, and wait until it serves."""
        slot = next(iter(self._free()), 0) if slot is None else slot
        async with self._reserved([slot]), self.turn(call):
            return await self._add(call, slot)

    async def _add(self, call: Call, slot: int) -> Replica:
        replica = await self.start_one(slot)
        self._opening.add(replica.name)
        try:
            await self.opens(replica, call)
        except BaseException:
            await self._call_off(replica)
            raise
        finally:
            self._opening.discard(replica.name)
        self.notify_joined(replica)
        return replica

    def notify_joined(self, replica: Replica) -> None:
        for listener in self._listeners:
            listener.joined(self.slot_of(replica))

    def notify_missed(self, slot: int) -> None:
        for listener in self._listeners:
            listener.missed(slot)

    def start(self, slot: int, call: Call, at_s: float | None = None) -> None:
        """Start a replica at a slot in the background, not before `at_s` (unix time), nor before a replica leaving the
        slot has stopped. Replaces a planned start of the slot; without `at_s` it starts now."""
        self._call_off_timer(slot)
        wait_s = 0.0 if at_s is None else at_s - unix_s()
        if wait_s > 0:
            self._timers[slot] = asyncio.get_running_loop().call_later(wait_s, self.start, slot, call)
        elif slot in self._leaving:
            self._next[slot] = call
        elif self.state(slot) is None and not self._closed:
            task = self._starts[slot] = asyncio.create_task(self.add(call, slot))
            task.add_done_callback(lambda done: self._on_started(slot, done))

    def _on_started(self, slot: int, task: asyncio.Task[Replica]) -> None:
        del self._starts[slot]
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, RECOVERABLE):
            what = "%s replica at slot %d did not start; the slot stays empty for now: %s"
            log.warning(what, self.function, slot, failure)
        elif failure is not None:
            self.fatal = failure
        if not self.expects(slot):
            self.notify_missed(slot)

    def replace_missing(self, call: Call) -> None:
        """Start replicas in the background until there are `bounds.fewest`."""
        free = [slot for slot in range(len(self.allocations)) if self.state(slot) is None]
        for slot in free[: max(self.bounds.fewest - self.expected, 0)]:
            self.start(slot, call)

    async def wait_any_up(self) -> None:
        """Wait until a replica is up or no start is left. Raises the last start's error if all have failed."""
        while self._starts and not self.up():
            done, _ = await asyncio.wait(self._starts.values(), return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in done if not task.cancelled()]
            if failures and failures[-1] is not None and not self._starts and not self.up():
                raise failures[-1]

    async def _open_own(self, replica: Replica, call: Call) -> None:
        """Open a replica of a function that loads no published weights (scoring, reference, learner)."""
        version = WeightVersion(call.run_id, call.attempt, 0, "own")
        replica.ask(version)
        replica.mark_loaded(version)

    # -- sleep and wake, called by Turns

    async def fall_asleep(self, call: Call) -> None:
        """Put all replicas to sleep, and wait for those that leave. Replicas that are lost or fail to offload are
        killed, because they may hold memory that the next function needs."""

        async def put_to_sleep(replica: Replica) -> None:
            try:
                await replica.sleep(call, self.tier(), self._timeouts.sync_s)
            except Exception as fault:
                log.warning("%s did not offload; killing it: %s", replica.name, fault)
                replica.give_up(str(fault))
                replica.lost = True  # it was DRAINING, which counts as leaving, but it was still needed
                await self._call_off(replica)

        if self._leaving:
            await asyncio.wait(self._leaving.values())
        await self.remove_dead()
        await gather_or_cancel(*(put_to_sleep(replica) for replica in self.replicas()))

    async def wake_up(self, call: Call) -> None:
        """Wake all sleeping replicas. The loss of a replica is only logged; the next call to it detects it."""

        async def wake(replica: Replica) -> None:
            try:
                await self.wakes(replica, call)
            except ReplicaLost as lost:
                log.warning("%s was lost during wake-up: %s", replica.name, lost)

        asleep = [replica for replica in self.replicas() if replica.state is ReplicaState.SLEEPING]
        await gather_or_cancel(*map(wake, asleep))

    async def _wake_own(self, replica: Replica, call: Call) -> None:
        """Wake a replica of a function that loads no published weights."""
        await replica.wake(call, self._timeouts.sync_s)
        await self._open_own(replica, call)

    # -- replicas that leave

    async def remove(self, replica: Replica) -> None:
        """Drain and stop a replica; during a step, its samples migrate. Raises the fault that prevented it."""
        await self._leave(replica)

    def release(self, slot: int) -> bool:
        """Release a slot's devices in the background, and cancel a start there. Return False, and do nothing, if the
        pool has no more than `bounds.fewest` replicas."""
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

    def leave_nodes(self, nodes: frozenset[str], call: Call) -> None:
        """Make replicas leave these nodes: actors migrate their samples, helpers leave between calls. Replicas needed
        for `bounds.fewest` restart elsewhere. The learner has the state of the run, and stays (see `must_move`)."""
        self._leaving_nodes = nodes
        role = self.kind.role
        if not nodes or role is FunctionRole.UPDATES or self._closed:
            return
        for replica in self.settled():
            if self._is_on(replica, nodes) and (role is FunctionRole.SAMPLES or not replica.working):
                slot = self.slot_of(replica)
                log.info("%s leaves its node, which is being drained", replica.name)
                if self.expected <= self.bounds.fewest:
                    self._next[slot] = call
                self._leave(replica)

    @property
    def must_move(self) -> bool:
        """Whether a replica is on a node that is leaving the cluster."""
        return any(self._is_on(replica, self._leaving_nodes) for replica in self.settled())

    def _is_on(self, replica: Replica, nodes: frozenset[str]) -> bool:
        bound = self._devices.bound(replica.allocation)
        return bound is not None and any(device.node in nodes for device in bound.devices)

    def _leave(self, replica: Replica) -> asyncio.Task[None]:
        """Drain and stop a replica in the background."""
        slot = self.slot_of(replica)
        replica.drain()
        if slot not in self._leaving:
            task = self._leaving[slot] = asyncio.create_task(self._hand_back_and_stop(replica))
            task.add_done_callback(lambda done: self._on_left(slot, replica, done))
        return self._leaving[slot]

    async def _hand_back_and_stop(self, replica: Replica) -> None:
        """Stop a replica after it has handed back its work, or, for functions that cannot, after its call. If that
        fails, its work counts as lost: otherwise the replica would hold its devices, and its slot, until the run
        ends."""
        try:
            if self.kind.role is not FunctionRole.SAMPLES:
                await replica.wait_idle()
            for listener in self._listeners:
                if not listener.over:
                    await listener.drain(replica)
        except Exception as fault:
            log.warning("%s did not hand back its work, and is stopped: %s", replica.name, fault)
        await self.stop(replica)

    def _on_left(self, slot: int, replica: Replica, task: asyncio.Task[None]) -> None:
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
        """Cancel all starts, and wait for the replicas that are leaving."""
        self._closed = True
        self._next.clear()
        for slot in list(self._timers):
            self._call_off_timer(slot)
        starts = list(self._starts.values())
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, *self._leaving.values(), return_exceptions=True)
