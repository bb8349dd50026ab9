"""The generation stage with counted samples.

It overrides the methods of GenerationStage that handle single samples, which are to become methods of its samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhfless.fleet.replica import Replica, ReplicaLost
from rlhfless.orchestrator.generation import GenerationStage, _Message
from rlhfless.orchestrator.in_flight_samples import StageJournal
from rlhfless.records import ReplicaState
from rlhfless.scaling.policy import UNASSIGNED, Heartbeat, Ints, Lost
from rlhfless.scaling.selection import GroupGate
from rlhfless.sim.counted import NONE, CountedGroup, CountedRequest, CountedSamples
from rlhfless.sim.engines import StepEngines
from rlhfless.util.clock import unix_s


@dataclass(frozen=True, slots=True)
class Complete:
    """Groups that have become complete since the last message."""

    groups: Ints


@dataclass(frozen=True, slots=True)
class Look:
    """All engines have reached this time."""


class SimulatedStage(GenerationStage):
    """Generates the samples of one request on simulated actors."""

    def __init__(
        self,
        pool: Any,
        request: Any,
        spec: Any,
        runner: Any,
        engines: StepEngines,
        move_s: float,
    ) -> None:
        self._pool, self.request, self._spec, self._runner = pool, request, spec, runner
        self._engines, self._move_s = engines, move_s
        self._journal = StageJournal(None, request)
        self._at_work, self._no_weights = lambda: None, lambda: ""
        self._gate = GroupGate(request.groups, ())
        self._from_earlier = []
        self.resumed = (0, 0)
        self._requests = []
        self._slots: list[int] = []
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._streams, self._calls = {}, set()
        self._lost, self._lost_in_a_row = set(), 0
        self._events = asyncio.Queue()
        self._asked_s, self._busy, self.host_busy_cores, self.over = None, None, 0.0, False
        self._finished, self._prompts = {}, request.prompts
        self._table = SimpleNamespace(items=request.batch.group)
        self._timer: asyncio.TimerHandle | None = None

    async def _generated(self) -> AsyncIterator[Any]:
        batch = self.request.batch
        self._progress = self._engines.begin(batch, lambda groups: self._events.put_nowait(Complete(groups)))
        self._table = CountedSamples(self._progress, len(self._pool.allocations))
        self._table.items = batch.group
        self._aborting = np.zeros(batch.samples, np.bool_)
        per_sample = batch.prompt_tokens[batch.group] + batch.response_tokens
        self._tokens = np.bincount(batch.group, per_sample, batch.groups).astype(np.int64).tolist()
        self._look_s = self._spec.generation.progress_interval_s
        self._arm()
        try:
            async for group in super()._generated():
                yield group
        finally:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._events.put_nowait(Look())
        self._arm()

    def _handle(self, event: Any) -> Iterable[Any]:
        match event:
            case Complete(groups):
                self._end_requests()
                for number in groups.tolist():
                    prompt = self._prompts[number]
                    if self._gate.admits(prompt.prompt_id):
                        yield CountedGroup(prompt, number, self._tokens[number], self._progress.batch)
            case Look():
                self._ask(Heartbeat())
            case _Message(request, ReplicaLost() as lost):
                self._lose(request, lost)
            case _:
                raise event

    def _submit_waiting(self) -> None:
        actors = [self._pool.at(slot) for slot in range(len(self._pool.allocations))]
        serving = np.array([actor is not None and actor.state is ReplicaState.SERVING for actor in actors])
        for slot, numbers in self._table.take_waiting(serving).items():
            self._submit_at(slot, actors[slot], numbers)

    def _submit_at(self, slot: int, actor: Replica, numbers: Ints) -> None:
        number = len(self._requests)
        self._requests.append(actor)
        self._slots.append(slot)
        self._table.request[numbers] = number
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._stream(actor, number, CountedRequest(numbers, ended)))
        self._streams[task] = actor
        task.add_done_callback(self._streams.pop)

    async def _prepare(self, actor: Replica, number: int, request: Any) -> None: ...

    def _end_requests(self) -> None:
        """End the streams of requests that have no sample left."""
        request, table = self._table.request, self._progress.table
        ended = table.finished & (table.finish_s <= unix_s() + 1e-9)  # engines may be ahead of the clock
        on = request[(request >= 0) & ~ended]
        left = np.bincount(on, minlength=len(self._requests))
        for number in [number for number in self._ended if not left[number]]:
            ended = self._ended.pop(number)
            if not ended.done():
                ended.set_result(None)

    def _lose(self, request: int, error: ReplicaLost) -> None:
        actor, slot, table = self._requests[request], self._slots[request], self._table
        self._ended.pop(request, None)
        table.restart(np.flatnonzero((table.request == request) & ~table.finished))
        if first := actor.name not in self._lost:
            self._lost.add(actor.name)
            table.lose(slot)
            self._count_loss(str(error))
        if first or table.unassigned.size:
            self._ask(Lost(slot, table.unassigned))
        else:
            self._submit_waiting()

    def _abort_misplaced(self) -> None:
        table, slots = self._table, np.array([*self._slots, NONE])
        on = slots[table.request]
        strays = (on >= 0) & (on != table.slot_of) & (table.slot_of != UNASSIGNED) & ~table.finished & ~self._aborting
        if not strays.any():
            return
        for slot in np.unique(on[strays]).tolist():
            samples = np.flatnonzero(strays & (on == slot))
            self._aborting[samples] = True
            actor = self._requests[int(table.request[samples[0]])]
            task = asyncio.create_task(self._call_back(actor, samples))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _call_back(self, actor: Replica, samples: Any) -> None:
        try:
            await self._abort(actor, samples)
        except Exception as error:
            self._events.put_nowait(error)

    async def _abort(self, actor: Replica, samples: Any) -> None:
        numbers = self._table.request[samples].copy()
        try:
            await actor.call(
                "abort", self.request.call, samples, timeout_s=self._spec.timeouts.sync_s, waiting_for="an abort"
            )
            await asyncio.sleep(self._move_s)
        except ReplicaLost:
            return  # its streams raise that too
        finally:
            self._aborting[samples] = False
        self._table.restart(samples[self._table.request[samples] == numbers])
        self._end_requests()
        self._submit_waiting()

    async def _abort_all(self, *actors: Replica) -> list[Any]:
        for actor in actors:
            mine = [number for number, of in enumerate(self._requests) if of is actor]
            samples = np.flatnonzero(np.isin(self._table.request, mine) & ~self._table.finished)
            if samples.size:
                await self._abort(actor, samples)
        return []

    async def _stop_streams(self) -> None:
        self._end_requests()
        await super()._stop_streams()
