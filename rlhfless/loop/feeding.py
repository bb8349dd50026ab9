"""Loads that the learner takes part in: with `weights.transport: cuda_ipc` its ranks give a version to the engines on
their GPUs while these load it (rlhfless.weights.buckets). Loads that begin together share a feed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.records import WeightVersion
from rlhfless.util.tasks import gather_or_cancel

TOGETHER_S = 0.05
"""Loads that begin within this time share a feed: those of a sync begin at once."""

OFFER_POLL_S = 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


class LearnerLost(ReplicaLost):
    """The learner was lost while it gave weights to engines."""


class Feeding:
    """The learner's part in the loads of generation actors."""

    def __init__(self, learner: ReplicaPool, timeout_s: float) -> None:
        self._learner = learner
        self._timeout_s = timeout_s
        self._waiting: list[Replica] = []
        """The actors of the next feed."""
        self._next: asyncio.Task[None] | None = None
        self._feeding = asyncio.Lock()

    async def wait_offered(self, wanted: Callable[[], WeightVersion], call: Call) -> None:
        """Wait until the learner can give the version that is wanted then: not while it learns another step. Raises
        LearnerLost."""
        while True:
            if await self._ask("offers", call, wanted()):
                return
            await asyncio.sleep(OFFER_POLL_S)

    async def during(self, load: Coroutine[Any, Any, T], actor: Replica, version: WeightVersion, call: Call) -> T:
        """The result of an actor's load, in which the learner takes part. Raises what the load raises, or
        LearnerLost."""
        self._waiting.append(actor)
        if self._next is None:
            self._next = asyncio.create_task(self._feed(version, call))
        return (await gather_or_cancel(load, self._shared(self._next)))[0]  # type: ignore[no-any-return]

    @staticmethod
    async def _shared(feed: asyncio.Task[None]) -> None:
        """Wait for a feed that others wait for, too."""
        await asyncio.shield(feed)

    async def _feed(self, version: WeightVersion, call: Call) -> None:
        await asyncio.sleep(TOGETHER_S)
        async with self._feeding:
            actors, self._waiting, self._next = self._waiting, [], None
            on = Counter(device for actor in actors for device in actor.allocation.devices)
            (allocation,) = self._learner.allocations
            taken = await self._ask("feed", call, version, [on[device] for device in allocation.devices])
            if taken != sum(on.values()):
                log.warning("%s: %d of %d workers have taken the weights", version.label, taken, sum(on.values()))

    async def _ask(self, method: str, call: Call, *arguments: object) -> int:
        what = "the learner's part in a load of weights"
        try:
            learner = next(iter(self._learner.replicas()), None)
            if learner is None:
                raise LearnerLost(f"{what}: there is no learner")
            answer: int = await learner.call(method, call, *arguments, timeout_s=self._timeout_s, waiting_for=what)
        except (ReplicaLost, CallTimeout) as error:
            raise LearnerLost(str(error)) from error
        return answer
