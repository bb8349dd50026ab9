"""Loads that the learner takes part in: with `weights.transport: cuda_ipc` its ranks give a version to the engines on
their GPUs while these load it (rlhfless.weights.buckets). Loads that begin together share a feed; workers that come
after it get another one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rlhfless.fleet.pool import ReplicaPool
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.base import Call
from rlhfless.records import WeightVersion
from rlhfless.scaling.placement import Device
from rlhfless.util.tasks import beside

TOGETHER_S = 0.05
"""Loads that begin within this time share a feed: those of a sync begin at once."""

OFFER_POLL_S = 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


class LearnerLost(ReplicaLost):
    """The learner was lost, or began another step, while it gave weights to engines."""


class Feeding:
    """The learner's part in the loads of generation actors."""

    def __init__(self, learner: ReplicaPool, timeout_s: float) -> None:
        self._learner = learner
        self._timeout_s = timeout_s
        self._waiting: list[Replica] = []
        """The actors of the next feed."""
        self._loading: list[Replica] = []
        """The actors whose loads are under way."""
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
        """Return the result of an actor's load, in which the learner takes part. Raises what the load raises, which
        has a time limit of its own, or LearnerLost."""
        self._waiting.append(actor)
        self._loading.append(actor)
        if self._next is None:
            self._next = asyncio.create_task(self._feed(version, call))
            self._next.add_done_callback(lambda feed: feed.cancelled() or feed.exception())  # its loads may have ended
        try:
            return await beside(load, self._shared(self._next))
        finally:
            self._loading.remove(actor)

    @staticmethod
    async def _shared(feed: asyncio.Task[None]) -> None:
        """Wait for a feed that others wait for, too."""
        await asyncio.shield(feed)

    async def _feed(self, version: WeightVersion, call: Call) -> None:
        """Feed the actors that wait, and again those workers that came too late, until no load of theirs is left."""
        await asyncio.sleep(TOGETHER_S)
        async with self._feeding:
            actors, self._waiting, self._next = self._waiting, [], None
            (allocation,) = self._learner.allocations
            missing = self._loading_workers(actors, allocation.devices)
            while any(missing):
                taken = await self._ask("feed", call, version, missing)
                if not taken:
                    raise LearnerLost(f"{version.label}: the learner has begun another step, and gives it no more")
                loading = self._loading_workers(actors, allocation.devices)
                missing = [min(late - came, left) for late, came, left in zip(missing, taken, loading, strict=True)]
                if any(missing):
                    log.warning(
                        "%s: %d workers did not take the weights in time; fed again", version.label, sum(missing)
                    )

    def _loading_workers(self, actors: Sequence[Replica], devices: Sequence[Device]) -> list[int]:
        """The workers on each device of those actors that are still loading."""
        on = Counter(device for actor in actors if actor in self._loading for device in actor.allocation.devices)
        return [on[device] for device in devices]

    async def _ask(self, method: str, call: Call, *arguments: object) -> Any:
        what = "the learner's part in a load of weights"
        try:
            learner = next(iter(self._learner.replicas()), None)
            if learner is None:
                raise LearnerLost(f"{what}: there is no learner")
            return await learner.call(method, call, *arguments, timeout_s=self._timeout_s, waiting_for=what)
        except (ReplicaLost, CallTimeout) as error:
            raise LearnerLost(str(error)) from error
