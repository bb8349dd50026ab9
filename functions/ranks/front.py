"""The base of functions whose work is done by ranks: learner, reference, reward model.

The Serve replica is a front that brings no torch; ranks are plain Ray actors that form a torch.distributed group and
share the model's parameters. One rank takes the same path as many. Each call goes to all ranks, and a rank works on its
share of the sequences. A lost rank breaks the whole group: the fleet starts a new replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import ray

from rlhfless.functions.base import Call, Function, RankedSettings, ReplicaInfo, Reply
from rlhfless.functions.ranks.group import RankGroup
from rlhfless.records import SleepTier, Slept
from rlhfless.scaling.accelerators import NODE_LABEL

SILENT_SHARE = 0.5
"""The share of a lease in which every rank must give a sign of life. Drivers ask for one four times in a lease, and
give up a replica that is silent for a whole one."""


class RankedFunction(Function):
    """A front that owns a rank actor for each of `settings.rank_bindings`. Awaitable, as Serve wants it."""

    named: str
    """The function, in errors."""
    actor: ClassVar[type]
    """The class of a rank's actor: a RankActor."""

    async def __init__(self, settings: RankedSettings) -> None:  # type: ignore[misc]
        super().__init__(settings)
        self._lease_s = settings.lease.renewed_s
        self._looking: asyncio.Task[list[Any]] | None = None
        ranks = [self._rank_actor(settings, rank) for rank in range(len(settings.rank_bindings))]
        self._group = RankGroup(ranks, settings.call_timeout_s, self.named)
        with self.starting():
            # Rank 0 opens the rendezvous on its own node; the others need its address.
            on_one_node = len(set(await self._group.all("node"))) == 1
            address = await self._group.first("rendezvous", on_one_node)
            await self._group.all("start", address, on_one_node)

    def _rank_actor(self, settings: RankedSettings, rank: int) -> Any:
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "label_selector": {NODE_LABEL: settings.rank_bindings[rank].node},
            "max_restarts": 0,
            # Threads of their own, so that a rank that computes still answers `alive`, and is waited for meanwhile.
            "concurrency_groups": {"signs_of_life": 1, "waits": 1},
        }
        make: Any = ray.remote(**options)  # type: ignore[call-overload]  # Ray's types do not know every option
        return make(self.actor_of(settings)).remote(settings, rank)

    def actor_of(self, settings: Any) -> type:  # noqa: ARG002 - of most functions it is the same for all
        """The class of a rank's actor."""
        return self.actor

    async def describe(self, call: Call) -> Reply[ReplicaInfo]:
        """The description of this replica; `pids` are the ranks'. Raises FunctionBroken if a rank is lost."""
        self.admit(call)
        start_s = time.time()
        pids = await self._group.all("pid")
        return self.reply(self.info(tuple(pids), self._step_of_weights), start_s)

    @property
    def _step_of_weights(self) -> int:
        """The last training step of its weights."""
        return 0

    async def renew(self, call: Call) -> Reply[None]:
        """See Function.renew; silent while a rank is, and broken if one is for SILENT_SHARE of a lease."""
        self.admit(call)
        start_s = time.time()
        if self._looking is None or self._looking.done():
            # Ended before the driver gives up the whole replica, so that the rank is named.
            limit_s = self._lease_s * SILENT_SHARE
            self._looking = asyncio.create_task(self._group.all("alive", limit_s=limit_s))
        await asyncio.shield(self._looking)
        return self.reply(None, start_s)

    async def sleep(self, call: Call, tier: SleepTier) -> Reply[Slept]:  # noqa: ARG002 - their state is nowhere else
        """See Function.sleep: in HOST, whatever is asked for."""
        self.admit(call)
        start_s = time.time()
        slept: list[Slept] = await self._group.all("sleep")
        freed, held = sum(each.freed_bytes for each in slept), sum(each.held_bytes for each in slept)
        return self.reply(Slept(SleepTier.HOST, freed, held), start_s)

    async def wake(self, call: Call) -> Reply[None]:
        """See Function.wake."""
        self.admit(call)
        start_s = time.time()
        await self._group.all("wake")
        return self.reply(None, start_s)

    async def stop(self, call: Call) -> Reply[None]:
        """End the ranks; the front cannot work after that."""
        self.admit(call)
        start_s = time.time()
        self._group.end()
        return self.reply(None, start_s)
