"""Learning that begins while a step is drawn (`schedule.streaming`).

Groups that are complete, scored and have their columns go to the learner in parts, which adds up their gradients; its
optimiser steps when the last ones are there. So what is left to learn at the end of generation is what came last.

Invariant: what the parts are follows from the spec and from the order in which groups became complete, which the
journal keeps, and not from when the learner had time for them. So a step that is done again, or resumed, adds up in the
same order, and takes the same update to the last bit; another order, or a whole batch, gives it up to rounding.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from rlhfless.algorithms.batch import NO_DENOMINATORS, PackedBatch
from rlhfless.algorithms.passes import LastParts, Part
from rlhfless.fleet.pool import RECOVERABLE
from rlhfless.functions.base import Call
from rlhfless.loop.failures import usable_of
from rlhfless.loop.redraws import has_signal
from rlhfless.loop.rollout_request import RolloutRequest
from rlhfless.records import Experience, FunctionName, Group
from rlhfless.spec import RunSpec
from rlhfless.spec.streaming import PARTS

log = logging.getLogger(__name__)


class Streaming:
    """The parts of one try of a step."""

    def __init__(
        self,
        spec: RunSpec,
        request: RolloutRequest,
        packed: Callable[[Experience], PackedBatch],
        accumulate: Callable[[Call, Part], Awaitable[None]],
        finish: Callable[[Call, LastParts, asyncio.Event], Awaitable[Mapping[str, float]]],
    ) -> None:
        """`packed`: what the learner gets of some groups. `accumulate` and `finish`: see Run."""
        self._spec = spec
        self._call = request.call
        self._packed = packed
        self._accumulate, self._finish = accumulate, finish
        self._tried = uuid.uuid4().hex
        self._missing = request.groups
        """Groups that are still to come."""
        self._size = math.ceil(self._missing / PARTS)
        self._groups: list[Group] = []
        """What is learned from, in the order in which it came."""
        self._whole = NO_DENOMINATORS
        self.sent = 0
        """Parts that the learner has added up."""
        self._came = asyncio.Event()
        self._fault: Exception | None = None

    def add(self, group: Group) -> None:
        """A group that is complete, in the order of completion."""
        kept = usable_of(Experience((group,)), self._spec.scoring).groups
        self._groups += filter(has_signal, kept) if self._spec.algorithm.needs.with_signal else kept
        self._missing -= 1
        self._came.set()

    async def beside(self, drawing: Coroutine[Any, Any, Experience]) -> Experience:
        """What `drawing` gives, with the learner at work meanwhile. If the learner is lost, `finish` raises that."""
        sending = asyncio.create_task(self._send())
        try:
            experience = await drawing
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return experience

    async def _send(self) -> None:
        """Send each part once it is whole, as long as groups are drawn; the last one goes with `finish`."""
        try:
            while self._missing > 0:
                if len(self._groups) < (self.sent + 1) * self._size:
                    self._came.clear()
                    await self._came.wait()
                    continue
                await self._accumulate(self._call, Part(self._tried, self.sent, self._part(self.sent)))
                self.sent += 1
        except RECOVERABLE as fault:
            log.warning("step %d: the learner stopped while it was drawn: %s", self._call.step, fault)
            self._fault = fault

    def _part(self, number: int) -> PackedBatch:
        batch = self._packed(Experience(tuple(self._groups[number * self._size : (number + 1) * self._size])))
        self._whole = self._whole.plus(batch.denominators)
        return batch

    async def finish(self, learned_from: Experience, sent: asyncio.Event) -> Mapping[str, float]:
        """The training step, with the parts that were not sent; returns its metrics. `learned_from`: all that the step
        learns from. `sent` is set when the call has left the driver. Raises what stopped the learner."""
        if self._fault is not None:
            raise self._fault
        if not self._groups:  # none has a signal, and then all are learned from
            self._groups = list(learned_from.groups)
        assert len(self._groups) == len(learned_from.groups), "each group came once"
        rest = tuple(map(self._part, range(self.sent, math.ceil(len(self._groups) / self._size))))
        planned = self._spec.planned_updates(FunctionName.LEARNER)
        return await self._finish(self._call, LastParts(self._tried, self.sent, rest, self._whole, planned), sent)
