"""The driver's view of a replica: its life cycle, its handle, and calls with timeouts that the ledger records."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from rlhfless.fleet.handles import Handle, HandleLost
from rlhfless.functions.calls import Call, CallUsage, FunctionBroken, ReplicaInfo, Reply, SharedNow
from rlhfless.records import (
    KV_CAPACITY,
    START,
    TRANSPORT,
    Decision,
    Holding,
    Invocation,
    ReplicaState,
    SleepTier,
    Slept,
    StartPhase,
    WeightVersion,
    Work,
)
from rlhfless.scaling.lifecycle import Lifecycle, ReplicaIdentity
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import Transport
from rlhfless.util.clock import unix_s
from rlhfless.util.stacks import all_stacks
from rlhfless.util.tasks import to_the_end

log = logging.getLogger(__name__)

T = TypeVar("T")

USAGE = tuple(field.name for field in fields(CallUsage))


METERED_S = 5.0
"""Interval at which the use of a shared replica is recorded between its calls."""


class Recorder(Protocol):
    def add_holding(self, holding: Holding) -> None: ...

    def add_invocation(self, invocation: Invocation) -> None: ...

    def add_decision(self, decision: Decision) -> None: ...


class ReplicaLost(RuntimeError):
    """A replica died or restarted as another incarnation, and has lost its state."""


class CallTimeout(RuntimeError):
    """A call did not return in time. The message names the awaited result, the replica and the timeout."""


class _Meter:
    """What a run pays of a replica that it shares: its part of the replica's time, in place of the whole time."""

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s
        """Seconds that the run had used of the replica when it was last asked."""
        self.part = 0.0
        """The run's part of the time between the last two times."""
        self.pending: tuple[Holding, ...] = ()
        """Holdings since then."""

    @property
    def pending_s(self) -> float:
        return sum({(each.start_s, each.end_s): each.duration_s for each in self.pending}.values())

    def read(self, used_s: float) -> list[Holding]:
        """Return the holdings since the last time, with the run's part of them as their share."""
        whole_s = self.pending_s
        if not whole_s:
            return []
        self.part = min(max(used_s - self.used_s, 0.0) / whole_s, 1.0)
        self.used_s += self.part * whole_s  # what exceeds the time, as clocks may differ, is paid next time
        done, self.pending = self.pending, ()
        return [replace(each, share=each.share * self.part) for each in done]


class Replica:
    """One incarnation of a function's replica, from deployment to retirement."""

    def __init__(
        self,
        name: str,
        function: str,
        allocation: Allocation,
        recorder: Recorder,
    ) -> None:
        self.name = name
        self.function = function
        self.allocation = allocation
        self.info: ReplicaInfo | None = None
        self.lost = False
        """Whether the replica was given up while it was still needed."""
        self.shared: SharedNow | None = None
        """The state of a replica that several runs share, as it last told."""
        self._recorder = recorder
        self._meter: _Meter | None = None
        self._launched_s = unix_s()
        self._start_s: float | None = None
        """Seconds from launch until the replica was up; None if an earlier driver started it, or once recorded."""
        self._waits = False
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._transport: Transport | None = None
        self._handle: Handle | None = None
        self._life: Lifecycle | None = None
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def state(self) -> ReplicaState:
        return ReplicaState.STARTING if self._life is None else self._life.state

    @property
    def incarnation(self) -> str:
        return "" if self._life is None else self._life.identity.incarnation

    @property
    def working(self) -> bool:
        """Whether a call that the ledger records is in progress."""
        return self._working > 0

    @property
    def learned_step(self) -> int:
        """The last step that a learner has learned, as it last reported."""
        return 0 if self.info is None else self.info.step

    @property
    def since_s(self) -> float:
        """Unix time at which it entered its current state."""
        return self._launched_s if self._life is None else self._life.since_s

    @property
    def served(self) -> str | None:
        """Label of the weights that it serves; None if it serves none."""
        asked = None if self._life is None or self.state is not ReplicaState.SERVING else self._life.asked
        return None if asked is None else asked.label

    @property
    def open_device_s(self) -> dict[str, float]:
        """Device-seconds since the last recorded holding, by device kind, for the run's cost so far."""
        since_s = self._launched_s if self._life is None else self._life.since_s
        if self._waits or not self.state.holds_device:
            return {}
        lasted_s = unix_s() - since_s
        if self._meter is not None:
            lasted_s = (lasted_s + self._meter.pending_s) * self._meter.part
        held_s: dict[str, float] = {}
        for device, share in self.allocation.billed(self.state):
            held_s[device.kind] = held_s.get(device.kind, 0.0) + lasted_s * share
        return held_s

    # -- life cycle: every change of state closes holdings, which the ledger records

    def mark_waiting(self) -> None:
        """Start the wait for devices. The state is STARTING, and nothing is billed yet."""
        self._waits = True

    def mark_devices_acquired(self) -> None:
        """End the wait for devices. They are billed from here on."""
        self._waits, self._launched_s = False, unix_s()

    def check_kept(self) -> None:
        """Raise ReplicaLost if the replica was given up, such as when its devices were lost during its start."""
        if self._given_up.done():
            raise ReplicaLost(self._given_up.result())

    def mark_up(self, handle: Handle, info: ReplicaInfo) -> None:
        """STARTING -> STALE. The incarnation is known from then on."""
        self._handle, self.info = handle, info
        self._life = Lifecycle(self._identity(info.incarnation), self._launched_s)
        now_s = unix_s()
        self._start_s = now_s - self._launched_s
        started = self._life.started(now_s)
        if info.metered_s is not None:
            self._meter = _Meter(info.metered_s)
            started = tuple(replace(each, share=0.0) for each in started)  # a start is the fleet's
        for holding in started:
            self._recorder.add_holding(holding)

    def record_start(self, call: Call) -> bool:
        """Record the seconds of each phase of an engine's start, once; return False if recorded before, or unknown."""
        if self._start_s is None or self.info is None:
            return False
        engine = self.info.start_seconds
        if self._meter is not None and self._start_s < sum(engine.values()):
            self._start_s = None  # it has joined an engine that another run had started
            return False
        phases = {StartPhase.REPLICA: max(self._start_s - sum(engine.values()), 0.0), **engine}
        self._start_s = None
        inputs: dict[str, float | int | str | bool] = {f"{phase}_s": seconds for phase, seconds in phases.items()}
        if self.info.kv_capacity_tokens:
            inputs[KV_CAPACITY] = self.info.kv_capacity_tokens
        self._recorder.add_decision(Decision(call.step, self._launched_s, START, self.name, inputs))
        return True

    def record_transport(self, call: Call, transport: Transport | None) -> None:
        """Record the transport of its weights, if it has changed and is not None."""
        if transport in (None, self._transport):
            return
        self._transport = transport
        log.info("%s loads weights by %s", self.name, transport)
        self._recorder.add_decision(Decision(call.step, unix_s(), TRANSPORT, self.name, {"transport": transport}))

    def mark_adopted(self, handle: Handle, info: ReplicaInfo, since_s: float | None) -> None:
        """Adopt a replica of an earlier attempt as STALE. It is billed since `since_s`, the end of its last recorded
        holding; None bills it from here on."""
        self._handle, self.info = handle, info
        began_s = unix_s() if since_s is None else since_s
        self._life = Lifecycle(self._identity(info.incarnation), began_s, ReplicaState.STALE)
        self._meter = None if info.metered_s is None else _Meter(info.metered_s)

    def ask(self, version: WeightVersion) -> None:
        """Request a version of the weights: the replica becomes STALE unless that version is loaded."""
        self._record(self._alive.ask(version, unix_s()))

    def mark_loaded(self, version: WeightVersion) -> None:
        """STALE -> SERVING."""
        self._record(self._alive.loaded(version, unix_s()))

    def drain(self) -> None:
        """Take no new work from here on. Idempotent."""
        if self.state in (ReplicaState.STALE, ReplicaState.SERVING):
            self._record(self._alive.drain(unix_s()))

    async def sleep(self, call: Call, tier: SleepTier, timeout_s: float) -> None:
        """SERVING or STALE -> SLEEPING, which frees the memory of its devices. No call may be in progress. Idempotent.
        Goes on if it is cancelled, because the replica is then neither awake nor asleep. Raises as `call`."""
        if self.state in (ReplicaState.STALE, ReplicaState.SERVING):
            await to_the_end(self._sleep(call, tier, timeout_s))

    async def _sleep(self, call: Call, tier: SleepTier, timeout_s: float) -> None:
        self.drain()
        waiting_for = "its memory, which another function needs"
        slept: Slept = await self.call(
            "sleep", call, tier, timeout_s=timeout_s, waiting_for=waiting_for, work=Work.SLEEP
        )
        log.debug("%s offloaded to %s: freed %d bytes", self.name, slept.tier, slept.freed_bytes)
        if self.state is ReplicaState.DRAINING:  # otherwise it was given up meanwhile
            self._record(self._alive.sleep(unix_s()))

    async def wake(self, call: Call, timeout_s: float) -> None:
        """SLEEPING -> STALE; the function keeps its state. Idempotent. Goes on if it is cancelled, as `sleep`. Raises
        ReplicaLost, also if the replica does not answer in time: it may then have the memory, or not."""
        if self.state is ReplicaState.SLEEPING:
            await to_the_end(self._wake(call, timeout_s))
        self.check_kept()  # it may have been given up as it answered

    async def _wake(self, call: Call, timeout_s: float) -> None:
        self.mark_waking()
        try:
            await self.call("wake", call, timeout_s=timeout_s, waiting_for="its memory", work=Work.WAKE)
        except CallTimeout as silence:
            self.give_up(str(silence))
            self.check_kept()
        self.mark_awake()

    def mark_waking(self) -> None:
        """SLEEPING -> STARTING."""
        self._record(self._alive.wake(unix_s()))

    def mark_awake(self) -> None:
        """STARTING -> STALE."""
        if self.state is ReplicaState.STARTING:
            self._record(self._alive.started(unix_s()))

    def mark_ended(self) -> None:
        """Record that the process has ended: RETIRED if it was starting, draining or asleep, else DEAD. Idempotent."""
        if self._life is None:
            began_s = unix_s() if self._waits else self._launched_s
            self._life = Lifecycle(self._identity(f"{self.name}-never-up"), began_s)
            self._waits = False
        now_s = unix_s()
        if self.state in (ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.SLEEPING):
            self._record(self._life.retire(now_s))
        elif self.state.holds_device:
            self._record(self._life.suspect(now_s))
            self._record(self._life.died(now_s))
        if self._meter is not None:
            self._add_metered(self._meter.used_s)

    def give_up(self, reason: str) -> None:
        """Treat the replica as lost: pending calls raise ReplicaLost. Idempotent."""
        if not self._given_up.done():
            self.lost = self.state is not ReplicaState.DRAINING
            self._given_up.set_result(f"{self.name} (incarnation {self.incarnation}) was given up: {reason}")
        self.mark_ended()

    def cut(self) -> None:
        """Record the holding so far, so that the ledger loses little if the driver dies."""
        if self._life is not None:
            self._record(self._life.cut(unix_s()))

    @property
    def _alive(self) -> Lifecycle:
        if self._life is None:
            raise RuntimeError(f"{self.name} is not up yet")
        return self._life

    def _identity(self, incarnation: str) -> ReplicaIdentity:
        return ReplicaIdentity(self.function, self.name, incarnation, self.allocation)

    def _record(self, holdings: tuple[Holding, ...]) -> None:
        if self._meter is not None:
            self._meter.pending += holdings
            return
        for holding in holdings:
            self._recorder.add_holding(holding)

    def _add_metered(self, used_s: float) -> None:
        """Record what the run has used of a shared replica since the last time."""
        assert self._meter is not None, "the replica is shared"
        if self._life is not None:
            self._meter.pending += self._life.cut(unix_s())
        for holding in self._meter.read(used_s):
            self._recorder.add_holding(holding)

    # -- calls

    async def call(
        self,
        method: str,
        call: Call,
        *arguments: object,
        timeout_s: float,
        waiting_for: str,
        work: Work | None = None,
        sent: asyncio.Event | None = None,
        **keywords: object,
    ) -> Any:
        """Call a method and return its value; with `work`, record the call in the ledger. `sent` is set as soon as the
        call has left this process. Raises CallTimeout, ReplicaLost, or the method's own error."""
        answer = self._up.call(method, call, *arguments, **keywords)
        with self._faults(waiting_for), self._at_work(work):
            try:
                if sent is not None:
                    await self._answer(answer.sent(), timeout_s)
                    sent.set()
                reply: Reply[Any] = await self._answer(answer, timeout_s)
            except TimeoutError:
                await self._log_stacks(waiting_for)
                raise CallTimeout(f"waited {timeout_s:.0f} s for {waiting_for} on {self.name}") from None
        self._accept(reply, call, work)
        return reply.value

    async def stream(
        self, work: Work, method: str, call: Call, *arguments: object, timeout_s: float
    ) -> AsyncIterator[Any]:
        """Call a streaming method and yield its events until the StreamEnd, which is recorded in the ledger. Raises the
        method's own error, or ReplicaLost, also if no event arrives for `timeout_s`: a working replica sends
        heartbeats."""
        events = self._up.stream(method, call, *arguments)
        with self._faults(method):
            while True:
                try:
                    event = await self._answer(anext(events), timeout_s)
                except TimeoutError:
                    await self._log_stacks(f"a heartbeat of {method}")
                    self.give_up(f"no heartbeat came from {method} for {timeout_s:.0f} s")
                    raise ReplicaLost(self._given_up.result()) from None
                except StopAsyncIteration:
                    raise self._lost(f"{method}: its stream broke off") from None
                reply = getattr(event, "reply", None)
                if reply is not None:
                    self._accept(reply, call, work)
                    return
                self._check_incarnation(event.incarnation)
                yield event

    @property
    def _up(self) -> Handle:
        if self._handle is None:
            raise RuntimeError(f"{self.name} is not up yet")
        return self._handle

    async def _answer(self, response: Awaitable[T], timeout_s: float) -> T:
        """Await the response. Raises TimeoutError, or ReplicaLost as soon as the replica is given up."""
        task = asyncio.ensure_future(response)
        try:
            either: list[asyncio.Future[Any]] = [task, self._given_up]
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._given_up.done():
                raise ReplicaLost(self._given_up.result())
            raise TimeoutError
        finally:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody awaits it any more

    async def _log_stacks(self, waiting_for: str) -> None:
        """Log what the processes of a replica on this machine do, before it is given up."""
        if self.info is None or self.info.host != platform.node():
            return
        stacks = await all_stacks([self.info.pid, *self.info.pids])
        log.warning("%s: waited too long for %s; its stacks:\n%s", self.name, waiting_for, stacks)

    async def wait_idle(self) -> None:
        """Wait until no call that the ledger records is in progress. Every call has a timeout."""
        await self._idle.wait()

    @contextmanager
    def _at_work(self, work: Work | None) -> Iterator[None]:
        if work is None:
            yield
            return
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    @contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        """Translate a lost handle or a broken function into ReplicaLost."""
        try:
            yield
        except FunctionBroken as broken:
            raise self._lost(f"{doing}: {broken}") from broken
        except HandleLost as error:
            raise self._lost(doing) from error

    def _accept(self, reply: Reply[Any], call: Call, work: Work | None) -> None:
        self._check_incarnation(reply.incarnation)
        if self._meter is not None and reply.metered_s is not None:
            held_s = unix_s() - self.since_s + self._meter.pending_s
            if work is not None or held_s > METERED_S or self.state is ReplicaState.DRAINING:
                self._add_metered(reply.metered_s)
        if work is None:
            return
        self._recorder.add_invocation(
            Invocation(
                function=self.function,
                replica=self.name,
                incarnation=reply.incarnation,
                work=work,
                step=call.step,
                start_s=reply.start_s,
                end_s=reply.end_s,
                **{name: getattr(reply.usage, name) for name in USAGE},
            )
        )

    def _check_incarnation(self, incarnation: str) -> None:
        """Reject answers of a replica that Serve has restarted under a dead replica's name."""
        if self._life is not None and incarnation != self.incarnation:
            reason = f"it answers as incarnation {incarnation}: it was restarted and has lost its state"
            self.give_up(reason)
            raise ReplicaLost(self._given_up.result())

    def _lost(self, doing: str) -> ReplicaLost:
        lost = ReplicaLost(f"{self.name} (incarnation {self.incarnation}) was lost during {doing}")
        self.give_up(str(lost))
        return lost
