"""The generation stage: send samples to actors, and yield groups as they become complete.

The scaling policy assigns samples to actors (rlhfless.orchestrator.scaler); this module executes its decisions. To
migrate a sample, the stage aborts it on its actor, receives the tokens so far, and continues from them on another
actor. Draining, losing and adding an actor all use this migration. No token is generated twice, with two exceptions:
tokens that a dead actor had not delivered, and the last token before a migration, which is compared between the two
engines.

The samples themselves, with their tokens and journal rows, are `StageSamples`. A step that does not wait for all groups
(`Selection`) defers its unfinished samples: a later step continues from their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.generation.messages import (
    GenerateRequest,
    GenerationEvent,
    Progress,
    StreamEnd,
    replica_of,
)
from rlhfless.orchestrator.prompt_kv import Precomputation, PrefillActors
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.orchestrator.stage_samples import StageSamples
from rlhfless.records import Group, ReplicaState
from rlhfless.scaling.policy import UNASSIGNED, Answered, Event, Generated, Heartbeat, Ints, Lost, Serving
from rlhfless.scaling.selection import GroupGate
from rlhfless.spec import RunSpec
from rlhfless.util.clock import monotonic_s
from rlhfless.util.host import BusyCores
from rlhfless.util.tasks import gather_or_cancel

log = logging.getLogger(__name__)

NO_REQUEST = -1
"""The request of an answer of the environment."""


class GenerationStage:
    """Generates the samples of one request on the actors of a pool. A slot is the index of a pool allocation."""

    def __init__(
        self,
        pool: ReplicaPool,
        samples: StageSamples,
        spec: RunSpec,
        runner: PolicyRunner,
        at_work: Callable[[], None] = lambda: None,
        no_weights: Callable[[], str] = lambda: "",
        prefill: PrefillActors | None = None,
        environment: Callable[[], Awaitable[Sequence[Replica]]] | None = None,
        busy_cores: Callable[[], BusyCores] | None = BusyCores,
    ) -> None:
        """`at_work` is called at an engine's first message, when the engines are busy and the driver is idle.
        `no_weights` returns why a joining actor cannot load the step's weights, or "" if it can.
        `prefill`: see Precomputation. `environment` returns the environment's replicas, which hold the sessions of
        the samples; None without an environment. `busy_cores` measures the driver's machine; None in a
        simulation.
        """
        self._pool = pool
        self.samples = samples
        self.request = request = samples.request
        self._spec = spec
        self._runner = runner
        self._at_work = at_work
        self._no_weights = no_weights
        self._environment = environment
        self._gate = GroupGate(request.groups, request.selection.must_include if request.selection else ())
        self._from_earlier = self._admitted(samples.from_earlier)
        self._requests: list[Replica] = []
        """Actors by request number."""
        self._slots: list[int] = []
        """Slots of these actors."""
        self._streams: dict[asyncio.Task[None], Replica] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._answered: list[int] = []
        """Parked samples that have their answers, in the order of these."""
        self._aborting = np.zeros(len(samples.slot_of), np.bool_)
        self._precomputation = Precomputation(
            request, spec.timeouts.sync_s, prefill=prefill, in_flight=spec.schedule.in_flight
        )
        self._ahead: dict[int, asyncio.Task[None]] = {}
        """By request number: the task that fetches the KV of its prompts or prefixes."""
        self._lost: set[str] = set()
        self._lost_in_a_row = self._ended_before = 0
        """Actors that died or failed to start since the last sample ended, and how many samples had ended by then."""
        self._events: asyncio.Queue[_Message | Exception] = asyncio.Queue()
        self._begun = False
        """Whether the policy was asked about the step."""
        self._busy_cores = busy_cores
        self._busy: BusyCores | None = None
        self.host_busy_cores = 0.0 if busy_cores else None
        """Mean number of busy cores on the driver's machine during generation; None in a simulation."""
        self.over = False
        """Whether no sample is left, or the stage was cancelled."""

    @property
    def step(self) -> int:
        return self.request.call.step

    @property
    def has_all(self) -> bool:
        """Whether the step has all groups that it needs."""
        return not self._gate.left

    async def groups(self) -> AsyncIterator[Group]:
        """Yield groups as they complete. Raises an actor's error, JournalError, or ReplicaLost if no actor is left."""
        try:
            for group in self._from_earlier:
                yield group
            if not self.has_all:
                async with self._pool.turn(self.request.call):
                    async for group in self._generated():
                        yield group
            self.samples.learned(self._gate.admitted)
            self.over = True
            if self._busy is not None:
                self.host_busy_cores = self._busy.mean()
            # The policy takes time to update its estimates; here this overlaps with scoring the last groups.
            if self._begun:
                self._ask(Generated())
        finally:
            self.over = True
            await self._stop_streams()

    async def _generated(self) -> AsyncIterator[Group]:
        actors = sum(map(self._pool.expects, range(len(self._pool.allocations))))
        what = "step %d: %s: %d samples of %d prompts to generate on %d actors; %d of them resume with %d tokens"
        counts = len(self.samples.slot_of), len(self.request.prompts), actors, *self.samples.resumed
        log.info(what, self.step, self.request.work, *counts)
        self._begun = True
        self._runner.begin(self.samples)
        self._submit_waiting()
        self._calls.add(asyncio.create_task(self._beat()))
        heard = False
        while self._gate.left:
            for group in self._handle(await self._events.get()):
                yield group
            if not heard:
                heard = True
                self._at_work()
        self.over = True
        if not self.samples.complete:
            await self._defer()
        # Wait for the last event of each stream: it becomes the call's row in the ledger.
        await asyncio.gather(*self._streams)

    async def _defer(self) -> None:
        """Abort unfinished samples, and defer them to later steps. Raises CallTimeout, and as `groups`."""
        actors = tuple({actor.name: actor for actor in self._streams.values()}.values())
        if left := await self._abort_all(*actors):
            names = ", ".join(sorted({self._streams[task].name for task in left}))
            raise CallTimeout(f"{names} kept samples for longer than timeouts.drain_s after an abort")
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, Exception):
                raise event
            match event.event:
                case ReplicaLost() as lost:
                    name = self._requests[event.request].name
                    log.warning("%s died; its unfinished samples are regenerated: %s", name, lost)
                case Progress() | StreamEnd() | EnvironmentAnswered():
                    pass
                case finished:
                    self.samples.take(event.request, finished)
        log.info("step %d: %d started samples deferred to later steps", self.step, self.samples.defer())

    # -- actors that join and leave (rlhfless.fleet.pool)

    def joined(self, slot: int) -> None:
        """Assign work to the actor that has joined at a slot."""
        self._on_event(Serving(slot))

    def missed(self, slot: int) -> None:
        """Unassign the samples of a slot whose actor failed to start."""
        if self.samples.lose(slot).size:
            self._on_event(Lost(slot, self.samples.unassigned), f"no actor came up at slot {slot}")

    async def drain(self, actor: Replica) -> None:
        """Stop assigning samples to an actor, and migrate those it has."""
        actor.drain()
        log.info("step %d: %s drains", self.step, actor.name)
        slot = next(slot for slot, allocation in enumerate(self._pool.allocations) if allocation is actor.allocation)
        if self.samples.lose(slot).size:
            self._on_event(Lost(slot, self.samples.unassigned))
        await self._abort_all(actor)

    async def _abort_all(self, *actors: Replica) -> list[asyncio.Task[None]]:
        """Abort all samples on these actors; return the streams that are still open after `timeouts.drain_s`."""
        limit_s = monotonic_s() + self._spec.timeouts.drain_s
        while (streams := [task for task, of in self._streams.items() if of in actors]) and monotonic_s() < limit_s:
            # An abort may arrive before its request, so repeat it until all streams have ended.
            await gather_or_cancel(*(self._abort(actor, self.samples.on(self._requests_to(actor))) for actor in actors))
            await asyncio.wait(streams, timeout=self._spec.generation.progress_interval_s)
        return streams

    def _requests_to(self, actor: Replica) -> set[int]:
        return {number for number, of in enumerate(self._requests) if of is actor}

    # -- decisions

    def _on_event(self, event: Event, loss: str = "") -> None:
        """Handle an event from outside the stage. `loss`: why an actor died. Errors are raised by `groups`."""
        if not self._begun or self.over:
            return
        try:
            if loss:
                self._count_loss(loss)
            self._ask(event)
        except Exception as error:
            self._events.put_nowait(error)

    async def _beat(self) -> None:
        """Ask the policy once per interval, also while actors start or load weights."""
        while not self.over:
            await asyncio.sleep(self._spec.generation.progress_interval_s)
            self._on_event(Heartbeat())

    def _ask(self, event: Event) -> None:
        self._runner.ask(event, self.step)
        self._submit_waiting()
        self._abort_misplaced()

    def _submit_waiting(self) -> None:
        """Submit waiting samples to serving actors."""
        for slot, samples in self.samples.take_waiting(self._serves):
            self._submit(slot, samples)

    def _serves(self, slot: int) -> bool:
        actor = self._pool.at(slot)
        return actor is not None and actor.state is ReplicaState.SERVING

    def _submit(self, slot: int, samples: Ints) -> None:
        number, actor = len(self._requests), self._pool.at(slot)
        assert actor is not None, "an actor serves at the slot"
        assert actor.served is not None, "an actor that serves has weights"
        self._requests.append(actor)
        self._slots.append(slot)
        if self._busy is None and self._busy_cores is not None:
            self._busy = self._busy_cores()
        request = self.samples.submit(samples, number, actor.name, actor.served)
        task = asyncio.create_task(self._stream(actor, number, request))
        self._streams[task] = actor
        task.add_done_callback(self._streams.pop)

    def _abort_misplaced(self) -> None:
        """Abort samples that run on an actor other than that of their assigned slot."""
        strays: dict[str, dict[int, Ints]] = {}
        for request, samples in self.samples.strays(self._slot_now).items():
            if (new := samples[~self._aborting[samples]]).size:
                self._aborting[new] = True
                strays.setdefault(self._requests[request].name, {})[request] = new
        for name, on in strays.items():
            task = asyncio.create_task(self._call_back(self._pool[name], on))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def _slot_now(self, request: int) -> int:
        """Return the slot of a request; UNASSIGNED if its actor is gone."""
        slot = self._slots[request]
        return slot if self._pool.at(slot) is self._requests[request] else UNASSIGNED

    async def _call_back(self, actor: Replica, on: Mapping[int, Ints]) -> None:
        try:
            await self._abort(actor, on)
        except Exception as error:
            self._events.put_nowait(error)
        finally:
            for samples in on.values():
                self._aborting[samples] = False

    async def _abort(self, actor: Replica, on: Mapping[int, Ints]) -> None:
        """Abort the samples `on` requests to an actor, by request."""
        for request in on.keys() & self._ahead.keys():
            self._ahead[request].cancel()
        names = [name for samples in on.values() for name in self.samples.names(samples)]
        with contextlib.suppress(ReplicaLost):  # its streams raise that too
            await actor.call(
                "abort", self.request.call, names, timeout_s=self._spec.timeouts.sync_s, waiting_for="an abort"
            )

    # -- messages of the actors

    async def _stream(self, actor: Replica, number: int, request: GenerateRequest) -> None:
        try:
            if self._environment is None:
                await self._prepare(actor, number, request)
            else:
                replicas = await self._environment()
                request = replace(request, environments=tuple(replica.name for replica in replicas))
            events = actor.stream(
                self.request.work, "generate", self.request.call, request, timeout_s=self._spec.recovery.heartbeat_s
            )
            async for event in events:
                self.receive(number, event)
        except ReplicaLost as lost:
            self.receive(number, lost)
        except Exception as error:
            self._events.put_nowait(error)

    async def _prepare(self, actor: Replica, number: int, request: GenerateRequest) -> None:
        """Give the actor the KV of the prompts or shared prefixes; an abort cancels the wait."""
        ahead = asyncio.create_task(self._precomputation.before(actor, request))
        self._ahead[number] = ahead
        try:
            await asyncio.wait([ahead])
        finally:
            ahead.cancel()
            del self._ahead[number]
        if not ahead.cancelled():
            ahead.result()

    def receive(self, request: int, event: GenerationEvent | ReplicaLost) -> None:
        """Queue a message of a request's stream, or the error that ended the stream."""
        self._events.put_nowait(_Message(request, event))

    def _handle(self, event: _Message | Exception) -> Iterable[Group]:
        if isinstance(event, Exception):
            raise event
        match event.event:
            case EnvironmentAnswered():
                answered, self._answered = np.array(self._answered, np.int64), []
                samples, slots = self.samples.answered(answered)
                if samples.size:
                    self._ask(Answered(samples, slots))
            case ReplicaLost() as lost:
                self._lose(event.request, lost)
            case Progress() as progress:
                self.samples.take(event.request, progress)
            case StreamEnd():
                pass
            case finished:
                complete = self.samples.take(event.request, finished)
                self._await_answers()
                self._submit_waiting()
                yield from self._admitted(complete)

    # -- samples that wait for their environment, without an actor

    def _await_answers(self) -> None:
        for sample in self.samples.take_parked():
            task = asyncio.create_task(self._await_answer(sample))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _await_answer(self, sample: int) -> None:
        """Wait for the answer to a sample, or for the loss of its session: an actor then does what can be done."""
        assert self._environment is not None, "only an environment lets samples wait"
        try:
            key = self.samples.session(sample)
            replica = replica_of(await self._environment(), key)
            limit_s = self._spec.timeouts.generate_s
            with contextlib.suppress(ReplicaLost):
                await replica.call(
                    "answered", self.request.call, key, timeout_s=limit_s, waiting_for="an answer of the environment"
                )
            self._answered.append(sample)
            if len(self._answered) == 1:  # samples that are answered at once continue in one request
                self._events.put_nowait(_Message(NO_REQUEST, EnvironmentAnswered()))
        except Exception as error:
            self._events.put_nowait(error)

    def _admitted(self, complete: Iterable[Group]) -> list[Group]:
        """Return the groups that the step learns from, of those that have become complete."""
        return [group for group in complete if self._gate.admits(group.prompt.prompt_id)]

    def _lose(self, request: int, error: ReplicaLost) -> None:
        """Requeue the samples of a request whose actor died. The actor's first one also reports the slot as Lost."""
        actor, slot = self._requests[request], self._slots[request]
        gone = self.samples.restart_lost(request)
        if first := actor.name not in self._lost:
            self._lost.add(actor.name)
            self.samples.lose(slot)
        what = "step %d: %s died; %d samples restart on other actors: %s"
        log.warning(what, self.step, actor.name, gone.size, error)
        if first:
            self._count_loss(str(error))
        if first or self.samples.unassigned.size:
            self._ask(Lost(slot, self.samples.unassigned))
        else:
            self._submit_waiting()

    def _count_loss(self, why: str) -> None:
        """Count a lost actor. Raises ReplicaLost after too many in a row, or if no actor is left and none can join."""
        if self.samples.ended > self._ended_before:
            self._lost_in_a_row, self._ended_before = 0, self.samples.ended
        self._lost_in_a_row += 1
        if not self._pool.serving() and (reason := self._no_weights()):
            raise ReplicaLost(f"no actor is left, and none can load the weights: {reason} ({why})")
        if self._lost_in_a_row > len(self._pool.allocations) * (self._spec.recovery.per_step + 1):
            raise ReplicaLost(f"{self._lost_in_a_row} actors were lost before a single sample ended: {why}")

    async def _stop_streams(self) -> None:
        tasks = [*self._streams, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class EnvironmentAnswered:
    """The environment has answered samples that were parked."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a request's stream, the error that ended the stream, or answers of the environment."""

    request: int
    event: GenerationEvent | ReplicaLost | EnvironmentAnswered
