"""The generation stage: send samples to actors, and yield groups as they become complete.

The scaling policy assigns samples to actors (rlhfless.orchestrator.scaler); this module executes its decisions. To
migrate a sample, the stage aborts it on its actor, receives the tokens so far, and continues from them on another
actor. Draining, losing and adding an actor all use this migration. No token is generated twice, with two exceptions:
tokens that a dead actor had not delivered, and the last token before a migration, which is compared between the two
engines. Finished samples are journaled before they count, and journaled samples are not generated again.

A step that does not wait for all groups (`Selection`) defers its unfinished samples: the journal keeps their tokens,
and a later step continues from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.generation.messages import (
    GenerateRequest,
    GenerationEvent,
    GroupsFinished,
    Progress,
    SampleItem,
    SampleKey,
)
from rlhfless.orchestrator.in_flight_samples import InFlightSamples, RolloutRequest, StageJournal
from rlhfless.orchestrator.prompt_kv import Precomputation, PrefillActors
from rlhfless.orchestrator.prompt_selection import PromptHistory
from rlhfless.orchestrator.scaler import PolicyRunner
from rlhfless.records import FinishReason, Group, ReplicaState, Rollout
from rlhfless.records.journal import Journal
from rlhfless.scaling.assignment import pieces
from rlhfless.scaling.policy import UNASSIGNED, Event, Generated, Heartbeat, Lost, Serving
from rlhfless.scaling.selection import GroupGate
from rlhfless.spec import RunSpec
from rlhfless.util.clock import monotonic_s
from rlhfless.util.host import BusyCores

log = logging.getLogger(__name__)


class GenerationStage:
    """Generates the samples of one request on the actors of a pool. A slot is the index of a pool allocation."""

    def __init__(
        self,
        pool: ReplicaPool,
        request: RolloutRequest,
        spec: RunSpec,
        runner: PolicyRunner,
        journal: Journal | None = None,
        at_work: Callable[[], None] = lambda: None,
        no_weights: Callable[[], str] = lambda: "",
        prefill: PrefillActors | None = None,
        history: PromptHistory | None = None,
    ) -> None:
        """`at_work` is called at an engine's first message, when the engines are busy and the driver is idle.
        `no_weights` returns why a joining actor cannot load the step's weights, or "" if it can.
        `prefill`: see Precomputation. `history` supplies earlier responses for drafting.
        """
        self._pool = pool
        self.request = request
        self._spec = spec
        self._runner = runner
        self._journal = StageJournal(journal, request)
        self._at_work = at_work
        self._no_weights = no_weights
        self._history = history or PromptHistory(spec)
        self._table = self._table_of([item for prompt in request.prompts for item in request.items(prompt)])
        self._prompts = {prompt.prompt_id: prompt for prompt in request.prompts}
        self._finished: dict[str, list[Rollout]] = {prompt_id: [] for prompt_id in self._prompts}
        self._gate = GroupGate(request.groups, request.selection.must_include if request.selection else ())
        self._from_earlier: list[Group] | None = None
        self.resumed: tuple[int, int] = (0, 0)
        """Number of samples that an earlier step deferred, and of their tokens."""
        self._requests: list[Replica] = []
        """Actors by request number."""
        self._streams: dict[asyncio.Task[None], Replica] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._aborting: set[int] = set()
        self._apart = prefill is not None
        self._precomputation = Precomputation(
            request, spec.timeouts.sync_s, prefill=prefill, in_flight=spec.schedule.in_flight
        )
        self._ahead: dict[int, asyncio.Task[None]] = {}
        """By request number: the task that fetches the KV of its prompts or prefixes."""
        self._lost: set[str] = set()
        self._lost_in_a_row = 0
        """Actors that died or failed to start since the last sample finished."""
        self._events: asyncio.Queue[_Message | Exception] = asyncio.Queue()
        self._asked_s: float | None = None
        self._busy: BusyCores | None = None
        self.host_busy_cores = 0.0
        """Mean number of busy cores on the driver's machine during generation."""
        self.over = False
        """Whether no sample is left, or the stage was cancelled."""

    @property
    def step(self) -> int:
        return self.request.call.step

    @property
    def progress(self) -> dict[SampleKey, int]:
        """Tokens of the running samples, as of the last heartbeats."""
        return self._table.progress

    async def groups(self) -> AsyncIterator[Group]:
        """Yield groups as they complete. Raises an actor's error, JournalError, or ReplicaLost if no actor is left."""
        try:
            self.load_from_journal()
            for group in self._from_earlier or ():
                yield group
            if self._gate.left:
                async with self._pool.turn(self.request.call):
                    async for group in self._generated():
                        yield group
            self._journal.take(self._gate.admitted)
            self.over, self.host_busy_cores = True, self._busy.mean() if self._busy else 0.0
            # The policy takes time to update its estimates; here this overlaps with scoring the last groups.
            if self._asked_s is not None:
                self._ask(Generated())
        finally:
            self.over = True
            await self._stop_streams()

    async def _generated(self) -> AsyncIterator[Group]:
        actors = sum(map(self._pool.expects, range(len(self._pool.allocations))))
        what = "step %d: %s: %d samples of %d prompts to generate on %d actors; %d of them resume with %d tokens"
        log.info(what, self.step, self.request.work, len(self._table.items), len(self._prompts), actors, *self.resumed)
        self._asked_s = monotonic_s()
        self._runner.begin(self._table)
        self._submit_waiting()
        heard = False
        while self._gate.left:
            for group in self._handle(await self._events.get()):
                yield group
            if not heard:
                heard = True
                self._at_work()
        self.over = True
        if self._finished:
            await self._defer()
        # Wait for the last event of each stream: it becomes the call's row in the ledger.
        await asyncio.gather(*self._streams)

    async def _defer(self) -> None:
        """Abort unfinished samples and journal their tokens for a later step. Raises CallTimeout, and as `groups`."""
        actors = tuple({actor.name: actor for actor in self._streams.values()}.values())
        if left := await self._abort_all(*actors):
            names = ", ".join(sorted({self._streams[task].name for task in left}))
            raise CallTimeout(f"{names} kept samples for longer than timeouts.drain_s after an abort")
        while not self._events.empty():
            match self._events.get_nowait():
                case Exception() as error:
                    raise error
                case _Message(request, GroupsFinished(groups=groups)):
                    for rollouts in groups:
                        self._take(request, rollouts)
                case _Message(request, ReplicaLost() as lost):
                    log.warning(
                        "%s died; its unfinished samples are regenerated: %s", self._requests[request].name, lost
                    )
        deferred = self._table.defer_unfinished()
        log.info("step %d: %d started samples deferred to later steps", self.step, len(deferred))
        self._journal.keep(deferred)

    # -- actors that join and leave (rlhfless.fleet.pool)

    def joined(self, slot: int) -> None:
        """Assign work to the actor that has joined at a slot."""
        self._on_event(Serving(slot))

    def missed(self, slot: int) -> None:
        """Unassign the samples of a slot whose actor failed to start."""
        if self._table.lose(slot).size:
            self._on_event(Lost(slot, self._table.unassigned), f"no actor came up at slot {slot}")

    async def drain(self, actor: Replica) -> None:
        """Stop assigning samples to an actor, and migrate those it has."""
        actor.drain()
        log.info("step %d: %s drains", self.step, actor.name)
        slot = self._slot_of(actor)
        if self._table.lose(slot).size:
            self._on_event(Lost(slot, self._table.unassigned))
        await self._abort_all(actor)

    async def _abort_all(self, *actors: Replica) -> list[asyncio.Task[None]]:
        """Abort all samples on these actors; return the streams that are still open after `timeouts.drain_s`."""
        limit_s = monotonic_s() + self._spec.timeouts.drain_s
        while (streams := [task for task, of in self._streams.items() if of in actors]) and monotonic_s() < limit_s:
            # An abort may arrive before its request, so repeat it until all streams have ended.
            for actor in actors:
                on = [number for number, request in self._table.request_of.items() if self._requests[request] is actor]
                await self._abort(actor, on)
            await asyncio.wait(streams, timeout=self._spec.generation.progress_interval_s)
        return streams

    # -- decisions

    def _on_event(self, event: Event, loss: str = "") -> None:
        """Handle an event from outside the stage. `loss`: why an actor died. Errors are raised by `groups`."""
        if self._asked_s is None or self.over:
            return
        try:
            if loss:
                self._count_loss(loss)
            self._ask(event)
        except Exception as error:
            self._events.put_nowait(error)

    def _ask(self, event: Event) -> None:
        self._runner.ask(event, self.step)
        self._submit_waiting()
        self._abort_misplaced()

    def _submit_waiting(self) -> None:
        """Submit waiting samples to serving actors, in the order of their assignment."""
        ready: dict[int, list[int]] = {}
        for number in self._table.waiting:
            ready.setdefault(int(self._table.slot_of[number]), []).append(number)
        for slot, numbers in ready.items():
            actor = self._pool.at(slot)
            if actor is not None and actor.state is ReplicaState.SERVING:
                for part in self._parts(numbers):
                    self._submit(actor, part)

    def _parts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Split samples into requests. With prefill actors, the first request runs while others wait for their
        prompts."""
        if not self._apart:
            return [list(numbers)]
        prompts = [self._table.items[sample].prompt_token_ids for sample in numbers]
        parts = pieces(prompts, list(map(len, prompts)), self._spec.generation.engine.batch_tokens)
        return [[numbers[index] for index in part] for part in parts]

    def _submit(self, actor: Replica, numbers: Sequence[int]) -> None:
        number, served = len(self._requests), actor.served
        assert served is not None, "an actor that serves has weights"
        self._requests.append(actor)
        self._busy = self._busy or BusyCores()
        for sample in numbers:
            del self._table.waiting[sample]
            self._table.request_of[sample] = number
        request = GenerateRequest(
            items=tuple(self._table.items[sample] for sample in numbers),
            sampling=self.request.sampling,
            version=served,
            actor=actor.name,
            progress_interval_s=self._spec.generation.progress_interval_s,
            heartbeat_s=self._spec.recovery.heartbeat_s,
            timeout_s=self._spec.timeouts.generate_s,
            or_newer=self._spec.schedule.in_flight,
            earlier=self._history.responses({self._table.items[sample].prompt_id for sample in numbers}),
        )
        task = asyncio.create_task(self._stream(actor, number, request))
        self._streams[task] = actor
        task.add_done_callback(self._streams.pop)

    def _abort_misplaced(self) -> None:
        """Abort samples that run on an actor other than that of their assigned slot."""
        strays: dict[str, list[int]] = {}
        replicas = [self._pool.at(slot) for slot in range(len(self._pool.allocations))]
        for sample, request in self._table.request_of.items():
            actor, home = self._requests[request], int(self._table.slot_of[sample])
            if home != UNASSIGNED and replicas[home] is not actor and sample not in self._aborting:
                strays.setdefault(actor.name, []).append(sample)
        for name, samples in strays.items():
            self._aborting.update(samples)
            task = asyncio.create_task(self._call_back(self._pool[name], samples))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _call_back(self, actor: Replica, samples: Sequence[int]) -> None:
        try:
            await self._abort(actor, samples)
        except Exception as error:
            self._events.put_nowait(error)
        finally:
            self._aborting.difference_update(samples)

    async def _abort(self, actor: Replica, samples: Sequence[int]) -> None:
        for request in {
            self._table.request_of[sample] for sample in samples if sample in self._table.request_of
        } & self._ahead.keys():
            self._ahead[request].cancel()
        keys = [self._table.items[sample].key for sample in samples]
        with contextlib.suppress(ReplicaLost):  # its streams raise that too
            await actor.call(
                "abort", self.request.call, keys, timeout_s=self._spec.timeouts.sync_s, waiting_for="an abort"
            )

    # -- messages of the actors

    async def _stream(self, actor: Replica, number: int, request: GenerateRequest) -> None:
        try:
            await self._prepare(actor, number, request)
            events = actor.stream(
                self.request.work, "generate", self.request.call, request, timeout_s=self._spec.recovery.heartbeat_s
            )
            async for event in events:
                self._events.put_nowait(_Message(number, event))
        except ReplicaLost as lost:
            self._events.put_nowait(_Message(number, lost))
        except Exception as error:
            self._events.put_nowait(error)

    async def _prepare(self, actor: Replica, number: int, request: GenerateRequest) -> None:
        """Give the actor the KV of the prompts or shared prefixes; an abort cancels the wait."""
        ahead = asyncio.create_task(self._precomputation.before(actor, request.items, request.version))
        self._ahead[number] = ahead
        try:
            await asyncio.wait([ahead])
        finally:
            ahead.cancel()
            del self._ahead[number]
        if not ahead.cancelled():
            ahead.result()

    def _handle(self, event: _Message | Exception) -> Iterable[Group]:
        if isinstance(event, Exception):
            raise event
        match event.event:
            case GroupsFinished(groups=groups):
                for rollouts in groups:
                    self._take(event.request, rollouts)
                self._submit_waiting()
                for rollouts in groups:
                    yield from self._completed(rollouts[0].prompt_id)
            case Progress(tokens=tokens, ended=ended):
                self._table.apply_heartbeat(event.request, tokens, ended)
                self._heartbeat()
            case ReplicaLost() as lost:
                self._lose(event.request, lost)

    def _heartbeat(self) -> None:
        """Ask the policy at most once per interval: every actor sends its own heartbeats."""
        now_s = monotonic_s()
        if self._asked_s is not None and now_s - self._asked_s >= self._spec.generation.progress_interval_s:
            self._asked_s = now_s
            self._ask(Heartbeat())

    def _take(self, request: int, rollouts: Sequence[Rollout]) -> None:
        """Journal finished samples, and requeue aborted ones for another actor."""
        current = [rollout for rollout in rollouts if self._table.is_on(request, rollout.key)]
        ended = [rollout for rollout in current if rollout.finish_reason != FinishReason.ABORT]
        if ended:
            self._lost_in_a_row = 0
        self._journal.add(ended)
        self._history.ended(ended)
        for rollout in current:
            self._table.take_back(rollout)
        for rollout in ended:
            self._finished[rollout.prompt_id].append(rollout)

    def _lose(self, request: int, error: ReplicaLost) -> None:
        """Requeue the samples of a request whose actor died. The actor's first one also reports the slot as Lost."""
        actor = self._requests[request]
        slot = self._slot_of(actor)
        gone = self._table.restart_lost(request)
        if first := actor.name not in self._lost:
            self._lost.add(actor.name)
            self._table.lose(slot)
        what = "step %d: %s died; %d samples restart on other actors: %s"
        log.warning(what, self.step, actor.name, gone.size, error)
        if first:
            self._count_loss(str(error))
        if first or self._table.unassigned.size:
            self._ask(Lost(slot, self._table.unassigned))
        else:
            self._submit_waiting()

    def _count_loss(self, why: str) -> None:
        """Count a lost actor. Raises ReplicaLost after too many in a row, or if no actor is left and none can join."""
        self._lost_in_a_row += 1
        if not self._pool.serving() and (reason := self._no_weights()):
            raise ReplicaLost(f"no actor is left, and none can load the weights: {reason} ({why})")
        if self._lost_in_a_row > len(self._pool.allocations) * (self._spec.recovery.per_step + 1):
            raise ReplicaLost(f"{self._lost_in_a_row} actors were lost before a single sample ended: {why}")

    def _table_of(self, items: Sequence[SampleItem]) -> InFlightSamples:
        return InFlightSamples(self.step, items, len(self._pool.allocations))

    def _slot_of(self, actor: Replica) -> int:
        return next(slot for slot, allocation in enumerate(self._pool.allocations) if allocation is actor.allocation)

    # -- groups

    def load_from_journal(self) -> bool:
        """Load the request's samples from the journal, once; return whether any are left to generate."""
        if self._from_earlier is None:
            self._from_earlier = list(self._from_journal())
        return bool(self._gate.left)

    def _from_journal(self) -> Iterable[Group]:
        """Yield the groups that the journal's samples complete, in the order of completion."""
        missing = {item.key: item for item in self._table.items}
        for rollout in self._journal.load(self._table.items):
            if rollout.finish_reason == FinishReason.ABORT:
                missing[rollout.key] = replace(missing[rollout.key], prior=rollout)
            else:
                self._finished[rollout.prompt_id].append(rollout)
                self._history.ended([rollout])
                del missing[rollout.key]
                yield from self._completed(rollout.prompt_id)
        priors = [item.prior for item in missing.values() if item.prior is not None]
        self.resumed = len(priors), sum(len(prior.token_ids) for prior in priors)
        self._table = self._table_of(list(missing.values()))

    def _completed(self, prompt_id: str) -> Iterable[Group]:
        """Yield the prompt's group when its last sample finishes, unless it is deferred to a later step."""
        if len(self._finished.get(prompt_id, ())) == self.request.samples_per_prompt:
            complete = sorted(self._finished.pop(prompt_id), key=lambda rollout: rollout.sample_index)
            if self._gate.admits(prompt_id):
                yield Group.of(self._prompts[prompt_id], complete)

    async def _stop_streams(self) -> None:
        tasks = [*self._streams, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of a request's stream, or the error that ended the stream."""

    request: int
    event: GenerationEvent | ReplicaLost
